"""Paged KV cache: blocks on demand, optionally with forks, copy-on-write and prefix reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Protocol

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.kv.hash_chain import HashChain
from kvsim.engine.kv.policy import NO_HIT, Hit, KVUsage
from kvsim.engine.kv.pool import BlockPool, Victims
from kvsim.engine.plan import COPY, BlockMove, Fork
from kvsim.engine.request import Request, Sequence
from kvsim.engine.rules import LATEST, Admission, Rules


class PrefixIndex(Protocol):
    """Finds full blocks by their tokens and all tokens before them."""

    publishes_computed: bool  # shares what is computed, not already what is scheduled to be
    victims: Victims | None  # which cached blocks go first, where not the longest unreferenced

    def __contains__(self, block: int) -> bool: ...

    def match(self, seq: Sequence) -> Hit:
        """What is known of seq's head, one token at least left out; looks only."""
        ...

    def use(self, blocks: list[int]) -> None:
        """A sequence was admitted with these, the whole blocks of its hit."""
        ...

    def seal(self, seq: Sequence, upto: int) -> Iterable[tuple[int, int]]:
        """Publish seq's blocks before number `upto`, each once; (number, block) of those that seq
        is to exchange for blocks of the same tokens."""
        ...

    def leave(self, block: int) -> None:
        """A sequence whose last block here was `block` has let go of all."""
        ...

    def forget(self, block: int) -> None:
        """The pool reuses `block`."""
        ...


