"""Contiguous KV cache: one region a request, reserved whole at admission, as before paging."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.kv.placement import Placement
from kvsim.engine.kv.policy import NO_HIT, Hit, KVUsage
from kvsim.engine.plan import BlockMove
from kvsim.engine.request import Request, Sequence

Reserve = Callable[[Request], int]
"""The answer tokens to reserve for a request."""


def reserve_max(max_model_len: int) -> Reserve:
    """Orca (Max): the model's maximum, whatever the request (Kwon et al. 2023, section 6.1)."""
    return lambda request: max_model_len


def reserve_pow2(output_tokens: list[int]) -> Reserve:
    """Orca (Pow2): the true length rounded up to a power of two; 25 reserves 32 (section 6.1)."""
    return lambda request: 1 << (output_tokens[request.index] - 1).bit_length()


def reserve_oracle(output_tokens: list[int]) -> Reserve:
    """Orca (Oracle): the true length (section 6.1)."""
    return lambda request: output_tokens[request.index]


class Contiguous:
    """A chunk of consecutive blocks from admission to the end; no growth, so no preemption.

    A request is granted min(prompt + reserve(request), limit) tokens, in whole blocks, and the
    placement may round them up further. With `reserve=None` it is granted `limit` tokens, and one
    that outgrows them ends there. `limit` is the model's maximum or the fixed reservation.
    """

    can_fork = False
    reserves = True
    is_caching = False
    keyless_first = True
    num_forked_blocks = 0
    num_copies = 0
    num_hit_copies = 0
    registered_tokens = 0
    blocks_for_good = True
    publishes_computed = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        placement: Placement,
        *,
        reserve: Reserve | None,
        limit: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._placement = placement
        self._reserve = reserve
        self._limit = limit
        self._granted = 0
        self._touched = bytearray(num_blocks)  # 1: somebody has held it
        self._num_untouched = num_blocks
        self.max_tokens = limit if reserve is None else None

    def fits(self, request: Request, num_tokens: int) -> bool:
        granted = self._grant(request)
        return request.prompt_tokens < granted and self._placement.fits(self._blocks_for(granted))

    def match(self, seq: Sequence) -> Hit:
        return NO_HIT

    def admit(
        self, seq: Sequence, hit: Hit, num_new: int, *, is_alone: bool
    ) -> list[BlockMove] | None:
        granted = self._grant(seq.request)
        taken = self._placement.take(self._blocks_for(granted))
        if taken is None:
            return None
        start, count = taken
        seq.blocks = list(range(start, start + count))
        self._granted += granted
        self._num_untouched -= self._touched.count(0, start, start + count)
        self._touched[start : start + count] = b"\1" * count
        return []

    def grow(self, seq: Sequence, num_new: int) -> list[BlockMove] | None:
        assert seq.num_computed + num_new <= len(seq.blocks) * self.block_size, (
            "a reservation covers whatever its sequence may write"
        )
        return []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        raise AssertionError("a contiguous cache shares nothing: can_fork is False")

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        raise AssertionError("a contiguous cache shares nothing")

    def release(self, seq: Sequence) -> None:
        self._placement.give(seq.blocks[0], len(seq.blocks))
        self._granted -= self._grant(seq.request)
        seq.blocks = []

    def growing(self, decodes: DecodeSet) -> list[Sequence]:
        return []

    def grant_all(self, decodes: DecodeSet) -> bool:
        return True

    def filling(self, decodes: DecodeSet) -> list[Sequence]:
        return []

    def fill(self, seq: Sequence, clock: int) -> None:
        raise AssertionError("a contiguous cache shares nothing")

    def headroom(self, decodes: DecodeSet, limit: int) -> int:
        return limit

    def repeat(self, decodes: DecodeSet, num_steps: int) -> list[int]:
        return [0] * (num_steps - 1)

    def usage(self) -> KVUsage:
        size = self.block_size
        held = (self.num_blocks - self._placement.num_free) * size
        largest = self._placement.largest_free_run()
        return KVUsage(held, self._granted, 0, 0, largest * size, self._num_untouched * size)

    def _grant(self, request: Request) -> int:
        if self._reserve is None:
            return self._limit
        return min(request.prompt_tokens + self._reserve(request), self._limit)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
