"""The contiguous policy against a dict of who holds which block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsim.engine.kv.contiguous import Contiguous, reserve_max, reserve_oracle, reserve_pow2
from kvsim.engine.kv.placement import Buddy, Fit, best_fit, first_fit
from kvsim.engine.kv.policy import NO_HIT
from kvsim.engine.request import Request, Sequence, Span

LIMIT = 48
PLACEMENTS = {
    "buddy": lambda blocks, size: Buddy(blocks, -(-LIMIT // size)),
    "first_fit": lambda blocks, size: Fit(blocks, first_fit),
    "best_fit": lambda blocks, size: Fit(blocks, best_fit),
}
OUTPUTS = [1 + 5 * n % 23 for n in range(200)]
RESERVES = {
    "max": reserve_max(LIMIT),
    "pow2": reserve_pow2(OUTPUTS),
    "oracle": reserve_oracle(OUTPUTS),
    "fixed": None,
}


def request_of(index: int, prompt_tokens: int) -> Request:
    return Request(index, (Span(index, 0, prompt_tokens),), prompt_tokens)


class ContiguousMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.holder_of: dict[int, Sequence] = {}
        self.granted: dict[int, int] = {}  # by request
        self.running: list[Sequence] = []
        self.num_requests = 0

    @initialize(
        blocks=st.integers(1, 40),
        size=st.sampled_from([1, 2, 4, 16]),
        placement=st.sampled_from(list(PLACEMENTS)),
        reserve=st.sampled_from(list(RESERVES)),
    )
    def build(self, blocks, size, placement, reserve):
        self.num_blocks, self.size, self.reserve = blocks, size, reserve
        place = PLACEMENTS[placement](blocks, size)
        self.is_rounded = placement == "buddy"
        self.kv = Contiguous(blocks, size, place, reserve=RESERVES[reserve], limit=LIMIT)

    @rule(prompt_tokens=st.integers(1, LIMIT + 3))
    def admit(self, prompt_tokens):
        index = self.num_requests
        self.num_requests += 1
        request = request_of(index, prompt_tokens)
        power = next(1 << n for n in range(9) if 1 << n >= OUTPUTS[index])
        extra = {"max": LIMIT, "pow2": power, "oracle": OUTPUTS[index], "fixed": LIMIT}
        granted = min(prompt_tokens + extra[self.reserve], LIMIT)
        if self.reserve == "fixed":
            granted = LIMIT
        final = min(prompt_tokens + OUTPUTS[index], LIMIT)
        fits = self.kv.fits(request, final)
        if prompt_tokens >= granted:
            assert not fits
            return
        seq = Sequence(request, num_tokens=prompt_tokens)
        usage = self.kv.usage()
        moves = self.kv.admit(seq, self.kv.match(seq), 1, is_alone=not self.running)
        if moves is None:
            assert self.kv.usage() == usage, "a refusal changes nothing"
            assert self.running or not fits, "an empty pool takes what fits"
            return
        assert fits
        assert moves == []
        assert seq.blocks == list(range(seq.blocks[0], seq.blocks[0] + len(seq.blocks)))
        needed = -(-granted // self.size)
        held = next(1 << n for n in range(9) if 1 << n >= needed) if self.is_rounded else needed
        assert len(seq.blocks) == held
        for block in seq.blocks:
            assert block not in self.holder_of, "no block is held twice"
            assert 0 <= block < self.num_blocks
            self.holder_of[block] = seq
        self.granted[index] = granted
        self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow_to_the_end_of_the_grant(self, data):
        seq = data.draw(st.sampled_from(self.running))
        seq.num_computed = self.granted[seq.request.index] - 1
        assert self.kv.grow(seq, 1) == []

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.kv.release(seq)
        self.holder_of = {b: holder for b, holder in self.holder_of.items() if holder is not seq}
        assert not seq.blocks

    @invariant()
    def the_accounts_are_those_of_the_holders(self):
        usage = self.kv.usage()
        assert usage.held == len(self.holder_of) * self.size
        assert usage.granted == sum(self.granted[seq.request.index] for seq in self.running)
        assert (usage.cached, usage.overlap) == (0, 0)
        assert usage.largest_free_run <= self.num_blocks * self.size - usage.held

    def teardown(self):
        for seq in self.running:
            self.kv.release(seq)
        assert self.kv.usage()[:4] == (0, 0, 0, 0)


TestContiguous = ContiguousMachine.TestCase
TestContiguous.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=120, stateful_step_count=30
)


@pytest.mark.parametrize("output, reserved", [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64)])
def test_pow2_reserves_the_power_of_two_not_below_the_answer(output, reserved):
    assert reserve_pow2([output])(request_of(0, 5)) == reserved


def test_the_orca_max_baseline_holds_the_models_maximum_whatever_comes():
    kv = Contiguous(256, 16, Buddy(256, 128), reserve=reserve_max(2048), limit=2048)
    seq = Sequence(request_of(0, 3), num_tokens=3)
    kv.admit(seq, NO_HIT, 3, is_alone=True)
    assert kv.usage().held == kv.usage().granted == 2048


def test_a_prompt_that_fills_its_reservation_does_not_fit():
    kv = Contiguous(64, 4, Fit(64, first_fit), reserve=None, limit=20)
    assert kv.fits(request_of(0, 19), 20)
    assert not kv.fits(request_of(0, 20), 21)
