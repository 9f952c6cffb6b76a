"""Paged KV cache: blocks on demand, optionally with forks, copy-on-write and prefix reuse."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.kv.hash_chain import HashChain
from kvsim.engine.kv.policy import KVUsage
from kvsim.engine.kv.pool import BlockPool
from kvsim.engine.plan import COPY, BlockMove, Fork
from kvsim.engine.request import Request, Sequence
from kvsim.engine.rules import LATEST, Rules


class Paged:
    """Blocks anywhere in the pool, one more only when the last is full (PagedAttention, Kwon et
    al. 2023, section 4). Position p of a sequence is slot `blocks[p // B] * B + p % B`.

    With `can_fork` parallel answers share their prompt's blocks, and a writer to a shared block
    takes a copy (section 4.4). With `prefix_caching` full blocks are found again by their tokens.
    Admission asks for room for all known tokens, and leaves `watermark` of the pool free unless
    nothing else runs (vLLM V1: full-sequence admission and watermark). `registered` prefixes, so
    many whole blocks of a token stream, are there from the start and never go; prompts that begin
    with them share them (section 4.4).
    """

    reserves = False
    max_tokens = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        can_fork: bool = False,
        prefix_caching: bool = False,
        watermark: float = 0.0,
        rules: Rules = LATEST,
        registered: dict[int, int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.can_fork = can_fork
        self.num_forked_blocks = 0  # table entries that forks shared instead of copying
        self.num_copies = 0  # blocks copied on write
        self._index = HashChain(block_size) if prefix_caching else None
        self.pool = BlockPool(num_blocks, self._index, rules)
        self._registered = {
            stream: self.pool.take(count) for stream, count in (registered or {}).items()
        }
        self.registered_blocks = frozenset(chain.from_iterable(self._registered.values()))
        self.registered_tokens = len(self.registered_blocks) * block_size
        self._reserves_full_prompt = rules.reserves_full_prompt
        self._watermark_blocks = int(watermark * num_blocks)
        self._overlap = 0
        self.is_caching = prefix_caching
        # an evicted hit of a blocked head changes how much of it the first chunk has to hold
        self.blocks_for_good = rules.reserves_full_prompt or not prefix_caching

    def fits(self, request: Request, num_tokens: int) -> bool:
        # the last token is sampled, never written: it needs no slot
        return max(num_tokens - 1, request.prompt_tokens) <= self.num_blocks * self.block_size

    def match(self, seq: Sequence) -> list[int]:
        return self._index.match(seq) if self._index is not None else self.registered(seq.request)

    def registered(self, request: Request) -> list[int]:
        """Blocks of the registered prefix that a prompt begins with; one token of the prompt at
        least is left to compute."""
        if not self._registered:
            return []
        head = request.prompt[0]
        tokens = min(head.length, request.prompt_tokens - 1) if head.start == 0 else 0
        return self._registered.get(head.stream, [])[: tokens // self.block_size]

    def admit(
        self, seq: Sequence, hit: list[int], num_new: int, *, is_alone: bool
    ) -> list[BlockMove] | None:
        """Give seq the blocks of its prefix hit and new ones for num_new more tokens.

        Refuses when the pool cannot hold every token that seq already has (room for a first chunk
        alone, all that older rules ask for, would be lost to preemption). A hit on a cached block
        takes it out of what is free.
        """
        pool = self.pool
        cold = sum(block in pool.queue for block in hit) if hit else 0
        spare = 0 if is_alone else self._watermark_blocks
        computed = len(hit) * self.block_size
        wanted = seq.num_tokens if self._reserves_full_prompt else computed + num_new
        if self._blocks_for(wanted) - len(hit) + cold + spare > pool.num_free:
            return None
        for block in hit:
            pool.hold(block)
        self._overlap += (len(hit) - cold) * self.block_size
        seq.blocks = hit + pool.take(self._blocks_for(computed + num_new) - len(hit))
        seq.num_sealed = len(hit)
        self._seal(seq, computed + num_new)
        return []

    def grow(self, seq: Sequence, num_new: int) -> list[BlockMove] | None:
        pool = self.pool
        start = seq.num_computed
        needed = self._blocks_for(start + num_new) - len(seq.blocks)
        written = start // self.block_size  # block table entry that the first new token goes to
        copies = written < len(seq.blocks) and seq.blocks[written] in pool.shared
        if needed + copies > pool.num_free:
            return None
        moves = []
        if copies:
            shared, private = seq.blocks[written], pool.take_one()
            pool.drop_shared(shared)
            seq.blocks[written] = private
            self._overlap -= start - written * self.block_size
            self.num_copies += 1
            moves.append(BlockMove(COPY, shared, private))
        if needed:
            seq.blocks += pool.take(needed)
        self._seal(seq, start + num_new)
        return moves

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let child share every block of parent, the partly filled last one included."""
        child.blocks = parent.blocks.copy()
        child.num_sealed = parent.num_sealed
        for block in parent.blocks:
            self.pool.hold(block)
        self._overlap += parent.num_computed
        self.num_forked_blocks += len(parent.blocks)

    def refork(self, forks: Iterable[Fork]) -> None:
        """Let each child, a beam of parent's request and as long as it, drop its block table for a
        copy of parent's. All references are taken before any is given back, so what a child
        shared with its parent stays as it is; only the entries that change count as shared."""
        dropped = []
        for parent, child in forks:
            pairs = zip(parent.blocks, child.blocks, strict=True)
            self.num_forked_blocks -= sum(new == old for new, old in pairs)
            dropped.append((child, child.blocks))
            self.fork(parent, child)
        for child, blocks in dropped:
            self._give_back(child, blocks)

    def share_again(self, numbers: list[int], seq: Sequence) -> None:
        """Sharing that a swap has kept: seq is one more holder of its blocks with these numbers."""
        for number in numbers:
            self.pool.hold(seq.blocks[number])
            self._overlap += self._filled(seq, number)

    def release(self, seq: Sequence) -> None:
        """Give back seq's blocks; those with a key stay findable until they are reused."""
        self._give_back(seq, seq.blocks)
        seq.blocks = []
        seq.num_sealed = 0

    def growing(self, decodes: DecodeSet) -> list[Sequence]:
        return list(decodes.growing(decodes.clock).values())

    def grant_all(self, decodes: DecodeSet) -> bool:
        clock, size = decodes.clock, self.block_size
        bucket = decodes.buckets[clock % size]
        if bucket and not self._grow_bucket(bucket):
            return False
        if self._index is not None:
            self._fill_bucket(decodes, clock)
        return True

    def filling(self, decodes: DecodeSet) -> list[Sequence]:
        if self._index is None:
            return []
        return list(decodes.growing(decodes.clock + 1).values())  # who grows next fills one now

    def fill(self, seq: Sequence, clock: int) -> None:
        length = seq.num_tokens + clock - seq.joined_at
        self._index.seal(seq, length // self.block_size)

    def headroom(self, decodes: DecodeSet, limit: int, spare: int = 0) -> int:
        """How often, up to `limit`, the step just granted can run, every repeat of it leaving
        `spare` blocks free."""
        free, num_seqs, period = self.pool.num_free - spare, decodes.num_seqs, self.block_size
        if free < 0:
            return 1
        if num_seqs * -(-(limit - 1) // period) <= free:
            return limit
        rounds = free // num_seqs  # in `period` steps every member takes one block
        free -= rounds * num_seqs
        steps = 1 + rounds * period
        while (taken := len(decodes.growing(decodes.clock + steps))) <= free and steps < limit:
            free -= taken
            steps += 1
        return min(steps, limit)

    def repeat(self, decodes: DecodeSet, num_steps: int) -> list[int]:
        size, clocks = self.block_size, range(decodes.clock + 1, decodes.clock + num_steps)
        buckets = [decodes.buckets[clock % size] for clock in clocks]
        taken = [len(bucket) for bucket in buckets]
        if self._index is None and sum(taken) <= len(self.pool.unkeyed):
            take = self.pool.unkeyed.pop
            for bucket in buckets:
                for seq in bucket.values():
                    seq.blocks.append(take())
            return taken
        for clock, bucket in zip(clocks, buckets, strict=True):
            is_granted = self._grow_bucket(bucket)
            assert is_granted, "headroom promised this step"
            if self._index is not None:
                self._fill_bucket(decodes, clock)
        return taken

    def usage(self) -> KVUsage:
        pool, size = self.pool, self.block_size
        free, cached = len(pool.unkeyed) + len(pool.queue), pool.num_cached
        held = (self.num_blocks - free) * size
        return KVUsage(held, held, cached * size, self._overlap, (free - cached) * size)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _seal(self, seq: Sequence, num_tokens: int) -> None:
        """Publish what is full once num_tokens are computed: as soon as that is scheduled, so a
        request admitted later in the same step can hit it (vLLM V1)."""
        if self._index is not None:
            self._index.seal(seq, min(num_tokens, seq.num_tokens) // self.block_size)

    def _grow_bucket(self, bucket: dict[int, Sequence]) -> bool:
        """A block for each, in batch order; False and nothing changed if that is too many."""
        pool = self.pool
        unkeyed = pool.unkeyed
        if len(bucket) <= len(unkeyed):
            for seq in bucket.values():
                seq.blocks.append(unkeyed.pop())
            return True
        if len(bucket) > pool.num_free:
            return False
        for seq in bucket.values():
            seq.blocks.append(pool.take_one())
        return True

    def _fill_bucket(self, decodes: DecodeSet, clock: int) -> None:
        for seq in decodes.growing(clock + 1).values():
            self.fill(seq, clock)

    def _filled(self, seq: Sequence, number: int) -> int:
        """Tokens of seq in its block of this number."""
        return min(max(seq.num_computed - number * self.block_size, 0), self.block_size)

    def _give_back(self, seq: Sequence, blocks: list[int]) -> None:
        self.pool.give(self._unshared(seq, blocks) if self.pool.shared else blocks)

    def _unshared(self, seq: Sequence, blocks: list[int]) -> list[int]:
        """Drop seq's references to shared blocks; the blocks that only seq held, in order."""
        mine = []
        for number, block in enumerate(blocks):
            if self.pool.drop_shared(block):
                self._overlap -= self._filled(seq, number)
            else:
                mine.append(block)
        return mine