class Paged:
    """Blocks anywhere in the pool, one more only when the last is full (PagedAttention, Kwon et
    al. 2023, section 4). Position p of a sequence is slot `blocks[p // B] * B + p % B`.

    With `can_fork` parallel answers share their prompt's blocks, and a writer to a shared block
    takes a copy (section 4.4). With `prefix_caching` a `prefix_index` finds blocks again by their
    tokens, and a hit that ends inside a block is copied into one of the sequence's own.
    Admission asks for the room that the rules say, and leaves `watermark_blocks` free unless
    nothing else runs (vLLM V1). `registered` prefixes, so many whole blocks of a token stream, are
    there from the start and never go; prompts that begin with them share them (section 4.4).
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
        prefix_index: Callable[[int], PrefixIndex] = HashChain,
        watermark_blocks: int = 0,
        rules: Rules = LATEST,
        registered: dict[int, int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.can_fork = can_fork
        self.num_forked_blocks = 0  # table entries that forks shared instead of copying
        self.num_copies = 0
        self.num_hit_copies = 0
        self._index = index = prefix_index(block_size) if prefix_caching else None
        self.publishes_computed = index is not None and index.publishes_computed
        self._seals_ahead = index is not None and not index.publishes_computed
        victims = None if index is None else index.victims
        self.pool = BlockPool(num_blocks, index, rules, victims=victims)
        self._registered = {
            stream: self.pool.take(count) for stream, count in (registered or {}).items()
        }
        self.registered_blocks = frozenset(chain.from_iterable(self._registered.values()))
        self.registered_tokens = len(self.registered_blocks) * block_size
        self.keyless_first = self.pool.keyless_first
        self._admission = rules.admission
        self._promised = 0  # block table entries that who was admitted may come to have
        self._watermark_blocks = watermark_blocks
        self._overlap = 0
        self.is_caching = prefix_caching
        # an evicted hit of a blocked head changes how much of it the first chunk has to hold
        self.blocks_for_good = rules.admission is not Admission.CHUNK or not prefix_caching

    def fits(self, request: Request, num_tokens: int) -> bool:
        if self._admission is Admission.FULL_PROMPT_AND_MAX_OUTPUT:
            width = request.num_samples if self.can_fork else 1
            return self._most_entries(request, width) <= self.num_blocks
        # the last token is sampled, never written: it needs no slot
        return max(num_tokens - 1, request.prompt_tokens) <= self.num_blocks * self.block_size

    def match(self, seq: Sequence) -> Hit:
        if self._index is not None:
            return self._index.match(seq)
        return self.registered(seq.request) if self._registered else NO_HIT

    def registered(self, request: Request) -> Hit:
        """Blocks of the registered prefix that a prompt begins with; one token of the prompt at
        least is left to compute."""
        head = request.prompt[0]
        tokens = min(head.length, request.prompt_tokens - 1) if head.start == 0 else 0
        blocks = self._registered.get(head.stream, [])[: tokens // self.block_size]
        return Hit(blocks, len(blocks) * self.block_size)

    def admit(
        self, seq: Sequence, hit: Hit, num_new: int, *, is_alone: bool
    ) -> list[BlockMove] | None:
        """Give seq the blocks of its prefix hit and new ones for num_new more tokens.

        Refuses when there is not the room that the rules ask for. A hit on a cached block takes it
        out of what is free; the block that its tail is copied from stays free to be taken, by seq
        too, since copies come before the step's work.
        """
        pool = self.pool
        blocks, computed, tail = hit
        num_hit = len(blocks)
        cold = sum(block in pool.queue for block in blocks) if num_hit else 0
        spare = 0 if is_alone else self._watermark_blocks
        wanted = computed + num_new if self._admission is Admission.CHUNK else seq.num_tokens
        size = self.block_size
        if -(-wanted // size) - num_hit + cold + spare > pool.num_free:
            return None
        if self._admission is Admission.FULL_PROMPT_AND_MAX_OUTPUT:
            most = self._most_entries(seq.request, seq.width)
            entries = self.num_blocks - pool.num_free + sum(pool.shared.values())
            if most - num_hit + cold + spare > pool.num_free - (self._promised - entries):
                return None
            self._promised += most
        if num_hit:
            for block in blocks:
                pool.hold(block)
            self._overlap += (num_hit - cold) * size
            if self._index is not None:
                self._index.use(blocks)
        seq.blocks = blocks + pool.take(-(-(computed + num_new) // size) - num_hit)
        seq.num_sealed = num_hit
        self._seal(seq, computed + num_new)
        if tail < 0 or seq.blocks[num_hit] == tail:  # evicted for seq: its tokens are in place
            return []
        self.num_copies += 1
        self.num_hit_copies += 1
        return [BlockMove(COPY, tail, seq.blocks[num_hit])]

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

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        for number, block in self._index.seal(seq, num_tokens // self.block_size):
            self._exchange(seq, number, block)

    def release(self, seq: Sequence) -> None:
        """Give back seq's blocks; those with a key stay findable until they are reused."""
        self._give_back(seq, seq.blocks)
        if seq.num_sealed and self._index is not None:
            self._index.leave(seq.blocks[seq.num_sealed - 1])
        seq.blocks = []
        seq.num_sealed = 0
        if self._admission is Admission.FULL_PROMPT_AND_MAX_OUTPUT:
            self._promised -= self._most_entries(seq.request, seq.width)

    def growing(self, decodes: DecodeSet) -> list[Sequence]:
        return list(decodes.growing(decodes.clock).values())

    def grant_all(self, decodes: DecodeSet) -> bool:
        clock, size = decodes.clock, self.block_size
        bucket = decodes.buckets[clock % size]
        if bucket and not self._grow_bucket(bucket):
            return False
        if self._seals_ahead:
            self._fill_bucket(decodes, clock)
        return True

    def filling(self, decodes: DecodeSet) -> list[Sequence]:
        if not self._seals_ahead:
            return []
        return list(decodes.growing(decodes.clock + 1).values())  # who grows next fills one now

    def fill(self, seq: Sequence, clock: int) -> None:
        length = seq.num_tokens + clock - seq.joined_at
        self._index.seal(seq, length // self.block_size)

    def headroom(self, decodes: DecodeSet, limit: int, spare: int = 0) -> int:
        """How often, up to `limit`, the step just granted can run, every repeat of it leaving
        `spare` blocks free."""
        num_seqs, period = decodes.num_seqs, self.block_size
        free = self.pool.num_free - spare
        if self._index is not None and not (self.keyless_first and self._seals_ahead):
            # which block is evicted next, or how many at once, shows in a promise's first step only
            free = len(self.pool.unkeyed) - spare
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
        size, buckets, unkeyed = self.block_size, decodes.buckets, self.pool.unkeyed
        most = decodes.num_seqs * -(-(num_steps - 1) // size)
        is_plain = not self._seals_ahead and most <= len(unkeyed)
        taken = []
        for clock in range(decodes.clock + 1, decodes.clock + num_steps):
            bucket = buckets[clock % size]
            taken.append(len(bucket))
            if is_plain:
                for seq in bucket.values():
                    seq.blocks.append(unkeyed.pop())
                continue
            is_granted = self._grow_bucket(bucket)
            assert is_granted, "headroom promised this step"
            if self._seals_ahead:
                self._fill_bucket(decodes, clock)
        return taken

    def usage(self) -> KVUsage:
        pool, size = self.pool, self.block_size
        free, cached = len(pool.unkeyed) + len(pool.queue), pool.num_cached
        held = (self.num_blocks - free) * size
        untouched = pool.note_touched() * size
        return KVUsage(held, held, cached * size, self._overlap, (free - cached) * size, untouched)

    def _most_entries(self, request: Request, width: int) -> int:
        """Block table entries that `width` answers of a request may come to (TensorRT-LLM: prompt
        and max_tokens); where they fork, one more each for the copy of the prompt's last block."""
        longest = self._blocks_for(request.prompt_tokens + request.max_tokens)
        return width * (longest + (self.can_fork and request.num_samples > 1))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _seal(self, seq: Sequence, num_tokens: int) -> None:
        """Publish what is full once num_tokens are computed: as soon as that is scheduled, so a
        request admitted later in the same step can hit it (vLLM V1)."""
        if self._seals_ahead:
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

    def _exchange(self, seq: Sequence, number: int, block: int) -> None:
        """Let seq hold `block`, of the same tokens, in the place of its block of this number."""
        pool, own = self.pool, seq.blocks[number]
        if block not in pool.queue:
            self._overlap += self.block_size
        pool.hold(block)
        seq.blocks[number] = block
        if pool.drop_shared(own):
            self._overlap -= self.block_size
        else:
            pool.give([own])

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
