"""The radix tree against a plain trie of token lists, by hand, and in whole simulated runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.radix import Radix
from kvsim.engine.plan import COPY, BlockMove
from kvsim.engine.request import Request, Sequence, Span, answer_stream, merged
from kvsim.engine.rules import RULES
from tests.test_twin import (
    SAME_CASES_EVERY_TIME,
    Row,
    assert_same_runs,
    few,
    own,
    setups,
    simulated,
    workload_of,
    workloads,
)
from tests.twin import Setup

NUM_BLOCKS = 10


def cache(num_blocks: int, size: int) -> Paged:
    return Paged(num_blocks, size, can_fork=True, prefix_caching=True, prefix_index=Radix)


def asking(index: int, *spans: tuple[int, int, int]) -> Sequence:
    prompt = merged(tuple(Span(*span) for span in spans))
    length = sum(span.length for span in prompt)
    return Sequence(Request(index, prompt, length), num_tokens=length)


def admitted(kv: Paged, seq: Sequence) -> list[BlockMove]:
    """Admit a sequence with all it has to compute; not yet computed."""
    hit = kv.match(seq)
    num_new = seq.num_tokens - hit.num_tokens
    moves = kv.admit(seq, hit, num_new, is_alone=False)
    assert moves is not None
    seq.num_hit = hit.num_tokens
    return moves


def computed(kv: Paged, seq: Sequence) -> None:
    """The step of a prefill is over: the first token of the answer is known."""
    seq.num_computed = seq.num_tokens
    seq.num_tokens += 1
    kv.publish(seq, seq.num_computed)


def prefilled(kv: Paged, index: int, *spans: tuple[int, int, int]) -> Sequence:
    seq = asking(index, *spans)
    admitted(kv, seq)
    computed(kv, seq)
    return seq


def ended(kv: Paged, seq: Sequence, num_answer_tokens: int = 1) -> None:
    """Decode to the end of the answer, whose last token is never written."""
    while seq.num_generated < num_answer_tokens:
        assert kv.grow(seq, 1) is not None
        seq.num_computed += 1
        seq.num_tokens += 1
    kv.publish(seq, seq.num_computed)
    kv.release(seq)


def hit_tokens(kv: Paged, *spans: tuple[int, int, int]) -> int:
    return kv.match(asking(99, *spans)).num_tokens


@pytest.mark.parametrize(
    ("size", "length", "num_hit"),
    [(16, 63, 48), (16, 64, 63), (16, 65, 64), (16, 16, 15), (16, 1, 0), (1, 64, 63), (512, 9, 0)],
)
def test_a_repeated_prompt_leaves_at_least_its_last_token(size, length, num_hit):
    """Only full blocks are in the tree: of 63 tokens in blocks of 16 the first 48."""
    kv = cache(80, size)
    prefilled(kv, 0, (7, 0, length))
    assert hit_tokens(kv, (7, 0, length)) == num_hit


def test_two_equal_prompts_of_one_step_share_nothing_and_are_folded_after_it():
    kv = cache(8, 4)
    first, second = asking(0, (7, 0, 9)), asking(1, (7, 0, 9))
    for seq in (first, second):
        assert admitted(kv, seq) == []
        assert seq.num_hit == 0
    assert kv.usage().held == 6 * 4
    for seq in (first, second):
        computed(kv, seq)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2], "the tail is not full, so not in the tree"
    usage = kv.usage()
    assert (usage.held, usage.overlap, usage.cached) == (4 * 4, 2 * 4, 0)
    assert hit_tokens(kv, (7, 0, 9)) == 8


def test_equal_prompts_hit_in_the_next_step_but_not_in_the_same_one_of_a_whole_run():
    rows = [Row(0, own(0, 9), 9), Row(0, [(0, 0, 9)], 9), Row(1, [(0, 0, 9)], 9)]
    setup = Setup(num_blocks=30, prefix_caching=True, prefix_index="radix")
    run = simulated(workload_of(rows), setup, jump=True)["paper"]
    assert run.requests["num_hit"].tolist() == [0, 0, 8]
    # held: 3 + 3 blocks; the next step finds 2 of them folded away, and a third tail
    assert run.steps["held_blocks"][:2].tolist() == [6, 5]
    chained = simulated(workload_of(rows), replace(setup, prefix_index="hash_chain"), jump=True)
    assert chained["paper"].requests["num_hit"].tolist() == [0, 8, 8]


def test_folding_onto_a_cached_block_revives_it():
    kv = cache(8, 4)
    first, second = asking(0, (7, 0, 9)), asking(1, (7, 0, 9))
    admitted(kv, first)
    admitted(kv, second)
    computed(kv, first)
    ended(kv, first)
    assert kv.usage().cached == 2 * 4
    computed(kv, second)
    usage = kv.usage()
    assert (usage.held, usage.cached, usage.overlap) == (3 * 4, 0, 0)


def test_a_hit_that_ends_inside_a_block_copies_it():
    kv = cache(10, 8)
    first = prefilled(kv, 0, (7, 0, 24))
    other = asking(1, (7, 0, 13), (8, 0, 10))
    hit = kv.match(other)
    assert hit == (first.blocks[:1], 13, first.blocks[1])
    assert admitted(kv, other) == [BlockMove(COPY, first.blocks[1], other.blocks[1])]
    assert kv.num_copies == kv.num_hit_copies == 1
    assert other.blocks[0] == first.blocks[0]
    assert other.blocks[1] not in first.blocks
    assert kv.usage()[:4] == (5 * 8, 5 * 8, 0, 8)  # a copy is nobody else's: one block overlaps


def test_of_the_blocks_that_go_on_the_one_with_most_tokens_in_common_is_copied():
    kv = cache(20, 8)
    tails = {}
    for index, shared in enumerate((2, 6, 4)):
        seq = prefilled(kv, index, (7, 0, 8 + shared), (20 + index, 0, 9 - shared))
        tails[shared] = seq.blocks[1]
    assert kv.match(asking(9, (7, 0, 15))) == (seq.blocks[:1], 14, tails[6])
    assert kv.match(asking(9, (7, 0, 11), (30, 0, 5))).num_tokens == 11
    assert kv.match(asking(9, (7, 0, 12), (22, 0, 5))) == (seq.blocks[:2], 16, -1)


def test_a_hit_may_end_inside_the_very_first_block():
    kv = cache(4, 8)
    first = prefilled(kv, 0, (7, 0, 8))
    assert kv.match(asking(1, (7, 0, 5), (8, 0, 5))) == ([], 5, first.blocks[0])


def test_a_block_evicted_for_the_sequence_that_copies_it_is_not_needed_any_more():
    kv = cache(2, 8)
    ended(kv, prefilled(kv, 0, (7, 0, 16)))
    seq = asking(1, (7, 0, 5), (8, 0, 11))
    assert kv.match(seq).num_tokens == 5
    assert admitted(kv, seq) == []
    assert kv.num_copies == 0
    assert kv.usage().held == 16


def test_an_answer_is_published_when_it_ends_less_its_last_token():
    kv = cache(20, 4)
    seq = prefilled(kv, 3, (7, 0, 6))
    follow_up = ((7, 0, 6), (answer_stream(3), 0, 10), (9, 0, 3))
    for _ in range(9):
        assert kv.grow(seq, 1) is not None
        seq.num_computed += 1
        seq.num_tokens += 1
        assert hit_tokens(kv, *follow_up) == 4, "while it is written only its prompt is found"
    assert (seq.num_generated, seq.num_computed) == (10, 15)
    ended(kv, seq, 10)
    assert hit_tokens(kv, *follow_up) == 12


def test_a_preempted_sequence_publishes_no_more_and_its_prompt_stays():
    kv = cache(20, 4)
    seq = prefilled(kv, 3, (7, 0, 6))
    for _ in range(9):
        kv.grow(seq, 1)
        seq.num_computed += 1
        seq.num_tokens += 1
    kv.release(seq)
    usage = kv.usage()
    assert (usage.held, usage.cached) == (0, 4)
    assert kv.match(seq).num_tokens == 4


def test_the_least_recently_used_leaf_goes_whole_and_then_its_parent_may():
    kv = cache(9, 4)
    ended(kv, prefilled(kv, 0, (7, 0, 8)))  # a path of two blocks,
    ended(kv, prefilled(kv, 1, (7, 0, 8), (1, 0, 8)))  # two more below it,
    ended(kv, prefilled(kv, 2, (7, 0, 8), (2, 0, 8)))  # and two beside those
    ended(kv, prefilled(kv, 3, (3, 0, 8)))  # and a path of two
    assert kv.usage().cached == 8 * 4
    assert hit_tokens(kv, (7, 0, 8), (1, 0, 9)) == 16, "looking is no use"

    def cached_after(num_taken: int) -> tuple[int, int, int, int]:
        kv.pool.take(num_taken)
        return (
            hit_tokens(kv, (7, 0, 9)),
            hit_tokens(kv, (7, 0, 8), (1, 0, 9)),
            hit_tokens(kv, (7, 0, 8), (2, 0, 9)),
            hit_tokens(kv, (3, 0, 9)),
        )

    assert cached_after(1) == (8, 16, 16, 8)  # the ninth block was never used
    assert cached_after(1) == (8, 8, 16, 8)
    assert cached_after(1) == (8, 8, 16, 8)  # the second block of the same leaf
    assert cached_after(1) == (8, 8, 8, 8)
    assert cached_after(2) == (0, 0, 0, 8)  # used with the leaf below: before the other path
    assert cached_after(2) == (0, 0, 0, 0)


def test_what_is_held_is_not_evicted_and_what_lies_below_is():
    kv = cache(5, 4)
    ended(kv, prefilled(kv, 0, (7, 0, 16)))
    seq = asking(1, (7, 0, 8), (8, 0, 4))
    admitted(kv, seq)  # splits the path after two blocks, and holds these
    assert kv.usage().cached == 8
    kv.pool.take(2)
    assert hit_tokens(kv, (7, 0, 17)) == 8
    assert kv.pool.num_free == 0


class PlainTrie:
    """Every block of every path by the whole text up to its end; everything is looked up by going
    through all of them. `ends` are the texts at which a node ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: dict[tuple, int] = {}  # text -> when last used
        self.ends: set[tuple] = set()
        self.now = 0

    def use(self, text: tuple) -> None:
        """Of whole blocks: all of them, from here on in nodes of their own."""
        self.now += 1
        known = [end for end in self._cuts(text) if text[:end] in self.used]
        if known:
            self.ends.add(text[: known[-1]])  # others may go on behind it
        for end in self._cuts(text):
            self.used[text[:end]] = self.now
        self.ends.add(text)

    def longest(self, text: tuple) -> int:
        common = 0
        for path in self.used:
            same = [left == right for left, right in zip(path, text, strict=False)]
            common = max(common, [*same, False].index(False))
        return min(common, len(text) - 1)

    def evict(self, held: list[tuple]) -> int:
        """The least recently used leaf goes; of how many blocks."""
        kept = {text[:end] for text in held for end in self._cuts(text)}
        parents = {path[: -self.size] for path in self.used}
        leaves = [path for path in self.used if path not in parents and path not in kept]
        path = min(leaves, key=self.used.__getitem__)
        count = 0
        while True:
            del self.used[path]
            self.ends.discard(path)
            path, count = path[: -self.size], count + 1
            if not path or path in self.ends:
                return count

    def _cuts(self, text: tuple) -> range:
        return range(self.size, len(text) + 1, self.size)


