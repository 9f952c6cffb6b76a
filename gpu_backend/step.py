"""What passes between the executor and whoever runs its model: a step, and what it found."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from kvsim.engine.plan import BlockMove


class Chunk(NamedTuple):
    """The last `num_new` of a sequence's first `context` tokens, whose KV stands in `blocks`."""

    num_new: int
    context: int
    blocks: list[int]


class Step(NamedTuple):
    """Rows of tokens: one for each decode, then those of the chunks. Behind them come `num_padding`
    rows that are computed for nothing.

    tokens, positions, slots int64 [T]; contexts int64 [S], the decodes' tokens, the newest
    included; tables int64 [S, M], what stands behind a decode's blocks is of no meaning; logits
    are wanted of `rows` int64 [R], those of all decodes first.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    contexts: np.ndarray
    tables: np.ndarray
    chunks: list[Chunk]
    rows: np.ndarray
    num_padding: int = 0


class Ran(NamedTuple):
    """On the device: logits [R, V]; the likeliest token of each row, int64 [R]; and what was sent
    along. Of meaning until the next step runs."""

    logits: Tensor
    likeliest: Tensor
    sent: list[Tensor]


class Runner(Protocol):
    def run(self, moves: list[BlockMove], step: Step, along: list[np.ndarray]) -> Ran:
        """Move blocks, then compute the step, both on their way when this returns. The arrays
        `along`, each of int64 or float64, go to the device with the step."""
        ...

    def read(self, found: Tensor) -> np.ndarray:
        """An int64 tensor of the device, on the host: whatever was on its way has come to its end.
        The one time in a step that the host waits."""
        ...
