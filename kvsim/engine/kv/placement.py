"""Where a contiguous run of blocks goes: the buddy allocator, first fit, best fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol


class Placement(Protocol):
    """An address space of blocks. `take` returns (start, length held) or None: no such run."""

    num_free: int

    def fits(self, count: int) -> bool: ...

    def take(self, count: int) -> tuple[int, int] | None: ...

    def give(self, start: int, held: int) -> None: ...

    def largest_free_run(self) -> int: ...


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below count >= 1."""
    return 1 << (count - 1).bit_length()


class Buddy:
    """The buddy allocator of the paper's Orca baselines.

    The pool is cut greedily into chunks of `largest` blocks (a power of two), the remainder into
    falling powers of two. A request takes the smallest free chunk that holds its count rounded up
    to a power of two, split down; of equals the lowest. Buddies merge when both are free.
    (Authors' artifact, as docs of PagedAttention's evaluation describe it.)
    """

    def __init__(self, num_blocks: int, largest: int) -> None:
        self.num_free = num_blocks
        self._largest = power_of_two(largest)
        self._free: dict[int, int] = {}  # start -> length
        self._starts: dict[int, list[int]] = {}  # length -> heap of starts, stale ones included
        self._biggest_chunk = 0
        start, size = 0, self._largest
        while start < num_blocks:
            while size > num_blocks - start:
                size //= 2
            self._biggest_chunk = max(self._biggest_chunk, size)
            self._put(start, size)
            start += size

    def fits(self, count: int) -> bool:
        return power_of_two(count) <= self._biggest_chunk

    def take(self, count: int) -> tuple[int, int] | None:
        wanted = power_of_two(count)
        size = wanted
        while (start := self._lowest(size)) is None:
            size *= 2
            if size > self._largest:
                return None
        del self._free[start]
        while size > wanted:
            size //= 2
            self._put(start + size, size)
        self.num_free -= wanted
        return start, wanted

    def give(self, start: int, held: int) -> None:
        self.num_free += held
        while held < self._largest and self._free.get(start ^ held) == held:
            del self._free[start ^ held]
            start &= ~held
            held *= 2
        self._put(start, held)

    def largest_free_run(self) -> int:
        """The largest run that one request could be given: a free chunk."""
        return max(self._free.values(), default=0)

    def _put(self, start: int, size: int) -> None:
        self._free[start] = size
        heappush(self._starts.setdefault(size, []), start)

    def _lowest(self, size: int) -> int | None:
        starts = self._starts.get(size, [])
        while starts:
            start = heappop(starts)
            if self._free.get(start) == size:
                return start
        return None


def first_fit(runs: dict[int, int], starts: list[int], count: int) -> int | None:
    """The lowest free run that is long enough (Knuth, The Art of Computer Programming, 2.5)."""
    return next((start for start in starts if runs[start] >= count), None)


def best_fit(runs: dict[int, int], starts: list[int], count: int) -> int | None:
    """The shortest free run that is long enough, of equals the lowest (Knuth, 2.5)."""
    return min(
        (start for start in starts if runs[start] >= count),
        key=lambda start: (runs[start], start),
        default=None,
    )


class Fit:
    """Free runs by address, neighbours merged; `choose` says which one a request is cut from."""

    def __init__(
        self,
        num_blocks: int,
        choose: Callable[[dict[int, int], list[int], int], int | None],
    ) -> None:
        self.num_free = num_blocks
        self._num_blocks = num_blocks
        self._choose = choose
        self._starts = [0]
        self._length = {0: num_blocks}  # start -> length

    def fits(self, count: int) -> bool:
        return count <= self._num_blocks

    def take(self, count: int) -> tuple[int, int] | None:
        start = self._choose(self._length, self._starts, count)
        if start is None:
            return None
        place = bisect_left(self._starts, start)
        length = self._length.pop(start)
        if length == count:
            del self._starts[place]
        else:
            self._starts[place] = start + count
            self._length[start + count] = length - count
        self.num_free -= count
        return start, count

    def give(self, start: int, held: int) -> None:
        self.num_free += held
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + held:
            held += self._length.pop(self._starts.pop(place))
        before = self._starts[place - 1] if place else None
        if before is not None and before + self._length[before] == start:
            self._length[before] += held
        else:
            self._starts.insert(place, start)
            self._length[start] = held

    def largest_free_run(self) -> int:
        return max(self._length.values(), default=0)
