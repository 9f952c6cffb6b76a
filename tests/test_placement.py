"""Buddy, first fit and best fit against a pool written as a list of booleans."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsim.engine.kv.placement import Buddy, Fit, Placement, best_fit, first_fit, power_of_two


class PlacementMachine(RuleBasedStateMachine):
    """`regions` says who holds what; where a region may go is searched in `is_used`."""

    placement: Placement

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[tuple[int, int]] = []
        self.is_used: list[bool] = []

    def expected_place(self, count: int) -> tuple[int, int] | None:
        raise NotImplementedError

    def free_pieces(self) -> list[tuple[int, int]]:
        """(length, start) of what one request could be cut from."""
        raise NotImplementedError

    @rule(count=st.integers(1, 20))
    def take(self, count):
        expected = self.expected_place(count)
        taken = self.placement.take(count)
        assert taken == expected
        if taken is None:
            return
        start, held = taken
        assert held >= count
        assert not any(self.is_used[start : start + held]), "no block is held twice"
        self.is_used[start : start + held] = [True] * held
        self.regions.append(taken)

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def give(self, data):
        start, held = self.regions.pop(data.draw(st.integers(0, len(self.regions) - 1)))
        self.placement.give(start, held)
        self.is_used[start : start + held] = [False] * held

    @invariant()
    def nothing_leaks(self):
        assert len(self.is_used) == self.num_blocks
        assert self.placement.num_free == self.is_used.count(False)
        longest = max((length for length, _ in self.free_pieces()), default=0)
        assert self.placement.largest_free_run() == longest

    def teardown(self):
        """All given back, whatever fits is placed as in a new pool."""
        for start, held in self.regions:
            self.placement.give(start, held)
        self.is_used = [False] * len(self.is_used)
        for count in range(1, 25):
            expected = self.expected_place(count)
            assert self.placement.fits(count) == (expected is not None)
            assert self.placement.take(count) == expected
            if expected is not None:
                self.placement.give(*expected)


class BuddyMachine(PlacementMachine):
    @initialize(num_blocks=st.integers(1, 40), largest=st.integers(1, 20))
    def build(self, num_blocks, largest):
        self.num_blocks = num_blocks
        self.placement = Buddy(num_blocks, largest)
        self.is_used = [False] * num_blocks
        size = next(1 << n for n in range(9) if 1 << n >= largest)
        self.chunks, start = [], 0
        while start < num_blocks:
            while start + size > num_blocks:
                size //= 2
            self.chunks.append((start, size))
            start += size

    def expected_place(self, count):
        held = next(1 << n for n in range(9) if 1 << n >= count)
        fitting = [piece for piece in self.free_pieces() if piece[0] >= held]
        return (min(fitting)[1], held) if fitting else None

    def free_pieces(self):
        return [piece for chunk in self.chunks for piece in self._within(*chunk)]

    def _within(self, start, length):
        """Wholly free aligned pieces, as large as they come: so buddies have merged."""
        used = self.is_used[start : start + length].count(True)
        if used in (0, length):
            return [] if used else [(length, start)]
        half = length // 2
        return self._within(start, half) + self._within(start + half, half)


class FitMachine(PlacementMachine):
    @initialize(num_blocks=st.integers(1, 40), is_best=st.booleans())
    def build(self, num_blocks, is_best):
        self.num_blocks, self.is_best = num_blocks, is_best
        self.placement = Fit(num_blocks, best_fit if is_best else first_fit)
        self.is_used = [False] * num_blocks

    def expected_place(self, count):
        fitting = [piece for piece in self.free_pieces() if piece[0] >= count]
        if not fitting:
            return None
        return (min(fitting) if self.is_best else fitting[0])[1], count

    def free_pieces(self):
        runs, start = [], 0
        for block, is_used in enumerate([*self.is_used, True]):
            if is_used:
                if block > start:
                    runs.append((block - start, start))
                start = block + 1
        return runs


SAME_CASES = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=40
)
TestBuddy = BuddyMachine.TestCase
TestFit = FitMachine.TestCase
TestBuddy.settings = TestFit.settings = SAME_CASES


def test_the_buddy_pool_is_cut_into_chunks_of_the_largest_and_falling_powers_of_two():
    buddy = Buddy(22, 8)  # 8 + 8 + 4 + 2
    assert [buddy.take(8), buddy.take(8), buddy.take(4), buddy.take(2)] == [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 2),
    ]
    assert buddy.num_free == 0


def test_a_buddy_takes_the_smallest_free_chunk_of_equals_the_lowest():
    buddy = Buddy(16, 8)
    assert buddy.take(3) == (0, 4)
    assert buddy.take(2) == (4, 2)
    assert buddy.take(1) == (6, 1)
    assert buddy.take(5) == (8, 8)
    assert buddy.take(1) == (7, 1)
    assert buddy.take(1) is None


def test_freed_buddies_merge_up_to_the_first_chunks():
    buddy = Buddy(16, 8)
    taken = [buddy.take(1) for _ in range(16)]
    for start, held in taken[::2] + taken[1::2]:
        buddy.give(start, held)
    assert [buddy.take(8), buddy.take(8)] == [(0, 8), (8, 8)]


def test_first_fit_takes_the_lowest_run_and_best_fit_the_shortest():
    taken = {}
    for choose in (first_fit, best_fit):
        fit = Fit(12, choose)
        regions = [fit.take(count) for count in (4, 1, 3, 4)]
        fit.give(*regions[0])
        fit.give(*regions[2])
        taken[choose] = fit.take(3)
    assert taken == {first_fit: (0, 3), best_fit: (5, 3)}


@pytest.mark.parametrize("count", range(1, 70))
def test_power_of_two_is_the_smallest_not_below(count):
    power = power_of_two(count)
    assert power.bit_count() == 1
    assert power >= count > power // 2
