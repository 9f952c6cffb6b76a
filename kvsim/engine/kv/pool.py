"""The block pool: free ids in order of reuse, extra references, O(1) each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvsim.engine.rules import LATEST, Rules


class Index(Protocol):
    """What a pool asks of a prefix index: whether it can find a block, and to forget one."""

    def __contains__(self, block: int) -> bool: ...

    def forget(self, block: int) -> None: ...


Victims = Callable[[dict[int, None]], list[int]]
"""Which of the cached blocks to evict next."""


class BlockPool:
    """Block ids 0 to num_blocks - 1.

    Free blocks are reused in the order of the rules. Of vLLM 0.26 and later: those without a
    prefix key first (`unkeyed`, a stack), the last freed foremost; then the cached ones of
    `queue`, the longest unreferenced first. Before, all that are freed queue up behind those that
    nobody has held yet. `num_untouched` counts these; `note_touched` brings it up to now. `shared`
    counts the references of a held block beyond the first, so that an unshared block costs nothing.
    The index forgets a cached block when it is taken for something else.

    With `victims` the index chooses what is evicted, several blocks at a time: they lose their keys
    together, and the queue is a mere set.
    """

    __slots__ = (
        "_index",
        "_is_head_first",
        "_keyless_first",
        "_victims",
        "num_blocks",
        "num_cached",
        "num_evicted",
        "num_untouched",
        "queue",
        "shared",
        "unkeyed",
    )

    def __init__(
        self,
        num_blocks: int,
        index: Index | None = None,
        rules: Rules = LATEST,
        *,
        victims: Victims | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.shared: dict[int, int] = {}
        self.num_cached = 0  # free blocks that the index can find
        self.num_evicted = 0
        self._index = index
        self._victims = victims
        self._keyless_first = rules.keyless_first or victims is not None
        self._is_head_first = rules.is_head_first and index is None
        self.unkeyed = list(range(num_blocks - 1, -1, -1))
        self.queue: OrderedDict[int, None] = OrderedDict()
        self.num_untouched = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self.unkeyed) + len(self.queue)

    @property
    def keyless_first(self) -> bool:
        """Whether freed blocks without a key go before those that nobody has held yet."""
        return self._keyless_first

    def note_touched(self) -> int:
        """Blocks that nobody has held yet: they lie at the bottom of the stack."""
        if len(self.unkeyed) < self.num_untouched:
            self.num_untouched = len(self.unkeyed)
        return self.num_untouched

    def take_one(self) -> int:
        if self.unkeyed:
            return self.unkeyed.pop()
        if self._victims is not None:
            self._evict(self._victims(self.queue))
            return self.unkeyed.pop()
        block, _ = self.queue.popitem(last=False)
        if self._index is not None and block in self._index:
            self.num_cached -= 1
            self.num_evicted += 1
            self._index.forget(block)
        return block

    def take(self, count: int) -> list[int]:
        """`count` blocks, in order of reuse; the caller has made sure that they are free."""
        unkeyed = self.unkeyed
        if count <= len(unkeyed):
            cut = len(unkeyed) - count
            blocks = unkeyed[cut:]
            del unkeyed[cut:]
            blocks.reverse()
            return blocks
        return [self.take_one() for _ in range(count)]

    def hold(self, block: int) -> None:
        """One more reference to a cached or held block."""
        if block in self.queue:
            del self.queue[block]
            self.num_cached -= 1
        else:
            self.shared[block] = self.shared.get(block, 0) + 1

    def drop_shared(self, block: int) -> bool:
        """Give back one reference if others remain; whether they did."""
        extra = self.shared.get(block)
        if extra is None:
            return False
        if extra == 1:
            del self.shared[block]
        else:
            self.shared[block] = extra - 1
        return True

    def give(self, blocks: list[int]) -> None:
        """Take back blocks that nobody holds any more, in the order of their block table: tails
        are reused first, since a prefix must outlive what hangs on it."""
        index = self._index
        self.note_touched()
        if self._keyless_first and index is None:
            self.unkeyed += blocks
            return
        for block in blocks if self._is_head_first else reversed(blocks):
            is_cached = index is not None and block in index
            self.num_cached += is_cached
            if is_cached or not self._keyless_first:
                self.queue[block] = None
        if self._keyless_first:
            self.unkeyed += [block for block in blocks if block not in index]

    def _evict(self, blocks: list[int]) -> None:
        self.note_touched()
        for block in blocks:
            del self.queue[block]
            self._index.forget(block)
        self.num_cached -= len(blocks)
        self.num_evicted += len(blocks)
        self.unkeyed += reversed(blocks)
