"""Swapping: the KV of a preempted group moves to host blocks and back, its sharing kept. What it
shares of a registered prefix stays where it is."""

from __future__ import annotations

from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import SWAP_IN, SWAP_OUT, BlockMove
from kvsim.engine.request import Sequence


class HostFull(Exception):
    """A group is to be swapped out, and the host has no room: the engine of that time raises."""


class HostPool:
    """`num_blocks` blocks of host memory beside a paged cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def swap_out(self, kv: Paged, seqs: list[Sequence]) -> list[BlockMove]:
        """Move every distinct block of a group to the host. Raises HostFull."""
        stays = kv.registered_blocks
        distinct = list(
            dict.fromkeys(block for seq in seqs for block in seq.blocks if block not in stays)
        )
        if len(distinct) > len(self._free):
            raise HostFull(
                f"request {seqs[0].request.index} is to be swapped out to {len(distinct):,} host "
                f"blocks, and {len(self._free):,} of {self.num_blocks:,} are free"
            )
        home = {block: self._free.pop() for block in distinct}
        for seq in seqs:
            seq.host_blocks = [home[block] for block in seq.blocks if block not in stays]
            kv.release(seq)
        self.num_swapped_out += len(home)
        return [BlockMove(SWAP_OUT, block, host) for block, host in home.items()]

    def swap_in(self, kv: Paged, seqs: list[Sequence]) -> list[BlockMove]:
        """Bring a group back; the caller has made sure that the pool holds it."""
        distinct = list(dict.fromkeys(host for seq in seqs for host in seq.host_blocks))
        place = dict(zip(distinct, kv.pool.take(len(distinct)), strict=True))
        held = set(kv.registered_blocks)
        for seq in seqs:
            seq.blocks = kv.registered(seq.request).blocks + [
                place[host] for host in seq.host_blocks
            ]
            seq.host_blocks = []
            kv.share_again([number for number, b in enumerate(seq.blocks) if b in held], seq)
            held.update(seq.blocks)
        self._free += distinct
        self.num_swapped_in += len(place)
        return [BlockMove(SWAP_IN, host, block) for host, block in place.items()]
