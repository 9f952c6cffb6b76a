"""The block pool against a dict of who holds which block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsim.engine.kv.pool import BlockPool
from kvsim.engine.rules import RULES

NUM_BLOCKS = 7
QUEUES_ALL = ("vllm-0.20", "vllm-0.11", "vllm-0.8")


class Keys(set):
    """The simplest prefix index: the blocks that have a key, and those it was told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []

    def forget(self, block: int) -> None:
        self.remove(block)
        self.forgotten.append(block)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and give back; `free` is the one queue that vLLM keeps. From 0.26 on,
    freed blocks without a key go to its front, the last freed foremost, and cached ones to its end,
    the longest unreferenced first; before, all go to the end. A table is freed from its tail; in
    0.8 without caching, from its head."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.free = list(range(NUM_BLOCKS))
        self.cached: set[int] = set()

    @initialize(version=st.sampled_from(sorted(RULES)), is_caching=st.booleans())
    def build(self, version, is_caching):
        self.version, self.is_caching, self.keys = version, is_caching, Keys()
        self.forgotten = self.keys.forgotten
        self.pool = BlockPool(NUM_BLOCKS, self.keys if is_caching else None, RULES[version])

    def _taken(self, blocks: list[int]) -> None:
        """The front of the queue, and each cached block of it forgotten."""
        assert blocks == self.free[: len(blocks)]
        del self.free[: len(blocks)]
        assert self.forgotten == [block for block in blocks if block in self.cached]
        self.cached -= set(blocks)
        self.forgotten.clear()
        for block in blocks:
            assert block not in self.holders, "no block is held twice"
            self.holders[block] = 1

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count):
        if count <= self.pool.num_free:
            self._taken(self.pool.take(count))

    @precondition(lambda self: self.free)
    @rule()
    def take_one(self):
        self._taken([self.pool.take_one()])

    @precondition(lambda self: self.holders or self.cached)
    @rule(data=st.data())
    def hold(self, data):
        block = data.draw(st.sampled_from(sorted({*self.holders, *self.cached})))
        self.pool.hold(block)
        if block in self.cached:
            self.cached.remove(block)
            self.free.remove(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data, keep):
        block = data.draw(st.sampled_from(sorted(self.holders)))
        self.holders[block] -= 1
        others_remain = self.holders[block] > 0
        assert self.pool.drop_shared(block) == others_remain
        if others_remain:
            return
        self._given([block], {block} if keep else set())

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give(self, data):
        """A table goes whole; some of its blocks have a key."""
        unshared = sorted(block for block, count in self.holders.items() if count == 1)
        if unshared:
            table = data.draw(st.lists(st.sampled_from(unshared), unique=True))
            self._given(table, {block for block in table if data.draw(st.booleans())})

    def _given(self, table: list[int], keyed: set[int]) -> None:
        keyed = keyed if self.is_caching else set()
        self.keys.difference_update(table)
        self.keys |= keyed
        self.cached |= keyed
        is_head_first = self.version == "vllm-0.8" and not self.is_caching
        for block in table if is_head_first else reversed(table):
            del self.holders[block]
            if block not in keyed and self.version not in QUEUES_ALL:
                self.free.insert(0, block)
            else:
                self.free.append(block)
        if self.version not in QUEUES_ALL:  # the tail, freed first, ends up foremost
            keyless = [block for block in reversed(table) if block not in keyed]
            self.free[: len(keyless)] = keyless
        self.pool.give(table)

    @invariant()
    def every_block_is_free_or_held(self):
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_free + len(self.holders) == NUM_BLOCKS
        assert sorted([*self.free, *self.holders]) == list(range(NUM_BLOCKS))

    @invariant()
    def references_equal_holders(self):
        extra = {block: count - 1 for block, count in self.holders.items() if count > 1}
        assert self.pool.shared == extra

    @invariant()
    def only_cached_blocks_are_forgotten(self):
        if self.version not in QUEUES_ALL:
            assert set(self.pool.queue) == self.cached
        assert self.pool.num_cached == len(self.cached)
        assert not self.forgotten


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=100, stateful_step_count=40
)


def test_the_last_freed_block_without_a_key_is_reused_first():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.give([first, second])
    assert pool.take(2) == [second, first]


def test_the_longest_unreferenced_cached_block_is_evicted_first():
    keys = Keys()
    pool = BlockPool(3, keys)
    a, b, c = pool.take(3)
    keys.update((a, b, c))
    for block in (b, a, c):
        pool.give([block])
    pool.hold(b)
    assert pool.take(2) == [a, c]
    assert keys.forgotten == [a, c]
    assert pool.num_evicted == 2


@pytest.mark.parametrize(
    ("version", "is_caching", "expected"),
    [
        ("vllm-0.33", True, [2, 3, 1, 0]),  # the keyless tail, the never used, then keyed, deepest
        ("vllm-0.26", False, [2, 1, 0, 3]),  # a stack
        ("vllm-0.20", True, [3, 2, 1, 0]),  # all at the end, tails first
        ("vllm-0.11", False, [3, 2, 1, 0]),
        ("vllm-0.8", True, [3, 2, 1, 0]),
        ("vllm-0.8", False, [3, 0, 1, 2]),  # heads first
    ],
)
def test_free_blocks_are_reused_in_the_order_of_each_version(version, is_caching, expected):
    keys = Keys() if is_caching else None
    pool = BlockPool(4, keys, RULES[version])
    table = pool.take(3)
    assert table == [0, 1, 2]
    if keys is not None:
        keys.update((0, 1))
    pool.give(table)
    assert pool.num_cached == (2 if is_caching else 0)
    assert pool.take(4) == expected
