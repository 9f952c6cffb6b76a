"""What a KV cache policy promises to the scheduler, and how it accounts for its pool."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.plan import BlockMove
from kvsim.engine.request import Request, Sequence


class KVUsage(NamedTuple):
    """Slots of the pool at one instant, each figure in tokens.

    `held` by sequences, of which `granted` were asked for (a rounded-up chunk holds more);
    `cached`: unreferenced, but a prefix hit can still revive them; `overlap`: tokens counted once
    a holder beyond the first, where sequences share blocks; `largest_free_run`: the longest
    contiguous free region (all that is free, where any block serves); `untouched`: in blocks that
    nobody has held yet.
    """

    held: int
    granted: int
    cached: int
    overlap: int
    largest_free_run: int
    untouched: int


class Hit(NamedTuple):
    """What the cache already holds of a sequence's head: `num_tokens`, in whole `blocks` and, where
    they go on, in the first tokens of block `tail` (-1: nowhere), which are to be copied."""

    blocks: list[int]
    num_tokens: int
    tail: int = -1


NO_HIT = Hit([], 0)
"""One for all; nobody changes its list."""


class KVCachePolicy(Protocol):
    """Owns the pool and every block table. A method that may refuse does so before it changes
    anything, and refuses with None.

    Invariants: a block is free, cached or held; its references equal its holders; a block table
    covers the computed tokens and the work just granted; what is finished holds nothing.
    """

    num_blocks: int
    block_size: int
    can_fork: bool
    is_caching: bool  # finds prefixes again
    reserves: bool  # holds slots for tokens still to come: contiguous policies
    keyless_first: bool  # freed memory without a prefix key goes before what nobody has held yet
    num_forked_blocks: int  # block table entries that forks share, counted at each fork
    num_copies: int  # blocks copied: on write, and for prefix hits that end inside a block
    num_hit_copies: int  # the latter alone
    publishes_computed: bool  # `publish` wants to know what was computed
    registered_tokens: int  # held all along, by prefixes that were registered in advance
    blocks_for_good: bool  # an admission refused stays refused while others only decode
    max_tokens: int | None  # a sequence that reaches them has outgrown what it was given, and ends

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether `request`, grown to `num_tokens`, could run alone in the pool."""
        ...

    def match(self, seq: Sequence) -> Hit:
        """What the pool already holds of seq's head; looks only."""
        ...

    def admit(
        self, seq: Sequence, hit: Hit, num_new: int, *, is_alone: bool
    ) -> list[BlockMove] | None: ...

    def grow(self, seq: Sequence, num_new: int) -> list[BlockMove] | None: ...

    def fork(self, parent: Sequence, child: Sequence) -> None: ...

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """A step of prefill, or the end of seq, has left num_tokens of it computed: they may be
        shared from now on. May change seq's block table and what others find."""
        ...

    def release(self, seq: Sequence) -> None: ...

    def growing(self, decodes: DecodeSet) -> list[Sequence]:
        """Members of the decode set that need memory in its next step, in batch order."""
        ...

    def grant_all(self, decodes: DecodeSet) -> bool:
        """Grow all of `growing` and fill all of `filling`, each in batch order; or, where memory
        does not suffice, change nothing and return False."""
        ...

    def filling(self, decodes: DecodeSet) -> list[Sequence]:
        """Members whose next step fills a block that may be shared, in batch order."""
        ...

    def fill(self, seq: Sequence, clock: int) -> None:
        """The step of member seq at `clock` was granted: share what it fills."""
        ...

    def headroom(self, decodes: DecodeSet, limit: int) -> int:
        """How often, up to `limit`, the step just granted can run before memory could refuse."""
        ...

    def repeat(self, decodes: DecodeSet, num_steps: int) -> list[int]:
        """Grant steps 2 to num_steps of a promise; the blocks that each of them took."""
        ...

    def usage(self) -> KVUsage: ...