STREAMS = st.sampled_from([0, 1, answer_stream(0), answer_stream(1)])
PROMPTS = st.lists(st.builds(Span, STREAMS, st.just(0), st.integers(1, 7)), min_size=1, max_size=3)


class RadixMachine(RuleBasedStateMachine):
    """A scheduler without rules over a cache with a tree, and the slots of its pool: tokens are
    written through the block tables and read back through them and through every hit."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, tuple] = {}
        self.running: list[Sequence] = []
        self.num_sealed: dict[Sequence, int] = {}  # tokens of its that are in the trie
        self.num_requests = 0
        self.num_copies = 0

    @initialize(size=st.integers(1, 4))
    def build(self, size):
        self.size = size
        self.kv = cache(NUM_BLOCKS, size)
        self.trie = PlainTrie(size)

    def token(self, seq: Sequence, place: int) -> tuple:
        for stream, start, length in seq.request.prompt:
            if place < length:
                return stream, start + place
            place -= length
        if seq.sample:
            return "further answer", seq.request.index, seq.sample, place
        return answer_stream(seq.request.index), place

    def text(self, seq: Sequence, length: int) -> tuple:
        return tuple(self.token(seq, place) for place in range(length))

    def slot(self, seq: Sequence, place: int) -> int:
        return seq.blocks[place // self.size] * self.size + place % self.size

    def num_held(self) -> int:
        return len({block for seq in self.running for block in seq.blocks})

    def take(self, num_blocks: int) -> None:
        """The trie makes room for blocks about to be taken beside those held already."""
        held = [self.text(seq, self.num_sealed[seq]) for seq in self.running]
        while NUM_BLOCKS - self.num_held() - self.num_cold() < num_blocks:
            self.trie.evict(held)

    def num_cold(self) -> int:
        held = {
            self.text(seq, end)
            for seq in self.running
            for end in range(self.size, self.num_sealed[seq] + 1, self.size)
        }
        return sum(path not in held for path in self.trie.used)

    def write(self, seq: Sequence, moves: list[BlockMove], num_new: int) -> None:
        for kind, source, target in moves:
            assert kind == COPY
            assert source != target
            for place in range(self.size):
                token = self.slots.get(source * self.size + place)
                self.slots[target * self.size + place] = token
            self.num_copies += 1
        for place in range(seq.num_computed, seq.num_computed + num_new):
            self.slots[self.slot(seq, place)] = self.token(seq, place)
        seq.num_computed += num_new
        if seq.num_computed == seq.num_tokens:
            seq.num_tokens += 1

    def publish(self, seq: Sequence) -> None:
        self.kv.publish(seq, seq.num_computed)
        self.num_sealed[seq] = seq.num_computed // self.size * self.size
        if self.num_sealed[seq]:
            self.trie.use(self.text(seq, self.num_sealed[seq]))

    @rule(prompt=PROMPTS, chunk=st.integers(1, 9))
    def admit(self, prompt, chunk):
        seq = asking(self.num_requests, *prompt)
        known = seq.num_tokens
        hit = self.kv.match(seq)
        assert hit.num_tokens == self.trie.longest(self.text(seq, known))
        assert 0 <= hit.num_tokens - len(hit.blocks) * self.size <= self.size - 1
        assert (hit.tail >= 0) == (hit.num_tokens > len(hit.blocks) * self.size)
        for place in range(hit.num_tokens):
            block = [*hit.blocks, hit.tail][place // self.size]
            assert self.slots[block * self.size + place % self.size] == self.token(seq, place)
        usage, num_new = self.kv.usage(), min(known - hit.num_tokens, chunk)
        held = {block for one in self.running for block in one.blocks}
        moves = self.kv.admit(seq, hit, num_new, is_alone=not self.running)
        needed = -(-known // self.size) - len(set(hit.blocks) & held)
        assert (moves is None) == (needed > NUM_BLOCKS - len(held)), "room for all known tokens"
        if moves is None:
            assert self.kv.usage() == usage
            assert not seq.blocks
            return
        whole, table = len(hit.blocks), seq.blocks
        self.num_requests += 1
        self.running.append(seq)
        self.num_sealed[seq] = whole * self.size
        if whole:
            self.trie.use(self.text(seq, whole * self.size))
        seq.blocks = table[:whole]
        self.take(len(table) - whole)
        seq.blocks = table
        seq.num_computed = hit.num_tokens
        self.write(seq, moves, num_new)
        self.publish(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def grow(self, data, chunk):
        seq = data.draw(st.sampled_from(self.running))
        num_new = min(seq.num_tokens - seq.num_computed, chunk)
        usage, table = self.kv.usage(), list(seq.blocks)
        is_prefill = seq.num_computed < seq.request.prompt_tokens
        moves = self.kv.grow(seq, num_new)
        if moves is None:
            assert (self.kv.usage(), seq.blocks) == (usage, table), "a refusal changes nothing"
            return
        grown, seq.blocks = seq.blocks, table
        self.take(len(grown) - len(table) + len(moves))
        seq.blocks = grown
        self.write(seq, moves, num_new)
        if is_prefill:
            self.publish(seq)

    @precondition(lambda self: any(seq.num_generated == 1 for seq in self.running))
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from([s for s in self.running if s.num_generated == 1]))
        samples = [s.sample for s in self.running if s.request is parent.request]
        if parent.sample or max(samples) > 3:
            return
        child = Sequence(
            parent.request,
            max(samples) + 1,
            num_tokens=parent.num_tokens,
            num_computed=parent.num_computed,
        )
        self.kv.fork(parent, child)
        self.num_sealed[child] = self.num_sealed[parent]
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_finished=st.booleans())
    def leave(self, data, is_finished):
        seq = data.draw(st.sampled_from(self.running))
        if is_finished:
            self.publish(seq)
        self.running.remove(seq)
        self.kv.release(seq)
        assert not seq.blocks

    @invariant()
    def every_sequence_reads_its_own_text(self):
        for seq in self.running:
            for place in range(seq.num_computed):
                assert self.slots[self.slot(seq, place)] == self.token(seq, place)
            assert len(seq.blocks) == -(-seq.num_computed // self.size)
            assert len(set(seq.blocks)) == len(seq.blocks)

    @invariant()
    def every_path_of_the_trie_is_found_and_no_other(self):
        for number, path in enumerate(self.trie.used):
            stream = 1 << 50
            spans = [Span(*token, 1) if len(token) == 2 else None for token in path]
            if None not in spans:  # the answer of a further sample cannot be quoted
                asked = asking(1000 + number, *spans, (stream, 0, 1))
                assert self.kv.match(asked).num_tokens == len(path)
        assert self.kv.usage().cached == self.num_cold() * self.size

    @invariant()
    def the_accounts_are_those_of_the_tables(self):
        usage, pool = self.kv.usage(), self.kv.pool
        holders = Counter(block for seq in self.running for block in seq.blocks)
        assert pool.shared == {block: n - 1 for block, n in holders.items() if n > 1}
        everywhere = [*holders, *pool.queue, *pool.unkeyed]
        assert sorted(everywhere) == list(range(NUM_BLOCKS)), "no block is twice or nowhere"
        assert usage.held == usage.granted == len(holders) * self.size
        assert usage.held + usage.cached + usage.largest_free_run == NUM_BLOCKS * self.size
        filled: Counter = Counter()
        distinct: dict[int, int] = {}
        for seq in self.running:
            for number, block in enumerate(seq.blocks):
                inside = min(seq.num_computed - number * self.size, self.size)
                filled[block] += inside
                distinct[block] = max(distinct.get(block, 0), inside)
        assert usage.overlap == filled.total() - sum(distinct.values())
        assert self.kv.num_copies == self.num_copies

    def teardown(self):
        for seq in self.running:
            self.kv.release(seq)
        usage = self.kv.usage()
        assert (usage.held, usage.overlap) == (0, 0)
        self.kv.pool.take(NUM_BLOCKS)
        assert self.kv.usage().held == NUM_BLOCKS * self.size, "every cached block can be evicted"


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=150, stateful_step_count=40
)


TREE = {"prefix_index": "radix"}


def assert_jumps_change_nothing(workload, setup, **options) -> None:
    jumping, stepping = (simulated(workload, setup, jump=j, **options) for j in (True, False))
    for booking in jumping:
        assert_same_runs(jumping[booking], stepping[booking])
    logs = [runs["paper"].log.replicas for runs in (jumping, stepping)]
    copies = [[(one.num_copies, one.num_hit_copies) for one in log] for log in logs]
    assert copies[0] == copies[1]


@pytest.mark.parametrize("forks", [False, True])
def test_jumping_and_stepping_tell_the_same_with_a_tree(forks):
    @settings(SAME_CASES_EVERY_TIME, max_examples=250)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        family = "forks, prefix cache, a watermark" if forks else "prefix cache"
        setup = replace(data.draw(setups(family)), **TREE)
        assert_jumps_change_nothing(data.draw(workloads(setup)), setup)

    compare()


@pytest.mark.parametrize("version", RULES)
def test_jumping_and_stepping_tell_the_same_with_a_tree_under_the_rules_of_each_version(version):
    @settings(SAME_CASES_EVERY_TIME, max_examples=50)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        setup = replace(data.draw(setups("prefix cache")), **TREE)
        threshold = data.draw(few(0, 1, 2, 5))
        workload = data.draw(workloads(setup))
        assert_jumps_change_nothing(workload, setup, rules=RULES[version], threshold=threshold)

    compare()


@st.composite
def chats(draw: st.DrawFn) -> list[Row]:
    """Sessions whose every turn quotes all before it, answers included."""
    rows: list[Row] = []
    for session in range(draw(st.integers(1, 4))):
        spans, after = [(1000, 0, draw(st.integers(1, 9)))], -1
        for _ in range(draw(st.integers(1, 4))):
            number = len(rows)
            asked = [*spans, (number, 0, draw(st.integers(1, 6)))]
            num_answer = draw(st.integers(1, 9))
            rows.append(
                Row(3 * session, asked, num_answer, after=after, think_ms=draw(few(0, 1, 9)))
            )
            spans, after = [*asked, (answer_stream(number), 0, num_answer)], number
    return rows


@settings(SAME_CASES_EVERY_TIME, max_examples=150)
@given(rows=chats(), size=few(1, 2, 4, 8), spare=st.integers(0, 20), seats=st.integers(1, 5))
def test_jumping_and_stepping_tell_the_same_of_sessions_with_a_tree(rows, size, spare, seats):
    setup = Setup(
        num_blocks=(80 + spare) // size,
        block_size=size,
        prefix_caching=True,
        max_num_seqs=seats,
        max_model_len=80,
        max_num_batched_tokens=11,
        **TREE,
    )
    assert_jumps_change_nothing(workload_of(rows), setup)


@settings(SAME_CASES_EVERY_TIME, max_examples=60)
@given(rows=chats(), size=few(1, 2, 3, 4, 8, 16))
def test_tokens_hit_at_least_what_blocks_of_any_size_do_where_nothing_is_evicted(rows, size):
    """One after the other: what runs side by side a hash chain shares earlier."""
    hits = []
    for options in ({"block_size": 1, **TREE}, {"block_size": size, **TREE}, {"block_size": size}):
        setup = Setup(
            num_blocks=3000 // options["block_size"],
            max_model_len=200,
            max_num_seqs=1,
            max_num_batched_tokens=200,
            prefix_caching=True,
            **options,
        )
        run = simulated(workload_of(rows), setup, jump=True)["paper"]
        hits.append(run.requests["num_hit"])
    tokens, in_part, whole = hits
    assert (tokens >= in_part).all()
    assert (in_part >= whole).all()


def test_a_session_at_one_token_a_block_hits_all_it_said_before():
    """The second turn finds prompt and answer of the first, less the token that was not written."""
    rows = [
        Row(0, own(0, 7), 5),
        Row(0, [*own(0, 7), (answer_stream(0), 0, 5), (1, 0, 3)], 2, 1, 0),
    ]
    setup = Setup(num_blocks=60, block_size=1, prefix_caching=True, **TREE)
    run = simulated(workload_of(rows), setup, jump=True)["paper"]
    assert run.requests["num_hit"].tolist() == [0, 7 + 5 - 1]


def test_a_forked_answer_is_not_found_while_it_is_written():
    quote = [*own(0, 7), (answer_stream(0), 0, 1), (1, 0, 3)]
    rows = [Row(0, own(0, 7), 9, num_samples=2), Row(5, quote, 2), Row(30, quote, 2)]
    setup = Setup(num_blocks=30, prefix_caching=True, can_fork=True, **TREE)
    run = simulated(workload_of(rows), setup, jump=True)["paper"]
    assert run.requests["num_hit"].tolist() == [0, 4, 10]  # the third: of the second all but one
