"""The small numbers that the paper's story is told with, through the public policies."""

from __future__ import annotations

import pytest

from kvsim.engine.kv.contiguous import Contiguous
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.placement import Buddy, Fit, best_fit, first_fit
from kvsim.engine.kv.policy import NO_HIT, KVCachePolicy
from kvsim.engine.request import Request, Sequence, Span
from tests.test_paged import forked, prompted

ANSWERS = (5, 13, 7, 18, 10)


def admitted(kv: KVCachePolicy, index: int, num_tokens: int) -> Sequence:
    """A sequence of num_tokens, all of them written."""
    request = Request(index, (Span(index, 0, num_tokens),), num_tokens)
    seq = Sequence(request, num_tokens=num_tokens)
    assert kv.admit(seq, NO_HIT, num_tokens, is_alone=False) is not None
    seq.num_computed = num_tokens
    return seq


def test_seven_tokens_in_a_reservation_of_sixteen_leave_nine_slots_empty():
    kv = Contiguous(16, 1, Buddy(16, 16), reserve=None, limit=16)
    admitted(kv, 0, 7)
    empty = kv.usage().held - 7
    assert empty == 9
    assert round(100 * empty / kv.usage().held) == 56


def test_eleven_tokens_in_pages_of_four_take_three_pages_and_leave_one_slot():
    kv = Paged(8, 4)
    seq = admitted(kv, 0, 11)
    assert len(seq.blocks) == 3
    assert kv.usage().held - 11 == 1


def test_a_table_reads_scattered_blocks_in_order():
    kv = Paged(9, 1)
    fillers = {seq.blocks[0]: seq for seq in (admitted(kv, n, 1) for n in range(9))}
    for block in (8, 1, 6):  # the last freed is the first reused
        kv.release(fillers[block])
    seq = admitted(kv, 9, 3)
    assert seq.blocks == [6, 1, 8]
    memory = dict(zip(seq.blocks, ("The red fox", "crossed the", "quiet field"), strict=True))
    assert memory == {1: "crossed the", 6: "The red fox", 8: "quiet field"}
    assert " ".join(memory[block] for block in seq.blocks) == "The red fox crossed the quiet field"


def test_two_answers_that_share_three_prompt_blocks_avoid_three_copies():
    kv = Paged(16, 4, can_fork=True)
    answers = forked(kv, prompted(kv, 0, 12), 2)
    assert kv.num_forked_blocks - kv.num_copies == 3
    assert kv.usage().held == 12
    assert [kv.grow(seq, 1) for seq in answers] == [[], []]
    assert kv.num_forked_blocks - kv.num_copies == 3


def test_each_write_to_a_shared_last_block_but_the_last_makes_one_private_block():
    kv = Paged(16, 4, can_fork=True)
    answers = forked(kv, prompted(kv, 0, 10), 4)
    shared = answers[0].blocks[-1]
    held = []
    for seq in answers:
        kv.grow(seq, 1)
        held.append(kv.usage().held // 4)
    assert held == [4, 5, 6, 6]
    assert answers[-1].blocks[-1] == shared
    assert kv.num_copies == 3


@pytest.mark.parametrize("choose", [first_fit, best_fit])
def test_five_answers_take_36_percent_fewer_slots_in_pages_than_in_reservations(choose):
    reserved = Contiguous(100, 1, Fit(100, choose), reserve=None, limit=20)
    paged = Paged(25, 4)
    for index, num_tokens in enumerate(ANSWERS):
        admitted(reserved, index, num_tokens)
        admitted(paged, index, num_tokens)
    assert sum(ANSWERS) == 53
    assert reserved.usage().held == reserved.usage().granted == 100
    assert paged.usage().held == 64
    assert 1 - paged.usage().held / reserved.usage().held == pytest.approx(0.36)
