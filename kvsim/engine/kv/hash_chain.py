"""A prefix index: full blocks found by the hash of their tokens chained to their parent's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from kvsim.engine.kv.policy import NO_HIT, Hit
from kvsim.engine.request import Sequence, Span, answer_stream

ENDLESS = 1 << 62


def block_keys(prompt: tuple[Span, ...], answer: int, block_size: int) -> Iterator[int]:
    """Keys of the full blocks of a prompt followed by the token stream `answer`, without end.

    A key names a block's tokens and all before it: the hash of the parent's key and the runs of
    stream tokens in the block (vLLM V1 hashes parent and token ids the same way). Python hashes
    an int modulo 2**61 - 1: two of ten million different blocks agree with probability 2e-5.
    `prompt` is merged, so equal tokens are always cut into equal runs.
    """
    parent = 0
    runs = chain(prompt, (Span(answer, 0, ENDLESS),))
    stream, start, left = next(runs)
    while True:
        if left == 0:
            stream, start, left = next(runs)
        if left >= block_size:
            parent = hash((parent, stream, start))
            start += block_size
            left -= block_size
        else:
            pieces = [parent]
            missing = block_size
            while missing:
                if left == 0:
                    stream, start, left = next(runs)
                count = min(left, missing)
                pieces += (stream, start, count)
                start += count
                left -= count
                missing -= count
            parent = hash(tuple(pieces))
        yield parent


def keys_of(seq: Sequence, count: int, block_size: int) -> list[int]:
    """seq's keys, its first `count` among them."""
    keys = seq.keys
    if keys is None:
        keys = seq.keys = []
        seq.key_source = block_keys(seq.request.prompt, stream_of(seq), block_size)
    if len(keys) < count:
        keys += islice(seq.key_source, count - len(keys))
    return keys


def stream_of(seq: Sequence) -> int:
    """The token stream that seq writes; the answers of further samples are nobody's to quote:
    theirs lie below every first one."""
    return answer_stream(seq.request.index) - (seq.sample << 40)


class HashChain:
    """Which block holds which key. Copies of one block are all kept; the first published is found
    (vLLM V1: no de-duplication, tables are append-only)."""

    publishes_computed = False
    victims = None  # the pool's own order: the longest unreferenced
    __slots__ = ("_block_size", "_copies", "_first", "_key")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._first: dict[int, int] = {}  # key -> block
        self._copies: dict[int, list[int]] = {}  # key -> further blocks, in order of publication
        self._key: dict[int, int] = {}  # block -> key

    def __contains__(self, block: int) -> bool:
        return block in self._key

    def match(self, seq: Sequence) -> Hit:
        """Leading blocks of seq that are in the pool. One token at least is always left to
        compute, so a prompt of whole blocks never hits its last one."""
        found: list[int] = []
        first, size = self._first, self._block_size
        limit = (seq.num_tokens - 1) // size
        for key in islice(keys_of(seq, limit, size), limit):
            block = first.get(key)
            if block is None:
                break
            found.append(block)
        return Hit(found, len(found) * size) if found else NO_HIT

    def use(self, blocks: list[int]) -> None:
        """Nothing to note: what is held does not stand in the order of reuse."""

    def leave(self, block: int) -> None:
        """Nothing to note: the pool keeps the order in which blocks were let go."""

    def seal(self, seq: Sequence, upto: int) -> tuple[()]:
        """Publish seq's blocks before number `upto`, each once. None is exchanged for a copy."""
        start = seq.num_sealed
        if upto <= start:
            return ()
        keys, blocks = keys_of(seq, upto, self._block_size), seq.blocks
        key_of, first = self._key, self._first
        for number in range(start, upto):
            block = blocks[number]
            if block in key_of:  # a hit: its first owner published it
                continue
            key = key_of[block] = keys[number]
            if first.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)
        seq.num_sealed = upto
        return ()

    def forget(self, block: int) -> None:
        """The pool reuses `block`: it no longer holds these tokens."""
        key = self._key.pop(block)
        copies = self._copies.get(key) if self._copies else None
        if self._first[key] == block:
            if copies:
                self._first[key] = copies.pop(0)
            else:
                del self._first[key]
        else:
            assert copies is not None, "a published block is the first or a copy"
            copies.remove(block)
        if copies is not None and not copies:
            del self._copies[key]
