"""The paper-era scheduler under random load: capacity, conservation, order, swaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.groups import GroupScheduler, PaperEra
from kvsim.engine.kv.host import HostFull, HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import COPY, SWAP_OUT, BlockMove, StepPlan
from kvsim.engine.request import Request, Sequence, Span, State
from kvsim.errors import UserError
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import Outcome, round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.tables import SLOT_KINDS, Run, expand
from kvsim.workload.workload import columns

LATENCY = Linear(base_ms=1, per_seq_ms=0, per_context_token_us=0, per_prompt_token_ms=0)
SAME = settings(derandomize=True, database=None, deadline=None, max_examples=150)


@st.composite
def loads(draw):
    """A few requests of up to three answers, and a pool that several of them overfill."""
    num_requests = draw(st.integers(1, 10))
    prompts = draw(st.lists(st.integers(1, 20), min_size=num_requests, max_size=num_requests))
    outputs = draw(st.lists(st.integers(1, 20), min_size=num_requests, max_size=num_requests))
    samples = draw(
        st.lists(st.sampled_from((1, 1, 2, 3)), min_size=num_requests, max_size=num_requests)
    )
    times = sorted(draw(st.lists(st.integers(0, 30), min_size=num_requests, max_size=num_requests)))
    workload = columns(
        np.array(times) * 1_000_000,
        np.array(prompts),
        np.array(outputs),
        num_samples=np.array(samples),
    )
    block_size = draw(st.sampled_from((1, 2, 4, 8)))
    engine = Engine(
        make_kv=lambda: Paged(draw_blocks, block_size, can_fork=True),
        make_executor=lambda lengths: SimulatedExecutor(LATENCY, lengths),
        batching=CONTINUOUS,
        max_model_len=48,
        max_num_seqs=draw(st.integers(3, 8)),
        max_num_batched_tokens=draw(st.sampled_from((48, 64))),
        chunked_prefill=False,
        paper_era=PaperEra(10_000, draw(st.sampled_from((0.0, 0.01, 0.2))), draw(st.booleans())),
    )
    draw_blocks = draw(st.integers(20, 140)) // block_size + 2
    return workload, engine


@SAME
@given(loads())
def test_every_request_that_fits_ends_with_exactly_its_tokens_and_the_pool_adds_up(load):
    workload, engine = load
    run = expand(simulate(workload, engine, route=round_robin()), "paper")
    finished = run.requests["outcome"] == Outcome.STOP
    refused = run.requests["outcome"] == Outcome.NEVER_FITS
    assert (finished | refused).all()
    made = workload.output_tokens * workload.num_samples
    assert run.requests["num_generated"][finished].tolist() == made[finished].tolist()
    assert run.steps["num_tokens"].sum() == made[finished].sum()
    slots = np.array([run.steps[f"{kind}_slots"] for kind in SLOT_KINDS])
    assert (slots >= 0).all()
    assert (slots.sum(axis=0) == run.log.pool_slots).all()
    (log,) = run.log.replicas
    assert log.num_swapped_out == log.num_swapped_in
    assert (run.steps["num_waiting"] >= 0).all()


@SAME
@given(loads())
def test_a_step_is_all_prompts_or_all_decodes_unless_they_are_mixed(load):
    workload, engine = load
    run = expand(simulate(workload, engine, route=round_robin()), "paper")
    both = (run.steps["num_prefills"] > 0) & (run.steps["num_decodes"] > 0)
    assert engine.paper_era.mixes_prompts or not both.any()


def scheduler_of(num_blocks: int, num_host_blocks: int, block_size: int = 4) -> GroupScheduler:
    return GroupScheduler(
        Paged(num_blocks, block_size, can_fork=True),
        HostPool(num_host_blocks),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        watermark_blocks=0,
    )


def start(scheduler: GroupScheduler, index: int, prompt: int, width: int) -> Sequence:
    request = Request(index, (Span(index, 0, prompt),), prompt, width)
    seq = Sequence(request, num_tokens=prompt, width=width)
    scheduler.submit(seq)
    return seq


def test_a_group_is_swapped_whole_and_keeps_its_sharing():
    """Two answers that share one full prompt block, each with a tail of its own, move as three
    distinct blocks, and come back as three."""
    scheduler = scheduler_of(8, 8)
    start(scheduler, 0, 8, 1)
    parent = start(scheduler, 1, 6, 2)
    for _ in range(3):
        scheduler.commit(scheduler.plan(), 1, [])
    group = scheduler.running[-1]
    assert [len(seq.blocks) for seq in group.seqs] == [2, 2]
    assert len({block for seq in group.seqs for block in seq.blocks}) == 3
    plan = StepPlan(scheduler.decodes, 64)
    scheduler._preempt(scheduler.running.pop(), plan)
    assert scheduler.host.num_used == 3
    assert all(seq.state is State.SWAPPED for seq in group.seqs)
    assert parent.num_computed == 8
    assert scheduler.plan().admitted == group.seqs
    assert scheduler.host.num_used == 0
    assert len({block for seq in group.seqs for block in seq.blocks[:2]}) == 3
    assert [len(seq.blocks) for seq in group.seqs] == [3, 3]  # and the slots for their next tokens
    assert group.seqs[0].blocks[0] == group.seqs[1].blocks[0]


def test_a_full_host_ends_the_run_with_its_reason():
    workload = columns(np.zeros(4), np.full(4, 8), np.full(4, 16), num_samples=np.full(4, 2))
    engine = Engine(
        make_kv=lambda: Paged(20, 4, can_fork=True),
        make_executor=lambda lengths: SimulatedExecutor(LATENCY, lengths),
        batching=CONTINUOUS,
        max_model_len=48,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        chunked_prefill=False,
        paper_era=PaperEra(2, 0.0, False),
    )
    with pytest.raises(UserError, match="num_host_blocks: too small"):
        simulate(workload, engine, route=round_robin())


def test_swapping_out_more_than_the_host_holds_changes_nothing():
    kv, host = Paged(8, 4, can_fork=True), HostPool(1)
    seq = Sequence(Request(0, (Span(0, 0, 8),), 8), num_tokens=8)
    seq.blocks = kv.pool.take(2)
    with pytest.raises(HostFull):
        host.swap_out(kv, [seq])
    assert len(seq.blocks) == 2 and host.num_used == 0


def busy(latency: Linear) -> tuple[Run, int, int]:
    """Pairs of answers that swap: the run, its blocks moved each way, its copies."""
    samples = np.full(4, 2)
    workload = columns(np.zeros(4), np.full(4, 7), np.full(4, 16), num_samples=samples)
    engine = Engine(
        make_kv=lambda: Paged(20, 4, can_fork=True),
        make_executor=lambda lengths: SimulatedExecutor(latency, lengths),
        batching=CONTINUOUS,
        max_model_len=48,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        chunked_prefill=False,
        paper_era=PaperEra(1000, 0.0, False),
    )
    run = expand(simulate(workload, engine, route=round_robin()), "paper")
    (log,) = run.log.replicas
    assert log.num_swapped_out == log.num_swapped_in
    return run, log.num_swapped_out, log.num_copies


def test_a_step_lasts_longer_by_the_blocks_that_it_moves():
    free, swapped, copied = busy(LATENCY)
    assert swapped > 0 and copied > 0
    assert set(np.diff(free.steps["end_ns"])) == {1_000_000}
    timed = Linear(1, 0, 0, 0, swap_in_block_us=10.001, swap_out_block_us=3, copy_block_us=0.7)
    slow, *moved = busy(timed)
    assert moved == [swapped, copied]
    longer = slow.steps["end_ns"] - slow.steps["start_ns"] - 1_000_000
    assert longer.sum() == swapped * (10_001 + 3_000) + copied * 700
    assert (longer > 0).sum() < len(longer)
    in_places = [name for name in slow.steps if not name.endswith("_ns")]
    assert all((slow.steps[name] == free.steps[name]).all() for name in in_places)


def test_a_step_that_only_moves_takes_its_time():
    moves = [BlockMove(SWAP_OUT, 1, 2), BlockMove(SWAP_OUT, 2, 3), BlockMove(COPY, 3, 4)]
    latency = Linear(1, 0, 0, 0, swap_out_block_us=0.0004, copy_block_us=0.0001)
    assert latency.step_ns(0, 0, 0, 0, 0, 0, 1, moves) == [1_000_001]  # rounded once, as a sum
    assert latency.step_ns(0, 0, 0, 0, 0, 0, 1) == [1_000_000]
