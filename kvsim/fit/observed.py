"""What was measured, grouped by what decides which constants it can tell."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvsim.fit.serving import Clients, tpot_s
from kvsim.latency.demand import Load, Operators
from kvsim.latency.roofline import Machine, step_s


class Group(NamedTuple):
    """Rows of one model at one tensor-parallel size: loads (steps) or clients (serving runs), as
    arrays; seconds of a step, or of an output token; and the phase of each row."""

    model: str
    tensor: int
    ops: Operators
    load: Load | Clients
    seconds: np.ndarray
    phases: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.model} tp {self.tensor}"

    def predicted_s(self, machine: Machine) -> np.ndarray:
        machine = machine._replace(ops=self.ops)
        if isinstance(self.load, Clients):
            return tpot_s(machine, self.load)
        return step_s(machine, self.load) + np.zeros(len(self.seconds))

    def rows(self, mask: np.ndarray) -> Group:
        load = type(self.load)(*(column[mask] for column in self.load))
        return self._replace(load=load, seconds=self.seconds[mask], phases=self.phases[mask])


class Observed(NamedTuple):
    """Groups that share their constants. kind: "step", "sum" (of kernels measured alone, where no
    engine ran), "serving" or "kernel"; `engine` is what ran them, or where they are from."""

    kind: str
    gpu: str
    engine: str
    dtype: str
    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        return f"{self.gpu} {self.engine} {self.dtype} {self.kind}"

    @property
    def num_rows(self) -> int:
        return sum(len(group.seconds) for group in self.groups)

    def where(self, mask: np.ndarray) -> Observed:
        """The rows of the mask, counted through all groups."""
        kept, at = [], 0
        for group in self.groups:
            part = mask[at : at + len(group.seconds)]
            at += len(part)
            if part.any():
                kept.append(group.rows(part))
        return self._replace(groups=tuple(kept))
