"""The prefix index against whole prefixes compared token by token."""

from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvsim.engine.kv.hash_chain import HashChain, block_keys
from kvsim.engine.request import Request, Sequence, Span, answer_stream, merged

SAME_CASES = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def text_of(prompt: tuple[Span, ...]) -> tuple:
    return tuple((stream, start + n) for stream, start, length in prompt for n in range(length))


PROMPTS = st.lists(
    st.builds(
        Span, st.sampled_from([0, 1, 5, answer_stream(0)]), st.integers(0, 3), st.integers(0, 9)
    ),
    max_size=5,
).map(tuple)


@SAME_CASES
@given(left=PROMPTS, right=PROMPTS, size=st.integers(1, 7))
def test_keys_are_equal_where_all_tokens_so_far_are_equal_and_only_there(left, right, size):
    keys, texts = [], []
    for number, prompt in enumerate((left, right)):
        keys.append(list(islice(block_keys(merged(prompt), -90 - number, size), 12)))
        own = ((-90 - number, place) for place in range(12 * size))
        texts.append((text_of(prompt) + tuple(own))[: 12 * size])
    for block in range(12):
        end = (block + 1) * size
        assert (keys[0][block] == keys[1][block]) == (texts[0][:end] == texts[1][:end])


@SAME_CASES
@given(spans=PROMPTS)
def test_merging_keeps_the_tokens_and_leaves_nothing_to_merge(spans):
    short = merged(spans)
    assert text_of(short) == text_of(spans)
    assert merged(short) == short
    assert all(span.length > 0 for span in short)


def test_an_answer_quoted_by_the_next_turn_has_the_keys_its_owner_wrote():
    asked = (Span(4, 0, 6),)
    reply = (Span(4, 0, 6), Span(answer_stream(3), 0, 7), Span(5, 0, 3))
    owner = list(islice(block_keys(asked, answer_stream(3), 4), 3))
    quoter = list(islice(block_keys(reply, answer_stream(9), 4), 3))
    assert owner == quoter


class ChainMachine(RuleBasedStateMachine):
    """Sequences of a small alphabet; the model lists published blocks with their whole prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.published: dict[int, tuple] = {}  # block -> prefix, in order of publication
        self.sequences: list[tuple[Sequence, tuple]] = []
        self.next_block = 0

    @initialize(size=st.integers(1, 4))
    def build(self, size):
        self.size = size
        self.index = HashChain(size)

    @rule(prompt=PROMPTS.filter(lambda spans: sum(span.length for span in spans) > 0))
    def arrive(self, prompt):
        short = merged(prompt)
        text = text_of(short)
        request = Request(len(self.sequences), short, len(text))
        seq = Sequence(request, num_tokens=len(text))
        hit = self.index.match(seq).blocks
        assert hit == self._expected_hit(text)
        assert len(hit) <= (len(text) - 1) // self.size, "a token is always left to compute"
        own = len(text) // self.size - len(hit)
        seq.blocks = hit + list(range(self.next_block, self.next_block + own))
        self.next_block += own
        seq.num_sealed = len(hit)
        self.sequences.append((seq, text))

    def _expected_hit(self, text: tuple) -> list[int]:
        found: list[int] = []
        for end in range(self.size, len(text), self.size):
            named = [block for block, prefix in self.published.items() if prefix == text[:end]]
            if not named:
                break
            found.append(named[0])  # of copies the first published
        return found

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def seal(self, data):
        seq, text = data.draw(st.sampled_from(self.sequences))
        upto = data.draw(st.integers(0, len(seq.blocks)))
        self.index.seal(seq, upto)
        for number in range(upto):
            self.published.setdefault(seq.blocks[number], text[: (number + 1) * self.size])
        assert all(block in self.index for block in self.published)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def forget(self, data):
        block = data.draw(st.sampled_from(list(self.published)))
        self.index.forget(block)
        del self.published[block]
        assert block not in self.index
        # the pool reuses it: whoever had it in a table is gone
        self.sequences = [one for one in self.sequences if block not in one[0].blocks]


TestChain = ChainMachine.TestCase
TestChain.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=30
)


def test_of_copies_the_first_published_is_found_and_then_the_next():
    index = HashChain(2)
    twins = []
    for number, block in enumerate((5, 3, 8)):
        seq = Sequence(Request(number, (Span(0, 0, 2),), 2), num_tokens=2)
        seq.blocks = [block]
        index.seal(seq, 1)
        twins.append(seq)
    asker = Sequence(Request(9, (Span(0, 0, 3),), 3), num_tokens=3)
    assert index.match(asker).blocks == [5]
    index.forget(3)
    assert index.match(asker).blocks == [5]
    index.forget(5)
    assert index.match(asker).blocks == [8]
    index.forget(8)
    assert index.match(asker).blocks == []
