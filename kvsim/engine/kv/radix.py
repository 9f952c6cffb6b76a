"""A prefix index: a radix tree of full blocks, its leaves evicted in order of last use.

After SGLang (Zheng et al. 2024, RadixAttention). Theirs: an edge is a run of whole blocks (their
pages), split where sequences part; a prompt is published after the step that computed it, chunk by
chunk, and an answer when it ends; blocks of equal tokens become one, the tree's; who runs holds its
path; where a block is needed and none is free, the least recently used leaf goes, all of it, and
its parent may be a leaf then. Blocks of one token make their token tree.

Not theirs: a hit may end inside a block, whose first tokens are then copied (they match whole
pages); eviction stops as soon as a block is free (they ask for as many tokens as they need, in one
go). Not modelled: their order of the queue by longest match and its care for equal prompts of one
batch, priorities, the host tier. Nor does a chunk of a prompt skip what others published since its
admission, as with them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

from kvsim.engine.kv.hash_chain import ENDLESS, keys_of, stream_of
from kvsim.engine.kv.policy import NO_HIT, Hit
from kvsim.engine.request import Sequence, Span

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks, of number `start` and on in the text `prompt` followed by `stream`. Of the
    sequences that hold one of its blocks each holds all, and all of every node above."""

    parent: Node | None
    start: int
    keys: list[int]
    blocks: list[int]
    prompt: tuple[Span, ...]
    stream: int
    head: Tokens  # of the first block
    last_used: int = 0
    children: dict[int, Node] = field(default_factory=dict)  # by their first keys
    heads: list[tuple[Tokens, Node]] = field(default_factory=list)  # of the children, in order


