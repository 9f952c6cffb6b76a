"""The paged policy against the slots themselves: every token is written and read back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.policy import NO_HIT
from kvsim.engine.plan import COPY, BlockMove
from kvsim.engine.request import Request, Sequence, Span, answer_stream, merged

NUM_BLOCKS = 9
STREAMS = st.sampled_from([0, 1, answer_stream(0), answer_stream(1)])
PROMPTS = st.lists(st.builds(Span, STREAMS, st.just(0), st.integers(1, 6)), min_size=1, max_size=3)


class PagedMachine(RuleBasedStateMachine):
    """A scheduler without rules: admits, grows, forks and releases at random, writes each token
    through the block table as it is computed and obeys the copies asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, tuple] = {}
        self.running: list[Sequence] = []
        self.num_requests = 0
        self.num_copies = 0

    @initialize(size=st.integers(1, 4), caching=st.booleans())
    def build(self, size, caching):
        self.size = size
        self.kv = Paged(NUM_BLOCKS, size, can_fork=True, prefix_caching=caching)

    def token(self, seq: Sequence, place: int) -> tuple:
        for stream, start, length in seq.request.prompt:
            if place < length:
                return stream, start + place
            place -= length
        if seq.sample:
            return "further answer", seq.request.index, seq.sample, place
        return answer_stream(seq.request.index), place

    def slot(self, seq: Sequence, place: int) -> int:
        return seq.blocks[place // self.size] * self.size + place % self.size

    def write(self, seq: Sequence, moves: list[BlockMove], num_new: int) -> None:
        for kind, source, target in moves:
            assert kind == COPY
            for place in range(self.size):
                token = self.slots.get(source * self.size + place)
                self.slots[target * self.size + place] = token
            self.num_copies += 1
        for place in range(seq.num_computed, seq.num_computed + num_new):
            self.slots[self.slot(seq, place)] = self.token(seq, place)
        seq.num_computed += num_new
        if seq.num_computed == seq.num_tokens:
            seq.num_tokens += 1

    @rule(prompt=PROMPTS, chunk=st.integers(1, 9))
    def admit(self, prompt, chunk):
        spans = merged(tuple(prompt))
        num_prompt = sum(span.length for span in spans)
        seq = Sequence(Request(self.num_requests, spans, num_prompt), num_tokens=num_prompt)
        hit = self.kv.match(seq)
        found = hit.blocks
        assert (hit.num_tokens, hit.tail) == (len(found) * self.size, -1)
        assert len(found) <= (num_prompt - 1) // self.size
        for place in range(hit.num_tokens):
            slot = found[place // self.size] * self.size + place % self.size
            assert self.slots[slot] == self.token(seq, place), "a hit holds the prompt's tokens"
        usage, num_new = self.kv.usage(), min(num_prompt - hit.num_tokens, chunk)
        moves = self.kv.admit(seq, hit, num_new, is_alone=not self.running)
        held = {block for one in self.running for block in one.blocks}
        needed = -(-num_prompt // self.size) - len(set(found) & held)
        assert (moves is None) == (needed > NUM_BLOCKS - len(held)), "room for all known tokens"
        if moves is None:
            assert self.kv.usage() == usage
            assert not seq.blocks
            return
        self.num_requests += 1
        self.running.append(seq)
        seq.num_computed = hit.num_tokens
        self.write(seq, moves, num_new)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def grow(self, data, chunk):
        seq = data.draw(st.sampled_from(self.running))
        num_new = min(seq.num_tokens - seq.num_computed, chunk)
        usage, table = self.kv.usage(), list(seq.blocks)
        moves = self.kv.grow(seq, num_new)
        if moves is None:
            assert (self.kv.usage(), seq.blocks) == (usage, table), "a refusal changes nothing"
            assert NUM_BLOCKS - len({b for one in self.running for b in one.blocks}) <= len(
                range(len(table), -(-(seq.num_computed + num_new) // self.size))
            )
            return
        self.write(seq, moves, num_new)

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
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.kv.release(seq)
        assert not seq.blocks

    @invariant()
    def every_sequence_reads_its_own_text(self):
        for seq in self.running:
            for place in range(seq.num_computed):
                assert self.slots[self.slot(seq, place)] == self.token(seq, place)

    @invariant()
    def tables_are_as_long_as_what_is_computed(self):
        for seq in self.running:
            assert len(seq.blocks) == -(-seq.num_computed // self.size)
            assert len(set(seq.blocks)) == len(seq.blocks)

    @invariant()
    def the_accounts_are_those_of_the_tables(self):
        usage = self.kv.usage()
        holders = Counter(block for seq in self.running for block in seq.blocks)
        assert usage.held == usage.granted == len(holders) * self.size
        filled: Counter = Counter()
        distinct: dict[int, int] = {}
        for seq in self.running:
            for number, block in enumerate(seq.blocks):
                inside = min(seq.num_computed - number * self.size, self.size)
                filled[block] += inside
                distinct[block] = max(distinct.get(block, 0), inside)
        assert usage.overlap == filled.total() - sum(distinct.values())
        assert usage.largest_free_run == NUM_BLOCKS * self.size - usage.held - usage.cached
        assert self.kv.num_copies == self.num_copies

    def teardown(self):
        for seq in self.running:
            self.kv.release(seq)
        usage = self.kv.usage()
        assert (usage.held, usage.overlap) == (0, 0)
        assert usage.cached + usage.largest_free_run == NUM_BLOCKS * self.size


TestPaged = PagedMachine.TestCase
TestPaged.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=120, stateful_step_count=40
)


def prompted(kv: Paged, index: int, length: int, stream: int | None = None) -> Sequence:
    """A sequence with its prompt computed and a first token known."""
    span = Span(index if stream is None else stream, 0, length)
    seq = Sequence(Request(index, (span,), length), num_tokens=length)
    hit = kv.match(seq)
    num_hit = hit.num_tokens
    assert kv.admit(seq, hit, length - num_hit, is_alone=False) is not None
    seq.num_hit, seq.num_computed, seq.num_tokens = num_hit, length, length + 1
    return seq


def forked(kv: Paged, parent: Sequence, num_answers: int) -> list[Sequence]:
    answers = [parent]
    for sample in range(1, num_answers):
        child = Sequence(
            parent.request,
            sample,
            num_tokens=parent.num_tokens,
            num_computed=parent.num_computed,
        )
        kv.fork(parent, child)
        answers.append(child)
    return answers


@pytest.mark.parametrize("num_answers", range(2, 7))
def test_sharers_of_a_last_block_make_one_copy_fewer_than_they_are(num_answers):
    kv = Paged(40, 4, can_fork=True)
    answers = forked(kv, prompted(kv, 0, 10), num_answers)
    moves = [kv.grow(seq, 1) for seq in answers]
    assert [len(one) for one in moves] == [1] * (num_answers - 1) + [0]
    assert kv.num_copies == num_answers - 1
    assert len({seq.blocks[-1] for seq in answers}) == num_answers


def test_a_prompt_of_whole_blocks_is_never_copied():
    kv = Paged(40, 4, can_fork=True)
    answers = forked(kv, prompted(kv, 0, 12), 4)
    assert all(kv.grow(seq, 1) == [] for seq in answers)
    assert kv.num_copies == 0


@pytest.mark.parametrize(
    "length, num_hit", [(63, 48), (64, 48), (65, 64), (16, 0), (17, 16), (1, 0)]
)
def test_a_repeated_prompt_leaves_its_last_token_to_compute(length, num_hit):
    kv = Paged(40, 16, prefix_caching=True)
    prompted(kv, 0, length, stream=7)
    assert prompted(kv, 1, length, stream=7).num_hit == num_hit


def test_tails_are_reused_before_the_heads_that_they_hang_on():
    kv = Paged(6, 4, prefix_caching=True)
    first = prompted(kv, 0, 18, stream=7)
    blocks = list(first.blocks)
    kv.release(first)
    other = prompted(kv, 1, 14, stream=8)
    # block 5 was never used; the tail without a key goes first, then the deepest cached blocks
    assert other.blocks == [blocks[4], 5, blocks[3], blocks[2]]
    again = Sequence(Request(2, (Span(7, 0, 18),), 18), num_tokens=18)
    assert kv.match(again).blocks == blocks[:2]


def test_the_watermark_holds_back_admissions_but_neither_growth_nor_who_is_alone():
    kv = Paged(8, 4, watermark_blocks=2)
    seq = Sequence(Request(0, (Span(0, 0, 28),), 28), num_tokens=28)
    assert kv.admit(seq, NO_HIT, 28, is_alone=False) is None
    assert kv.admit(seq, NO_HIT, 28, is_alone=True) is not None
    seq.num_computed, seq.num_tokens = 28, 29
    assert kv.grow(seq, 1) is not None
    assert kv.usage().held == 32


def test_who_grows_in_a_step_is_listed_in_batch_order():
    kv, decodes = Paged(40, 4), DecodeSet(4)
    for index, length in enumerate((8, 4, 12, 8)):
        seq = prompted(kv, index, length)
        seq.order = 3 - index  # joins ahead of those in the set
        decodes.join(seq, decodes.clock)
    assert [seq.order for seq in kv.growing(decodes)] == [0, 1, 2, 3]


def test_the_last_sampled_token_needs_no_slot():
    kv = Paged(2, 4)
    request = Request(0, (Span(0, 0, 5),), 5)
    assert kv.fits(request, 9)
    assert not kv.fits(request, 10)
