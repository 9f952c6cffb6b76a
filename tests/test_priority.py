"""Queue and victims by priority: by hand, beside the oracle, and in whole simulated runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import StepPlan, Work
from kvsim.engine.request import Request, Sequence, Span, State
from kvsim.engine.rules import LATEST, RULES, Unchunked
from kvsim.engine.scheduler import Scheduler
from kvsim.golden import Replay
from kvsim.golden_case import read_case
from kvsim.sim.feed import Outcome
from kvsim.study.tables import Run
from kvsim.workload.workload import Workload
from tests import oracle_v1
from tests.oracle_cases import priority_case
from tests.oracle_v1 import VERSIONS, write_case
from tests.random_runs import random_run
from tests.test_laws import (
    assert_all_are_accounted_for,
    assert_answers_are_exact,
    assert_slots_add_up,
)
from tests.test_twin import MS, Row, assert_same_runs, own, simulated, workload_of
from tests.twin import Setup

NUM_CASES = 60  # for each version; twice as many of the cheaper ones
MAX_STEPS = 150


def scheduler_of(num_blocks: int, **options: object) -> Scheduler:
    """Blocks of 4 tokens, room for 8 seats and 64 tokens unless said otherwise."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "chunked_prefill": True}
    kv = Paged(num_blocks, 4, can_fork=True, rules=options.get("rules", LATEST))
    return Scheduler(kv, CONTINUOUS, is_by_priority=True, **limits | options)


def asked(scheduler: Scheduler, index: int, prompt: int, priority: int, width: int = 1) -> Sequence:
    request = Request(index, (Span(index, 0, prompt),), prompt, width, 40, priority)
    seq = Sequence(request, num_tokens=prompt, width=width)
    scheduler.submit(seq)
    return seq


def stepped(scheduler: Scheduler, num_steps: int = 1) -> StepPlan:
    """The last of some steps in which nobody ends, planned and run."""
    for _ in range(num_steps):
        plan = scheduler.plan()
        scheduler.commit(plan, 1, [])
    return plan


def lengths(scheduler: Scheduler, *seqs: Sequence) -> list[int]:
    scheduler.decodes.members()
    return [seq.num_tokens for seq in seqs]


def test_the_queue_is_by_priority_and_of_equals_by_arrival():
    scheduler = scheduler_of(40, max_num_seqs=2)
    low, first, high, second = (asked(scheduler, n, 4, p) for n, p in enumerate((2, 1, 0, 1)))
    assert list(scheduler.waiting) == [high, first, second, low]
    assert stepped(scheduler).admitted == [high, first]
    scheduler.commit(scheduler.plan(), 1, [high, first])
    assert stepped(scheduler).admitted == [second, low]


def test_who_runs_is_not_preempted_for_a_better_rank_that_waits():
    scheduler = scheduler_of(2)
    low = asked(scheduler, 0, 5, 9)
    stepped(scheduler)
    high = asked(scheduler, 1, 5, 0)
    plan = stepped(scheduler, 3)
    assert (plan.preempted, plan.admitted) == ([], [])
    assert (low.state, high.state) == (State.RUNNING, State.WAITING)


def test_who_is_last_in_rank_preempts_himself_and_those_behind_him_are_left_out_of_the_step():
    """Two blocks each of a pool of four; the ninth token of the first in line needs a fifth."""
    scheduler = scheduler_of(4)
    low = asked(scheduler, 0, 7, 1)
    stepped(scheduler)
    high = asked(scheduler, 1, 7, 0)
    stepped(scheduler)
    plan = scheduler.plan()
    assert plan.preempted == [low]
    assert (plan.work, plan.decodes.num_seqs, plan.token_budget) == ([], 0, 64)
    scheduler.commit(plan, 1, [])
    assert lengths(scheduler, low, high) == [9, 8], "nobody made a token"
    assert stepped(scheduler).admitted == [], "nine tokens need three blocks"
    assert lengths(scheduler, low, high) == [9, 9]


def test_who_was_served_in_this_step_may_be_preempted_and_his_token_goes_back_to_the_budget():
    """The first in line takes the last block for his fifth token; the second needs it."""
    scheduler = scheduler_of(4)
    low = asked(scheduler, 0, 3, 1)
    stepped(scheduler)
    high = asked(scheduler, 1, 8, 0)
    stepped(scheduler)
    plan = scheduler.plan()
    assert plan.preempted == [low]
    assert (plan.work, plan.decodes.num_seqs, plan.token_budget) == ([], 1, 63)
    assert (len(low.blocks), len(high.blocks)) == (0, 3)
    scheduler.commit(plan, 1, [])
    assert lengths(scheduler, low, high) == [5, 10]