class Radix:
    """The tree. `last_used` is a count of uses, no two alike; a node is used when a sequence is
    admitted through it or publishes it. The heap holds that of every leaf that nobody holds, and
    others gone stale."""

    publishes_computed = True
    __slots__ = ("_block_size", "_leaves", "_node", "_num_uses", "_root", "_stamps")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = Node(None, 0, [], [], (), 0, ())
        self._node: dict[int, Node] = {}  # block -> node
        self._num_uses = 0
        self._stamps: list[int] = []  # heap
        self._leaves: dict[int, Node] = {}  # by stamp

    def __contains__(self, block: int) -> bool:
        return block in self._node

    def match(self, seq: Sequence) -> Hit:
        """The longest head of seq's tokens, the last one aside, that some path begins with."""
        size, most = self._block_size, seq.num_tokens - 1
        limit = most // size
        keys, node, found, inside = keys_of(seq, limit, size), self._root, [], None
        while (number := len(found)) < limit:
            child = node.children.get(keys[number])
            if child is None:
                break
            length = _num_equal(child.keys, keys, number, limit)
            found += child.blocks[:length]
            node = child
            if length < len(child.keys):
                inside = child.blocks[length]
                break
        number = len(found)
        rest = min(most - number * size, size - 1)
        if not rest or (inside is None and not node.children):
            return Hit(found, number * size) if found else NO_HIT
        wanted = _tokens(seq.request.prompt, stream_of(seq), number * size, rest)
        if inside is None:
            inside, tokens = _nearest(node.heads, wanted)
        else:
            tokens = _tokens(node.prompt, node.stream, number * size, rest)
        num_more = _num_common(tokens, wanted)
        if num_more:
            return Hit(found, number * size + num_more, inside)
        return Hit(found, number * size) if found else NO_HIT

    def use(self, blocks: list[int]) -> None:
        node = self._node[blocks[-1]]
        length = len(blocks) - node.start
        self._touch(self._split(node, length) if length < len(node.blocks) else node)

    def seal(self, seq: Sequence, upto: int) -> list[tuple[int, int]]:
        """Publish seq's blocks before number `upto`. Those that the tree has already are returned
        with their numbers: seq is to hold them in the place of its own."""
        number = seq.num_sealed
        node = self._node[seq.blocks[number - 1]] if number else self._root
        known: list[tuple[int, int]] = []
        keys = keys_of(seq, upto, self._block_size)
        while number < upto:
            child = node.children.get(keys[number])
            if child is None:
                node = self._add(node, seq, number, upto)
                break
            length = _num_equal(child.keys, keys, number, upto)
            node = self._split(child, length) if length < len(child.keys) else child
            known += enumerate(node.blocks, number)
            number += length
        seq.num_sealed = upto
        self._touch(node)
        return known

    def leave(self, block: int) -> None:
        node = self._node[block]
        if not node.children:
            self._enter(node)

    def victims(self, cached: dict[int, None]) -> list[int]:
        """Take the least recently used leaf out of the tree; its blocks, all of them `cached`."""
        while True:
            stamp = heappop(self._stamps)
            node = self._leaves.pop(stamp)
            is_free = not node.children and node.blocks[0] in cached
            if is_free and node.last_used == stamp:
                break
        parent = node.parent
        del parent.children[node.keys[0]]
        del parent.heads[_place(node)]
        if not parent.children and parent is not self._root:
            self._enter(parent)
        return node.blocks

    def forget(self, block: int) -> None:
        del self._node[block]

    def _enter(self, leaf: Node) -> None:
        """It may be evicted, unless somebody holds it or uses it again."""
        if leaf.last_used not in self._leaves:
            self._leaves[leaf.last_used] = leaf
            heappush(self._stamps, leaf.last_used)

    def _touch(self, node: Node) -> None:
        while node is not self._root:
            self._num_uses += 1
            node.last_used = self._num_uses
            node = node.parent

    def _add(self, parent: Node, seq: Sequence, number: int, upto: int) -> Node:
        prompt, stream, size = seq.request.prompt, stream_of(seq), self._block_size
        head = _tokens(prompt, stream, number * size, size)
        keys, blocks = seq.keys[number:upto], seq.blocks[number:upto]
        node = Node(parent, number, keys, blocks, prompt, stream, head)
        parent.children[keys[0]] = node
        insort(parent.heads, (head, node))
        self._node.update(dict.fromkeys(blocks, node))
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Make the first `length` blocks of a node one of their own, its parent; that one."""
        keys, blocks = node.keys[:length], node.blocks[:length]
        upper = Node(node.parent, node.start, keys, blocks, node.prompt, node.stream, node.head)
        upper.parent.heads[_place(node)] = (node.head, upper)
        upper.parent.children[keys[0]] = upper
        self._node.update(dict.fromkeys(blocks, upper))
        del node.keys[:length]
        del node.blocks[:length]
        node.parent, node.start = upper, node.start + length
        size = self._block_size
        node.head = _tokens(node.prompt, node.stream, node.start * size, size)
        upper.children[node.keys[0]] = node
        upper.heads.append((node.head, node))
        return upper


def _place(node: Node) -> int:
    return bisect_left(node.parent.heads, (node.head,))


def _nearest(heads: list[tuple[Tokens, Node]], wanted: Tokens) -> tuple[int, Tokens]:
    """The block, and its tokens, that shares most with the head of `wanted`: in sorted order no
    other shares more than a neighbour does."""
    place = bisect_left(heads, (wanted,))
    near = heads[max(place - 1, 0) : place + 1]
    tokens, node = max(near, key=lambda pair: _num_common(pair[0], wanted))
    return node.blocks[0], tokens


def _num_common(tokens: Tokens, wanted: Tokens) -> int:
    pairs = enumerate(zip(tokens, wanted, strict=False))
    shorter = min(len(tokens), len(wanted))
    return next((place for place, (left, right) in pairs if left != right), shorter)


def _num_equal(edge: list[int], keys: list[int], start: int, end: int) -> int:
    """How many keys of an edge those from `start` to `end` begin with, at least one. A key names
    all tokens before it: where two agree, so do all before them."""
    longest = min(len(edge), end - start)
    if edge[longest - 1] == keys[start + longest - 1]:
        return longest
    return bisect_left(range(longest), True, key=lambda n: edge[n] != keys[start + n])


def _tokens(prompt: Iterable[Span], stream: int, start: int, count: int) -> Tokens:
    """`count` tokens from position `start` on of a prompt followed by a stream, a number each."""
    tokens: list[int] = []
    for source, first, length in chain(prompt, (Span(stream, 0, ENDLESS),)):
        if start >= length:
            start -= length
            continue
        number = (source << 62) + first + start
        tokens += range(number, number + min(length - start, count - len(tokens)))
        start = 0
        if len(tokens) == count:
            break
    return tuple(tokens)
