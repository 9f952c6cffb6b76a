"""Hash ids of prompt blocks as token streams: dense whole numbers, whatever the ids were."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from kvsim.workload.traces.ledger import BadRow, Ledger

UNSEEN, ROOT = -2, -1
SLACK = 1 << 20  # ids this far above what has been seen still count as dense
RULE = "not a list of whole numbers >= 0"

MOONCAKE_BLOCK, QWEN_BLOCK, WEKA_BLOCK = 512, 16, 64  # tokens a hash id stands for


class BlockIds:
    """Interns hash ids and counts what is odd about them.

    Ids that are dense already are kept; from the first one that is not (2^64 and more occur),
    new ids take the next free number. `base` shifts ids that are local to one file. Every id
    interned must be watched before the next ones are.
    """

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.parents = np.full(1024, UNSEEN, np.int64)  # by stream - base
        self.size = 0  # streams given out lie below
        self.numbers: dict[int, int] | None = None  # once an id was not dense
        self.num_refs = 0
        self.num_repeats = 0
        self.num_reparented = 0

    def streams(
        self, lists: Sequence[object], counts: np.ndarray, leave_out: np.ndarray
    ) -> tuple[np.ndarray, dict[int, BadRow]]:
        """The streams of all lists end to end, without those `leave_out` marks or that hold
        something else than ids; the latter come with their fault."""
        bad: dict[int, BadRow] = {}
        if leave_out.any():
            lists = [[] if out else x for x, out in zip(lists, leave_out, strict=True)]
        flat = list(chain.from_iterable(lists))  # type: ignore[arg-type]
        if set(map(type, flat)) - {int} or (flat and min(flat) < 0):
            for i, ids in enumerate(lists):
                if any(type(x) is not int or x < 0 for x in ids):  # type: ignore[attr-defined]
                    bad[i] = BadRow("hash_ids", None, RULE)
            flat = list(
                chain.from_iterable(ids for i, ids in enumerate(lists) if i not in bad)  # type: ignore[misc]
            )
        return self.intern(flat), bad

    def intern(self, flat: list[int] | np.ndarray) -> np.ndarray:
        """The streams of ids that are whole numbers >= 0."""
        self.num_refs += len(flat)
        if not len(flat):
            return np.zeros(0, np.int64)
        if self.numbers is None:
            highest = int(flat.max()) if isinstance(flat, np.ndarray) else max(flat)
            if highest < 8 * self.num_refs + SLACK:
                self._grow(highest + 1)
                return np.array(flat, np.int64) + self.base
            self.numbers = {x: x for x in np.flatnonzero(self.parents != UNSEEN).tolist()}
        numbers = flat.tolist() if isinstance(flat, np.ndarray) else flat
        return np.array([self._number(number) for number in numbers], np.int64) + self.base

    def streams_of(self, ids: list[int]) -> list[int]:
        """The streams of one prompt's ids, watched."""
        streams = self.intern(ids)
        self.watch(streams, np.array([len(ids)], np.int64))
        return streams.tolist()

    def watch(self, streams: np.ndarray, counts: np.ndarray) -> None:
        """Notes each block's parent; counts prompts that repeat a block and blocks that stand
        under another parent than before (a chained hash cannot)."""
        if not len(streams):
            return
        local = streams - self.base
        rows = np.repeat(np.arange(len(counts)), counts)
        parents = np.concatenate([[ROOT], local[:-1]])
        parents[(np.cumsum(counts) - counts)[counts > 0]] = ROOT
        new = np.flatnonzero(self.parents[local] == UNSEEN)[::-1]  # so that the first one wins
        self.parents[local[new]] = parents[new]
        strange = self.parents[local] != parents
        if strange.any():
            repeats = {
                row
                for row in np.unique(rows[strange]).tolist()
                if len(set(local[rows == row].tolist())) < counts[row]
            }
            self.num_repeats += len(repeats)
            self.num_reparented += len(np.unique(rows[strange])) - len(repeats)

    def report(self, ledger: Ledger) -> None:
        if self.num_repeats:
            ledger.note(f"prompts that repeat a hash id: {self.num_repeats} (the same text twice)")
        if self.num_reparented:
            ledger.note(
                "prompts with a hash id behind another block than before: "
                f"{self.num_reparented} (a chained hash cannot: ids may name blocks by content)"
            )

    @property
    def end(self) -> int:
        """The first stream above all of this object's."""
        return self.base + self.size

    def _number(self, number: int) -> int:
        assert self.numbers is not None
        found = self.numbers.get(number)
        if found is None:
            found = self.numbers[number] = self.size
            self._grow(found + 1)
        return found

    def _grow(self, size: int) -> None:
        if size > len(self.parents):
            spare = np.full(max(size, 2 * len(self.parents)), UNSEEN, np.int64)
            spare[: len(self.parents)] = self.parents
            self.parents = spare
        self.size = max(self.size, size)


def spans_of_blocks(
    streams: np.ndarray, counts: np.ndarray, prompts: np.ndarray, block_size: int
) -> np.ndarray:
    """int64 [m, 3] spans of whole blocks, the last of each prompt cut to the prompt's end."""
    spans = np.zeros((len(streams), 3), np.int64)
    spans[:, 0] = streams
    spans[:, 2] = block_size
    has = counts > 0
    last = np.cumsum(counts)[has] - 1
    spans[last, 2] = (prompts - (counts - 1) * block_size)[has]
    return spans
