"""The standing decode set: sequences that merely decode, one token a step, walked by nobody."""

from __future__ import annotations

from kvsim.engine.request import Sequence


class DecodeSet:
    """Running sequences whose next step is a plain decode in blocks of their own.

    `clock` counts the steps that the set has made. A member stores the clock at which it joined
    and its length then, so that its length now is a subtraction and a step of the whole set is
    `clock += 1`. In one phase of every `block_size` steps a member takes a block; members of one
    phase stand in one bucket, in batch order, so the bucket of a clock names exactly who takes a
    block then: `buckets[clock % block_size]`, and those who fill their last block then stand in
    the bucket after it. `base` is the sum of (length - clock), which a step leaves as it is.

    `joined` and `left` list the changes since the last plan, for whoever keeps a batch of its own.
    """

    __slots__ = ("base", "block_size", "buckets", "clock", "joined", "left", "num_seqs")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.clock = 0
        self.num_seqs = 0
        self.joined: list[Sequence] = []
        self.left: list[Sequence] = []
        self.base = 0
        self.buckets: list[dict[int, Sequence]] = [{} for _ in range(block_size)]

    @property
    def context(self) -> int:
        """Tokens that one step of the set attends to: the lengths of all members, summed."""
        return self.base + self.num_seqs * self.clock

    def join(self, seq: Sequence, clock: int) -> None:
        """Let seq take part from `clock` on, its counts those of that moment."""
        base = seq.num_tokens - clock
        bucket = self.buckets[(1 - base) % self.block_size]
        is_behind = bool(bucket) and next(reversed(bucket)) > seq.order
        bucket[seq.order] = seq
        if is_behind:
            in_order = sorted(bucket.items())
            bucket.clear()
            bucket.update(in_order)
        seq.joined_at = clock
        self.base += base
        self.num_seqs += 1
        self.joined.append(seq)

    def leave(self, seq: Sequence) -> None:
        """Take seq out, its counts brought up to now."""
        self.sync(seq)
        base = seq.num_tokens - self.clock
        del self.buckets[(1 - base) % self.block_size][seq.order]
        seq.joined_at = -1
        self.base -= base
        self.num_seqs -= 1
        self.left.append(seq)

    def sync(self, seq: Sequence) -> None:
        """Bring the counts of a member up to now."""
        seq.num_tokens += self.clock - seq.joined_at
        seq.num_computed = seq.num_tokens - 1
        seq.joined_at = self.clock

    def growing(self, clock: int) -> dict[int, Sequence]:
        """Members whose step at `clock` starts a new block, by batch order and in it."""
        return self.buckets[clock % self.block_size]

    def members(self) -> list[Sequence]:
        """Everyone in batch order, with counts brought up to now; costs what walking costs."""
        everyone = sorted((s for b in self.buckets for s in b.values()), key=lambda s: s.order)
        for seq in everyone:
            self.sync(seq)
        return everyone
