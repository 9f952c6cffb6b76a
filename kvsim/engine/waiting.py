"""The waiting queue by priority; first come first served needs no more than a deque."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from kvsim.engine.request import Sequence


class ByPriority:
    """Sequences by rank, the lowest first. It has a deque's
    methods, and who is preempted goes back to the place that his rank says (vLLM V1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []

    def append(self, seq: Sequence) -> None:
        heappush(self._heap, (seq.rank, seq))

    appendleft = append

    def extendleft(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            self.append(seq)

    def popleft(self) -> Sequence:
        return heappop(self._heap)[1]

    def __getitem__(self, place: int) -> Sequence:
        """The head: the only place that is known."""
        assert place == 0, "a heap knows its head"
        return self._heap[0][1]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in sorted(self._heap, key=lambda entry: entry[0]))