def test_what_a_victim_gives_back_goes_to_those_behind():
    """Twelve tokens a step. In the seventh both who decode begin their fifth block, one is left,
    and the prompt behind them has all tokens but one."""
    scheduler = scheduler_of(12, max_num_batched_tokens=12, rules=RULES["vllm-0.11"])
    low = asked(scheduler, 0, 11, 1)
    stepped(scheduler)
    high = asked(scheduler, 1, 13, 0)
    stepped(scheduler, 4)
    behind = asked(scheduler, 2, 40, 0)
    plan = stepped(scheduler)
    assert plan.work == [Work(behind, 0, 10)]
    plan = scheduler.plan()
    assert plan.preempted == [low]
    assert plan.work == [Work(behind, 10, 11)]
    assert (len(high.blocks), len(behind.blocks)) == (5, 6)


def test_preempted_ones_stand_where_their_rank_says():
    """The one of best rank takes blocks from both others, first from him who was served before."""
    scheduler = scheduler_of(5, max_num_seqs=3)
    low = asked(scheduler, 0, 3, 7)
    stepped(scheduler)
    _, middle = asked(scheduler, 1, 8, 0), asked(scheduler, 2, 4, 5)
    stepped(scheduler)
    between = asked(scheduler, 3, 16, 6)
    assert stepped(scheduler).preempted == [low]
    assert list(scheduler.waiting) == [between, low]
    assert stepped(scheduler, 4).preempted == [middle]
    assert list(scheduler.waiting) == [middle, between, low]


def test_nobody_is_admitted_in_a_step_that_preempted():
    scheduler = scheduler_of(5, max_num_seqs=2)
    low = asked(scheduler, 0, 7, 1)
    stepped(scheduler)
    asked(scheduler, 1, 11, 0)
    stepped(scheduler)
    short = asked(scheduler, 2, 1, 0)
    plan = stepped(scheduler)
    assert (plan.preempted, plan.admitted) == ([low], [])
    assert (scheduler.kv.pool.num_free, scheduler.num_running) == (2, 1)
    assert stepped(scheduler).admitted == [short]


def test_a_decode_by_priority_takes_a_block_when_its_last_is_full_and_no_other():
    scheduler = scheduler_of(10)
    seq = asked(scheduler, 0, 4, 0)
    held = []
    for _ in range(6):
        stepped(scheduler)
        held.append(len(seq.blocks))
    assert held == [1, 2, 2, 2, 2, 3]


def test_the_answers_of_a_request_go_before_one_of_better_rank_goes():
    scheduler = scheduler_of(5)
    parent, high = asked(scheduler, 0, 4, 5, width=2), asked(scheduler, 1, 4, 0)
    (child,) = scheduler.commit(scheduler.plan(), 1, []).forked
    while not (plan := stepped(scheduler)).preempted:
        pass
    assert set(plan.preempted) == {parent, child}
    assert high.state is State.RUNNING


def test_answers_of_two_requests_can_wait_together():
    rows = [Row(0, own(n, 3), 8, num_samples=3) for n in range(2)]
    run, _ = both_ways(ranked(rows, [0, 1]), Setup(num_blocks=4, can_fork=True))
    assert (run.requests["outcome"] == Outcome.STOP).all()


def decided(folder: Path, config: dict, trace: list[dict], told: list[dict]) -> Iterator[dict]:
    """What kvsim's scheduler does by priority, in the columns of the oracle."""
    case = read_case(write_case(folder, config, trace, told))
    priority = {row["request_id"]: row["priority"] for row in trace}
    replay, limits = Replay(case), case.config
    replay.scheduler = Scheduler(
        replay.kv,
        CONTINUOUS,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        chunked_prefill=limits.enable_chunked_prefill,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        is_by_priority=True,
        rules=RULES[limits.rules],
    )
    replay.coming = [
        (arrival, request._replace(priority=priority[case.ids[request.index]]))
        for arrival, request in replay.coming
    ]
    return (replay.step(row) for row in told)


@pytest.mark.parametrize("engine", VERSIONS)
def test_random_runs_by_priority_are_equal_to_the_oracle_in_every_value(engine, tmp_path):
    for seed in range(NUM_CASES):
        config, trace = priority_case(seed, engine)
        told = oracle_v1.replay(config, trace, MAX_STEPS)
        seen = decided(tmp_path, config, trace, told)
        for row, ours in zip(told, seen, strict=True):
            row.pop("t", None)
            wrong = [name for name in row.keys() | ours.keys() if row.get(name) != ours.get(name)]
            sides = {name: (row.get(name), ours.get(name)) for name in sorted(wrong)}
            assert not wrong, f"seed {seed}, step {row['step']}, oracle and kvsim: {sides}"


def test_the_random_runs_by_priority_reach_what_seldom_happens():
    seen: Counter[str] = Counter()
    for engine in VERSIONS:
        for seed in range(NUM_CASES):
            config, trace = priority_case(seed, engine)
            running: list[str] = []
            for row in oracle_v1.replay(config, trace, MAX_STEPS):
                count_what_seldom_happens(seen, row, running)
                running = [name for name in row["tables"] if name not in row.get("fin", ())]
    assert len(seen) == 7 and min(seen.values()) > 20, seen


