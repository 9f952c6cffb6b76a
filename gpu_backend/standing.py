"""The decode set as a batch that stands: rows of host arrays, changed by difference."""

from __future__ import annotations

from itertools import chain

import numpy as np

from gpu_backend.texts import Texts
from kvsim.engine.plan import StepPlan
from kvsim.engine.request import Sequence

FIRST_ROWS, FIRST_COLUMNS = 16, 16


class StandingBatch:
    """Row i is a member of the decode set: its newest token, its context with it, its block table.

    tokens, contexts int64 [rows]; tables int64 [rows, M], what stands behind a row's blocks is of
    no meaning. Rows beyond len(seqs) are free; a row that leaves is filled with the last one.
    """

    def __init__(self, block_size: int) -> None:
        self.seqs: list[Sequence] = []
        self.tokens = np.zeros(FIRST_ROWS, np.int64)
        self.contexts = np.zeros(FIRST_ROWS, np.int64)
        self.tables = np.zeros((FIRST_ROWS, FIRST_COLUMNS), np.int64)
        self._block_size = block_size
        self._row_of: dict[Sequence, int] = {}
        self._joining: list[Sequence] = []  # from the next step on

    def follow(self, plan: StepPlan, texts: Texts) -> None:
        """Take over who joined and left since the plan before, and the blocks that this step
        begins."""
        clock, size = plan.decodes.clock, self._block_size
        for seq in chain(plan.left, plan.joined):  # who did both comes anew, or stays away
            if seq in self._row_of:
                self._remove(seq)
        for seq, row in (
            (seq, self._row_of.get(seq)) for seq in plan.decodes.growing(clock).values()
        ):
            if row is not None:
                number = (int(self.contexts[row]) - 1) // size
                self._widen(number + 1)
                self.tables[row, number] = seq.blocks[number]
        coming, self._joining = self._joining + plan.joined, []
        for seq in coming:
            if seq.joined_at > clock:
                self._joining.append(seq)
            elif seq.joined_at >= 0 and seq not in self._row_of:
                self._add(seq, clock, texts)
        assert len(self.seqs) + plan.num_joining == plan.decodes.num_seqs, (
            "a row for every member that decodes in this step"
        )

    def advance(self, tokens: list[int]) -> None:
        """Every row has made its next token."""
        count = len(self.seqs)
        self.tokens[:count] = tokens
        self.contexts[:count] += 1

    def slots(self) -> np.ndarray:
        """Where the newest tokens' KV goes, int64 [S]."""
        count, size = len(self.seqs), self._block_size
        places = self.contexts[:count] - 1
        blocks = self.tables[np.arange(count), places // size]
        return blocks * size + places % size

    def _add(self, seq: Sequence, clock: int, texts: Texts) -> None:
        row = len(self.seqs)
        if row == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
            self.contexts = np.concatenate([self.contexts, np.zeros_like(self.contexts)])
            self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
        context = seq.num_tokens + clock - seq.joined_at
        self._widen(len(seq.blocks))
        self.tables[row, : len(seq.blocks)] = seq.blocks
        self.contexts[row] = context
        self.tokens[row] = texts.tokens(seq, context - 1, 1)[0]
        self.seqs.append(seq)
        self._row_of[seq] = row

    def _remove(self, seq: Sequence) -> None:
        row, last = self._row_of.pop(seq), self.seqs.pop()
        if last is not seq:
            end = len(self.seqs)
            for rows in (self.tokens, self.contexts, self.tables):
                rows[row] = rows[end]
            self.seqs[row] = last
            self._row_of[last] = row

    def _widen(self, columns: int) -> None:
        while self.tables.shape[1] < columns:
            self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)], axis=1)
