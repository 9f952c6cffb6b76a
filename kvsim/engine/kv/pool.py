"""The block pool: free ids in order of reuse, extra references, O(1) each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Block ids 0 to num_blocks - 1.

    Reuse order is that of vLLM 0.26 and later (docs of its V1 block pool): blocks without a
    prefix key first, the last freed foremost; then cached blocks, the longest unreferenced first.
    `shared` counts the references of a held block beyond the first, so that an unshared block
    costs nothing. `forget(block)` is called when a cached block is taken for something else.
    """

    __slots__ = ("cached", "forget", "num_blocks", "num_evicted", "shared", "unkeyed")

    def __init__(self, num_blocks: int, forget: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.forget = forget
        self.unkeyed = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.shared: dict[int, int] = {}
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self.unkeyed) + len(self.cached)

    def take_one(self) -> int:
        if self.unkeyed:
            return self.unkeyed.pop()
        block, _ = self.cached.popitem(last=False)
        self.num_evicted += 1
        assert self.forget is not None, "only a pool with an index holds cached blocks"
        self.forget(block)
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
        if block in self.cached:
            del self.cached[block]
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