def count_what_seldom_happens(seen: Counter[str], row: dict, running: list[str]) -> None:
    """Of a step and those who ran before it, in their order."""
    served = {*row["dec"], *(name for name, _ in row["pre"])}
    victims = row.get("prm", [])
    for victim in victims:
        behind = running[running.index(victim) + 1 :]
        seen["victims served before"] += any(name in served for name in behind)
    if victims:
        behind = running[running.index(victims[-1]) + 1 :]
        left_out = [name for name in behind if name not in served and name not in victims]
        seen["those left out behind one who preempts himself"] += len(left_out)
    seen["preempted"] += len(victims)
    seen["two preempted in a step"] += len(victims) > 1
    seen["evictions"] += row.get("evict", 0)
    resumed = [hit for _, hit, how in row.get("adm", ()) if how == "resumed"]
    seen["hits of the resumed"] += sum(hit > 0 for hit in resumed)
    chunks = [num_new for name, num_new in row["pre"] if name in running and num_new > 1]
    seen["chunks of prompts under way"] += len(chunks)


def ranked(rows: list[Row], priorities: list[int]) -> Workload:
    return replace(workload_of(rows), priority=np.array(priorities))


def both_ways(workload: Workload, setup: Setup, **options: object) -> tuple[Run, Run]:
    """Jumping and stepping."""
    return tuple(
        simulated(workload, setup, jump=jump, is_by_priority=True, **options)["paper"]
        for jump in (True, False)
    )


@pytest.mark.parametrize("version", RULES)
def test_jumping_and_stepping_by_priority_tell_the_same_and_obey_the_laws(version):
    for seed in range(2 * NUM_CASES):
        workload, setup, threshold = random_run(seed)
        if setup.prefix_index == "hash_chain" and not RULES[version].keyless_first:
            setup = replace(setup, prefix_caching=False)  # a jump tells evictions in another order
        jumping, stepping = both_ways(workload, setup, rules=RULES[version], threshold=threshold)
        assert_same_runs(jumping, stepping)
        assert_all_are_accounted_for(jumping, workload)
        assert_slots_add_up(jumping)
        assert_answers_are_exact(jumping)
        assert not (jumping.requests["outcome"] == Outcome.UNFINISHED).any()


@pytest.mark.parametrize("version", RULES)
def test_where_all_priorities_are_equal_who_came_first_is_served_first(version):
    """Forks aside: the answers of a request stand together in the queue by priority only."""
    for seed in range(2 * NUM_CASES):
        workload, setup, threshold = random_run(seed, can_fork=False)
        if RULES[version].unchunked is Unchunked.SKIP:
            setup = replace(setup, chunked_prefill=True)  # else heads are overtaken
        workload = replace(workload, priority=np.zeros(len(workload), np.int64))
        by_priority, in_order = (
            simulated(
                workload,
                setup,
                jump=False,
                rules=RULES[version],
                threshold=threshold,
                is_by_priority=by,
            )["paper"]
            for by in (True, False)
        )
        assert_same_runs(by_priority, in_order)


BLOCKED = {
    "seats": ([Row(0, own(0, 4), 30), Row(1, own(1, 4), 4, num_samples=3)], {"max_num_seqs": 3}),
    "budget": (
        [Row(0, own(0, 4), 30), Row(1, own(1, 40), 2)],
        {"max_num_batched_tokens": 40, "max_model_len": 45, "chunked_prefill": False},
    ),
    "memory": ([Row(0, own(0, 4), 30), Row(1, own(1, 40), 2)], {"num_blocks": 11}),
}


@pytest.mark.parametrize("what", BLOCKED)
def test_an_arrival_of_better_rank_passes_a_blocked_head_at_the_next_step(what):
    rows, options = BLOCKED[what]
    workload = ranked([*rows, Row(3, own(2, 4), 2)], [1, 1, 0])
    setup = Setup(**{"num_blocks": 60, "can_fork": True} | options)
    jumping, stepping = both_ways(workload, setup)
    assert stepping.requests["admitted_ns"].tolist()[2] == 3 * MS
    assert jumping.requests["admitted_ns"].tolist()[2] == 3 * MS


def test_a_static_batch_by_priority_is_chunked_by_a_threshold():
    rows = [Row(0, own(0, 2), 1), Row(0, own(1, 20), 3)]
    setup = Setup(memory="contiguous", reserve="oracle", placement="first_fit", is_static=True)
    run, _ = both_ways(ranked(rows, [0, 0]), setup, threshold=3)
    assert run.requests["num_generated"].tolist() == [1, 3]


def test_the_urgent_wait_less_than_the_others_and_all_end_with_their_tokens():
    """Sixty requests of two classes at once on a pool that holds few."""
    rows = [Row(0, own(n, 3 + n % 5), 4 + 3 * n % 11) for n in range(60)]
    setup = Setup(num_blocks=9, max_num_seqs=6)
    run, _ = both_ways(ranked(rows, [n % 2 for n in range(60)]), setup)
    assert_answers_are_exact(run)
    assert run.requests["num_preemptions"].sum() > 5
    admitted = run.requests["admitted_ns"]
    assert admitted[0::2].max() <= admitted[1::2].min()
