"""Laws that every run obeys, whatever the policy."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.kv.contiguous import Contiguous, reserve_max
from kvsim.engine.kv.paged import Paged
from kvsim.engine.request import Request, Sequence
from kvsim.engine.scheduler import Scheduler
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import Outcome, round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.metrics import Slo, Window, summarize
from kvsim.study.tables import Run, expand
from kvsim.workload.workload import Workload, columns
from tests.test_twin import (
    FAMILIES,
    MS,
    SAME_CASES_EVERY_TIME,
    Row,
    own,
    setups,
    simulated,
    slots_of,
    workload_of,
    workloads,
)
from tests.twin import Setup


def assert_all_are_accounted_for(run: Run, workload: Workload) -> None:
    outcome, requests = run.requests["outcome"], run.requests
    has_come = requests["arrival_ns"] >= 0
    finished = outcome <= Outcome.LENGTH
    refused = outcome > Outcome.UNFINISHED
    unfinished = outcome == Outcome.UNFINISHED
    assert has_come.sum() == finished.sum() + refused.sum() + (unfinished & has_come).sum()
    assert not (~has_come & ~unfinished).any()
    assert (requests["replica"][refused] == -1).all()
    assert (requests["finish_ns"][refused] == -1).all()
    assert (requests["first_token_ns"][refused] == -1).all()
    assert (requests["arrival_ns"][workload.after < 0] <= run.log.end_ns).all()


def assert_slots_add_up(run: Run) -> None:
    for table in (run.steps, run.idle):
        for slots in slots_of(table):
            assert min(slots) >= 0
            assert sum(slots) == run.log.pool_slots


def assert_time_never_falls(run: Run) -> None:
    steps, requests = run.steps, run.requests
    assert (steps["end_ns"] > steps["start_ns"]).all()
    for replica in np.unique(steps["replica"]):
        mine = steps["replica"] == replica
        assert (steps["start_ns"][mine][1:] >= steps["end_ns"][mine][:-1]).all()
    done = requests["outcome"] <= Outcome.LENGTH
    names = ("arrival_ns", "admitted_ns", "first_token_ns", "finish_ns")
    times = np.column_stack([requests[name][done] for name in names])
    assert (np.diff(times, axis=1) >= 0).all()
    assert (times[:, 2] > times[:, 1]).all()


def assert_answers_are_exact(run: Run) -> None:
    """Preempted or not, whoever finished has its tokens, and no step made others."""
    requests = run.requests
    done = requests["outcome"] <= Outcome.LENGTH
    wanted = requests["answer_tokens"] * requests["num_samples"]
    assert requests["num_generated"][done].tolist() == wanted[done].tolist()
    if run.log.end_ns and not (requests["outcome"] == Outcome.UNFINISHED).any():
        assert run.steps["num_tokens"].sum() == wanted[done].sum()
        assert run.steps["num_preempted"].sum() == requests["num_preemptions"].sum()


def assert_nobody_waits_at_an_idle_replica(run: Run) -> None:
    requests = run.requests
    for replica, start, end in zip(
        run.idle["replica"], run.idle["start_ns"], run.idle["end_ns"], strict=True
    ):
        mine = (requests["replica"] == replica) & (requests["outcome"] <= Outcome.LENGTH)
        inside = (requests["arrival_ns"][mine] < end) & (requests["finish_ns"][mine] > start)
        assert not inside.any()


def assert_first_come_is_first_served(run: Run) -> None:
    requests = run.requests
    for replica in range(len(run.log.replicas)):
        mine = (requests["replica"] == replica) & (requests["outcome"] <= Outcome.LENGTH)
        order = np.argsort(requests["arrival_ns"][mine], kind="stable")
        arrival = requests["arrival_ns"][mine][order]
        admitted = requests["admitted_ns"][mine][order]
        later = np.diff(arrival) > 0
        assert (np.diff(admitted)[later] >= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_run_obeys_the_laws(family):
    @settings(SAME_CASES_EVERY_TIME, max_examples=60)
    @given(st.data())
    def obeys(data: st.DataObject) -> None:
        setup = data.draw(setups(family))
        workload = data.draw(workloads(setup))
        for run in simulated(workload, setup, jump=True).values():
            assert_all_are_accounted_for(run, workload)
            assert_slots_add_up(run)
            assert_time_never_falls(run)
            assert_answers_are_exact(run)
            assert_first_come_is_first_served(run)
            if setup.stop_ns is None:
                assert_nobody_waits_at_an_idle_replica(run)

    obeys()


BUSY = [Row(2 * n // 3, own(n, 3 + 5 * n % 11), 1 + 7 * n % 13) for n in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_run_twice_is_the_same_to_the_byte(family):
    setup = Setup(**FAMILIES[family], num_replicas=2, per_context_token_us=0.37)
    first, second = (simulated(workload_of(BUSY), setup, jump=True)["paper"] for _ in range(2))
    for name in ("steps", "requests", "gaps", "idle"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert {c: v.tobytes() for c, v in ours.items()} == {
            c: v.tobytes() for c, v in theirs.items()
        }


def test_policies_agree_on_the_tokens_made():
    made = set()
    for options in FAMILIES.values():
        for reserve in ("max", "oracle"):
            setup = Setup(**options, reserve=reserve, num_blocks=20)
            run = simulated(workload_of(BUSY), setup, jump=True)["paper"]
            assert (run.requests["outcome"] == Outcome.STOP).all()
            made.add(tuple(run.requests["num_generated"].tolist()))
    assert made == {tuple(row.num_answer_tokens for row in BUSY)}


@pytest.mark.parametrize("family", ["paged", "prefix cache"])
def test_a_preempted_request_ends_with_exactly_its_tokens(family):
    setup = Setup(**FAMILIES[family], num_blocks=6)
    run = simulated(workload_of(BUSY), setup, jump=True)["paper"]
    assert run.requests["num_preemptions"].sum() > 5
    assert_answers_are_exact(run)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_seat_and_fixed_lengths_wait_as_an_m_d_1_queue(load):
    """Pollaczek-Khinchine: the mean wait is load * service / (2 * (1 - load))."""
    service_ns = 5 * MS
    waits = []
    for seed in range(24):
        generator = np.random.default_rng([seed, int(100 * load)])
        gaps = generator.exponential(service_ns / load, 2200)
        n = len(gaps)
        workload = columns(np.rint(np.cumsum(gaps)), np.full(n, 3), np.full(n, 5))
        run = simulated(workload, Setup(max_num_seqs=1), jump=True)["paper"]
        requests = run.requests
        assert (requests["finish_ns"] - requests["admitted_ns"] == service_ns).all()
        # the queue starts empty: the first requests wait too little
        waits.append((requests["admitted_ns"] - requests["arrival_ns"])[200:].mean())
    expected = load * service_ns / (2 * (1 - load))
    standard_error = np.std(waits, ddof=1) / np.sqrt(len(waits))
    assert abs(np.mean(waits) - expected) < 4 * standard_error
    assert standard_error < 0.05 * expected


def test_nothing_that_schedules_is_given_an_answer_length():
    names = {*Request._fields, *Sequence.__dataclass_fields__}
    for made in (Scheduler, Paged, Contiguous, reserve_max):
        names |= set(inspect.signature(made).parameters)
    assert not {name for name in names if "output" in name or "answer" in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_until_the_first_end_a_run_does_not_depend_on_answer_lengths(family):
    setup = Setup(**FAMILIES[family], num_blocks=24, reserve="max", max_num_batched_tokens=20)
    rows = [replace_answer(row, 9) for row in BUSY[:12]]
    longer = [replace_answer(row, 9 + 3 * n) for n, row in enumerate(rows, 1)]
    short, long = (
        simulated(workload_of(each), setup, jump=False)["paper"] for each in (rows, longer)
    )
    until = int(short.requests["finish_ns"].min())
    if setup.is_static:
        until = 9 * MS
    before = short.steps["end_ns"] <= until
    assert before.sum() > 5
    for name in set(short.steps) - {"reserved_slots", "internal_slots"}:
        same = short.steps[name][before] == long.steps[name][: int(before.sum())]
        assert same.all(), name


def replace_answer(row: Row, num_tokens: int) -> Row:
    return row._replace(num_answer_tokens=num_tokens)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(num_blocks=3),
        Setup(num_blocks=3, prefix_caching=True, can_fork=True),
        Setup(num_blocks=3, memory="contiguous", reserve="oracle", placement="first_fit"),
        Setup(num_blocks=3, memory="contiguous", reserve="oracle", is_static=True),
    ],
)
def test_a_prompt_that_never_fits_is_refused_at_arrival_and_holds_nobody_up(setup):
    rows = [Row(0, own(0, 2), 3), Row(1, own(1, 30), 3), Row(1, own(2, 2), 3)]
    run = simulated(workload_of(rows), setup, jump=True)["paper"]
    assert run.requests["outcome"].tolist() == [Outcome.STOP, Outcome.NEVER_FITS, Outcome.STOP]
    assert run.requests["arrival_ns"][1] == 1 * MS
    assert run.steps["num_waiting"].max(initial=0) <= 1


def test_a_request_beyond_the_models_length_or_without_tokens_is_refused():
    workload = columns(np.zeros(4), np.array([60, 61, 0, 4]), np.array([4, 4, 3, 0]))
    run = simulated(workload, Setup(num_blocks=20), jump=True)["paper"]
    refused = [Outcome.TOO_LONG, Outcome.NO_TOKENS, Outcome.NO_TOKENS]
    assert run.requests["outcome"].tolist() == [Outcome.STOP, *refused]


def test_a_closed_loop_sends_the_next_turn_when_the_last_has_ended_and_was_thought_over():
    users, turns = 3, 6
    rows = []
    for n in range(users * turns):
        after = n - users if n >= users else -1
        rows.append(Row(0, own(n, 4 + n % 3), 3 + n % 5, after=after, think_ms=2 * (n % 3)))
    run = simulated(workload_of(rows), Setup(num_blocks=8), jump=True)["paper"]
    requests = run.requests
    followers = np.arange(users, users * turns)
    think_ns = np.array([rows[n].think_ms for n in followers]) * MS
    assert (requests["arrival_ns"][followers] == requests["finish_ns"][:-users] + think_ns).all()
    assert (run.steps["num_running"] + run.steps["num_waiting"]).max() <= users


def test_what_follows_a_request_that_never_ends_never_comes():
    rows = [Row(0, own(0, 4), 30), Row(0, own(1, 4), 3, after=0)]
    run = simulated(workload_of(rows), Setup(stop_ns=9 * MS), jump=True)["paper"]
    assert run.requests["outcome"].tolist() == [Outcome.UNFINISHED] * 2
    assert run.requests["arrival_ns"].tolist() == [0, -1]


def test_a_fixed_reservation_ends_an_answer_that_outgrows_it():
    setup = Setup(memory="contiguous", reserve="fixed", reserve_tokens=10)
    rows = [Row(0, own(0, 4), 6), Row(0, own(1, 4), 7), Row(0, own(2, 9), 30)]
    run = simulated(workload_of(rows), setup, jump=True)["paper"]
    assert run.requests["outcome"].tolist() == [Outcome.STOP, Outcome.LENGTH, Outcome.LENGTH]
    assert run.requests["num_generated"].tolist() == [6, 6, 1]


def test_more_replicas_make_the_same_tokens_sooner():
    ends = []
    for count in (1, 2, 4):
        setup = replace(Setup(num_blocks=8), num_replicas=count)
        run = simulated(workload_of(BUSY), setup, jump=True)["paper"]
        assert (run.requests["outcome"] == Outcome.STOP).all()
        ends.append(run.log.end_ns)
    assert ends[0] > ends[1] > ends[2]


def test_shares_of_a_long_run_in_a_large_pool_add_up_to_one():
    """Slots times nanoseconds pass 2**63 after some hours."""
    arrivals = np.arange(3) * 30_000 * 1_000_000_000
    workload = columns(arrivals, np.full(3, 1000), np.full(3, 100))
    engine = Engine(
        make_kv=lambda: Paged(1_000_000, 16),
        make_executor=partial(SimulatedExecutor, Linear(8, 0.05, 0.06, 0.021)),
        batching=CONTINUOUS,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        chunked_prefill=True,
    )
    run = expand(simulate(workload, engine, route=round_robin()), "paper")
    waste = summarize(run, Window(0, run.log.end_ns), Slo())["waste"]
    assert sum(waste.values()) == pytest.approx(1)
    assert waste["free"] > 0.99
