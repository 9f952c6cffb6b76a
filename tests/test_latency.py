"""Step-time models: what a step costs, in whole picoseconds, stepwise or at once."""

import pytest

from kvsim.engine.plan import COPY, BlockMove
from kvsim.latency.model import Linear, Tabulated

TABLE = Tabulated(
    [1, 2, 4, 16],
    [6.0, 10.0, 9.0, 15.0],
    [1, 8, 10, 40],
    [7.0, 14.0, 13.0, 28.0],
    per_seq_ms=0.3,
    per_context_token_us=0.4001,
    per_chunk_ms=0.8,
    per_pair_us=0.12,
    copy_block_us=2.5,
)


@pytest.mark.parametrize(
    ("load", "wanted_ms"),
    [
        ((0, 1, 0, 0, 0), 6.0 + 0.3),
        ((0, 3, 0, 0, 0), 9.5 + 0.9),
        ((0, 2, 1000, 0, 0), 10.0 + 0.6 + 0.4001),
        ((0, 22, 0, 0, 0), 18.0 + 6.6),  # on from the last two entries
        ((9, 1, 0, 1, 45), 13.5 + 0.3 + 0.8 + 0.0054),
        ((8, 4, 300, 2, 20), 13.0 + 1.2 + 0.12003 + 1.6 + 0.0024),
        ((0, 0, 0, 0, 0), 1e-6),  # nothing computed still takes a nanosecond
    ],
)
def test_a_table_adds_its_entry_and_the_costs_of_attention(load, wanted_ms):
    assert TABLE.step_ns(*load, 0, 1)[0] == pytest.approx(wanted_ms * 1e6, abs=1)


def test_moves_come_before_the_work_of_a_step():
    moves = [BlockMove(COPY, 0, 1)] * 3
    assert TABLE.step_ns(0, 0, 0, 0, 0, 0, 1, moves) == [7_500]
    (with_work,), (work,) = (TABLE.step_ns(0, 2, 9, 0, 0, 2, 1, m) for m in (moves, ()))
    assert with_work - work == 7_500


@pytest.mark.parametrize("model", [TABLE, Linear(3, 0.2, 0.00313, 0.1, 0.5)])
def test_a_jump_takes_what_its_steps_take(model):
    num_seqs, context = 7, 1234
    singly = [
        model.step_ns(0, num_seqs, context + n * num_seqs, 0, 0, num_seqs, 1)[0] for n in range(500)
    ]
    assert model.step_ns(0, num_seqs, context, 0, 0, num_seqs, 500) == singly
    assert len(set(singly)) > 10


def test_a_table_whose_last_entry_is_lower_falls_no_further():
    falling = Tabulated([1, 2], [2.0, 1.0], [1, 4], [3.0, 1.5], 0, 0, 0, 0)
    assert falling.step_ns(0, 2, 0, 0, 0, 2, 1) == [1_000_000]
    assert falling.step_ns(0, 9, 0, 0, 0, 9, 2) == [1_000_000, 1_000_000]
    assert falling.step_ns(3, 1, 0, 1, 6, 0, 1) == [2_000_000]  # between entries it may fall
    assert falling.step_ns(90, 1, 0, 1, 9, 0, 1) == [1_500_000]
