"""Fitted constants as YAML, and the table of their errors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import yaml

from kvsim.fit.calibrate import Calibration, HeldOut, at_bounds, errors_on
from kvsim.fit.observed import Observed

PHASES = ("decode", "prefill", "mixed")


class Errors(NamedTuple):
    """Median and 95th percentile, in percent."""

    median: float
    p95: float

    def __str__(self) -> str:
        return f"{self.median:.1f} / {self.p95:.1f}"


def errors_of(errors: np.ndarray) -> Errors | None:
    known = errors[~np.isnan(errors)]
    if not len(known):
        return None
    return Errors(*(round(float(np.percentile(known, q)) * 100, 2) for q in (50, 95)))


def phases_of(calibration: Calibration) -> np.ndarray:
    return np.concatenate([group.phases for group in calibration.observed.groups])


def table(calibrations: list[Calibration], held: list[HeldOut]) -> list[tuple[str, ...]]:
    """Header, then a line for each set and phase: rows, and median / p95 % error fitted, held out,
    and with its (model, TP) left out."""
    lines = [("set", "phase", "rows", "fitted", "rows held out", "model and TP held out")]
    for one, out in zip(calibrations, held, strict=True):
        phases = phases_of(one)
        here = [phase for phase in PHASES if (phases == phase).any()]
        for phase in [None, *here] if len(here) > 1 else [None]:
            kept = np.ones(len(phases), bool) if phase is None else phases == phase
            columns = (one.errors, out.same, out.unseen)
            cells = [None if column is None else errors_of(column[kept]) for column in columns]
            texts = ["-" if cell is None else str(cell) for cell in cells]
            name = one.observed.name if phase is None else ""
            lines.append((name, phase or "all", f"{int(kept.sum()):,}", *texts))
    if len(calibrations) > 1:
        columns = zip(
            *((one.errors, *out) for one, out in zip(calibrations, held, strict=True)), strict=True
        )
        pooled = [
            np.concatenate([part for part in column if part is not None] or [np.empty(0)])
            for column in columns
        ]
        texts = [str(errors_of(column)) if len(column) else "-" for column in pooled]
        lines.append(("all sets", "all", f"{len(pooled[0]):,}", *texts))
    return lines


def test_table(
    calibrations: list[Calibration], others: list[Observed], *, keep_kernels: bool
) -> list[tuple[str, ...]]:
    """Errors on rows of other files: of (model, TP) that the constants were fitted on, and not."""
    lines = [("test set", "phase", "rows", "model and TP seen", "rows", "unseen")]
    by_key = {one.observed[:4]: one for one in calibrations}
    for other in others:
        if (fitted := by_key.get(other[:4])) is None:
            lines.append((other.name, "not fitted", "-", "-", "-", "-"))
            continue
        known = {group.name for group in fitted.observed.groups}
        errors = errors_on(fitted, other, keep_kernels=keep_kernels)
        phases = np.concatenate([group.phases for group in other.groups])
        is_seen = np.concatenate(
            [np.full(len(group.seconds), group.name in known) for group in other.groups]
        )
        here = [phase for phase in PHASES if (phases == phase).any()]
        for phase in [None, *here] if len(here) > 1 else [None]:
            kept = np.ones(len(phases), bool) if phase is None else phases == phase
            cells: list[str] = []
            for mask in (kept & is_seen, kept & ~is_seen):
                cells += [f"{int(mask.sum()):,}", str(errors_of(errors[mask]) or "-")]
            lines.append((other.name if phase is None else "", phase or "all", *cells))
    return lines


def as_yaml(calibrations: list[Calibration], held: list[HeldOut], files: list[str]) -> str:
    """A list of sets. `constants` of steps and serving runs go under engine.step_time.constants."""
    plain = [_plain(one, out, files) for one, out in zip(calibrations, held, strict=True)]
    head = (
        "# Step-time constants by kvsim fit. errors: median and 95th percentile in %, of the rows\n"
        "# fitted, of rows held out, and of whole (model, TP) held out.\n"
    )
    return head + yaml.safe_dump(plain, sort_keys=False, width=96)


def _plain(one: Calibration, out: HeldOut, files: list[str]) -> dict[str, object]:
    observed = one.observed
    constants = {name: float(f"{value:.4g}") for name, value in one.constants.items()}
    if observed.kind == "kernel" and "layer_us" in constants:
        constants["kernel_us"] = constants.pop("layer_us")  # of one kernel, not of a layer
    phases = phases_of(one)
    errors = {"fitted": one.errors, "held_out": out.same, "model_and_tp_held_out": out.unseen}
    return {
        "gpu": observed.gpu,
        "engine": observed.engine,
        "dtype": observed.dtype,
        "constants": constants,
        "at_a_bound": at_bounds(one),
        "fitted_on": {
            "files": list(files),
            "rows": observed.num_rows,
            "models": [group.name for group in observed.groups],
        },
        "errors": {
            name: {
                phase: list(found)
                for phase in ("all", *PHASES)
                if (found := errors_of(of[(phases == phase) | (phase == "all")])) is not None
            }
            for name, of in errors.items()
            if of is not None
        },
    }
