"""Synthesized workloads: what quotes what, what follows what, and what chance may not move."""

from functools import partial

import numpy as np
import pytest

from kvsim.engine.request import Span, answer_stream
from kvsim.workload.arrivals import all_at_once, gamma, poisson, replay
from kvsim.workload.discrete import fixed, geometric, uniform
from kvsim.workload.lengths import Joint, gaussian
from kvsim.workload.sessions import Sessions, exponential_think, fixed_think, lognormal_think
from kvsim.workload.synthetic import ClosedLoop, synthesize
from kvsim.workload.turns import PrefixGroups
from kvsim.workload.workload import Workload

LENGTHS = Joint(uniform(10, 200), uniform(1, 100), gaussian(0.3))
POISSON = partial(poisson, rate_per_s=2.0)
THINK = partial(exponential_think, mean_s=10.0)
TALK = Sessions(geometric(4.0, high=40), THINK, max_context_tokens=1500)
GROUPS = PrefixGroups((100, 300, 50), zipf_exponent=1.0)
LOOP = ClosedLoop(8, partial(fixed_think, think_s=2.0))

COLUMNS = (
    *("arrival_ns", "prompt_tokens", "output_tokens"),
    *("num_samples", "after", "think_ns", "session"),
)
CASES = {
    "plain": {"arrivals": POISSON},
    "closed": {"arrivals": LOOP},
    "prefixes": {"arrivals": POISSON, "prefixes": GROUPS},
    "sessions": {"arrivals": POISSON, "sessions": TALK},
    "all": {"arrivals": LOOP, "sessions": TALK, "prefixes": GROUPS, "num_samples": 3},
}


def same(one: Workload, other: Workload) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in (*COLUMNS, "spans", "span_offsets", "notes")
    )


@pytest.mark.parametrize("case", CASES)
def test_a_workload_keeps_the_promises_of_its_columns(case):
    workload = synthesize(LENGTHS, seed=0, num_requests=2000, **CASES[case])
    assert len(workload) == 2000
    for name in COLUMNS:
        assert getattr(workload, name).dtype == np.int64
    is_open = workload.after < 0
    assert (np.diff(workload.arrival_ns[is_open]) >= 0).all()
    assert (workload.after < np.arange(2000)).all() and (workload.think_ns[is_open] == 0).all()
    for row in range(2000):
        assert sum(span.length for span in workload.prompt(row)) == workload.prompt_tokens[row]
        assert all(span.length > 0 and span.start == 0 for span in workload.prompt(row))


@pytest.mark.parametrize("case", CASES)
def test_the_same_seed_gives_the_same_workload_and_another_does_not(case):
    first, again, other = (
        synthesize(LENGTHS, seed=seed, num_requests=500, **CASES[case]) for seed in (5, 5, 6)
    )
    assert same(first, again) and not same(first, other)


@pytest.mark.parametrize("case", ["plain", "prefixes", "sessions"])
def test_lengths_do_not_move_when_the_arrival_process_changes(case):
    rest = {key: value for key, value in CASES[case].items() if key != "arrivals"}
    processes = [POISSON, partial(gamma, rate_per_s=9.0, cv=4.0), all_at_once, LOOP]
    first, *others = (
        synthesize(LENGTHS, processes[i], seed=1, num_requests=500, **rest)
        for i in range(len(processes))
    )
    for other in others:
        assert (first.prompt_tokens == other.prompt_tokens).all()
        assert (first.output_tokens == other.output_tokens).all()
        assert np.array_equal(first.spans, other.spans)


@pytest.mark.parametrize("case", CASES)
def test_request_i_does_not_depend_on_how_many_follow(case):
    few, many = (synthesize(LENGTHS, seed=2, num_requests=n, **CASES[case]) for n in (150, 1500))
    for name in COLUMNS:
        assert (getattr(few, name) == getattr(many, name)[:150]).all()
    assert all(few.prompt(row) == many.prompt(row) for row in range(150))


def test_a_turn_quotes_the_prompt_and_the_answer_before_it_exactly():
    workload = synthesize(
        LENGTHS, POISSON, seed=0, num_requests=1000, sessions=TALK, prefixes=GROUPS
    )
    later = np.flatnonzero(workload.after >= 0)
    assert len(later) > 500
    for row in later.tolist():
        before = int(workload.after[row])
        answer = Span(answer_stream(before), 0, int(workload.output_tokens[before]))
        *history, new = workload.prompt(row)
        assert tuple(history) == (*workload.prompt(before), answer)
        assert new.stream == len(GROUPS.prefix_tokens) + row
        assert workload.session[row] == workload.session[before]


def test_sessions_stop_before_their_context_is_full():
    lengths = Joint(fixed(100), fixed(50))
    talk = Sessions(fixed(20), THINK, max_context_tokens=1000)
    workload = synthesize(lengths, POISSON, seed=0, num_requests=60, sessions=talk)
    # turn t ends at 150 t tokens: the sixth at 900, a seventh would end at 1050
    assert np.bincount(workload.session).tolist() == [6] * 10
    assert (workload.prompt_tokens + workload.output_tokens).max() == 900
    assert workload.notes == ["10 sessions end early, at a context of 1000 tokens"]


def test_later_turns_stand_behind_the_turn_they_follow():
    workload = synthesize(LENGTHS, POISSON, seed=3, num_requests=3000, sessions=TALK)
    later = workload.after >= 0
    assert (workload.after[later] == np.flatnonzero(later) - 1).all()
    pauses_s = workload.think_ns[later] / 1e9
    assert pauses_s.mean() == pytest.approx(10.0, abs=4 * 10 / later.sum() ** 0.5)


def test_a_closed_loop_has_as_many_requests_out_as_users():
    loop = ClosedLoop(8, partial(fixed_think, think_s=2.0), ramp_s=4.0)
    workload = synthesize(LENGTHS, loop, seed=0, num_requests=100)
    assert workload.after.tolist() == [-1] * 8 + list(range(92))
    assert (workload.think_ns[8:] == 2 * 10**9).all()
    assert workload.arrival_ns[:8].tolist() == [k * 5 * 10**8 for k in range(8)]


def test_a_closed_loop_of_sessions_begins_the_next_behind_the_last_turn():
    talk = Sessions(fixed(3), partial(fixed_think, think_s=1.0))
    workload = synthesize(LENGTHS, LOOP, seed=0, num_requests=72, sessions=talk)
    begins = np.arange(0, 72, 3)
    assert workload.after[begins].tolist() == [-1] * 8 + [3 * k + 2 for k in range(16)]
    assert (workload.think_ns[begins[8:]] == 2 * 10**9).all()


def test_a_group_shares_its_prefix_and_popular_ones_come_more_often():
    workload = synthesize(LENGTHS, POISSON, seed=0, num_requests=20_000, prefixes=GROUPS)
    prefixes = [workload.prompt(row)[0] for row in range(len(workload))]
    counts = [prefixes.count(Span(g, 0, n)) for g, n in enumerate(GROUPS.prefix_tokens)]
    assert sum(counts) == 20_000
    assert np.array(counts) / 20_000 == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.015)
    bare = synthesize(LENGTHS, POISSON, seed=0, num_requests=20_000)
    added = workload.prompt_tokens - bare.prompt_tokens
    assert added.tolist() == [prefix.length for prefix in prefixes]


def test_every_request_asks_for_the_same_number_of_answers():
    workload = synthesize(LENGTHS, POISSON, seed=0, num_requests=10, num_samples=4)
    assert workload.num_samples.tolist() == [4] * 10


def test_a_duration_holds_every_session_begun_in_it_whole():
    by_time = synthesize(LENGTHS, POISSON, seed=0, duration_s=100.0, sessions=TALK)
    assert by_time.arrival_ns.max() < 100 * 10**9
    longer = synthesize(LENGTHS, POISSON, seed=0, num_requests=2 * len(by_time), sessions=TALK)
    assert (longer.prompt_tokens[: len(by_time)] == by_time.prompt_tokens).all()
    assert longer.after[len(by_time)] == -1 and longer.arrival_ns[len(by_time)] >= 100 * 10**9


def test_a_replay_that_is_too_short_says_so():
    times = partial(replay, arrival_ns=np.arange(30) * 10**9, speed=2.0)
    workload = synthesize(LENGTHS, times, seed=0, num_requests=50)
    assert len(workload) == 30
    assert workload.notes == ["the arrivals end after 30; 50 were asked for"]


def test_how_much_to_make_is_said_once():
    with pytest.raises(ValueError, match="not both"):
        synthesize(LENGTHS, POISSON, seed=0)
    with pytest.raises(ValueError, match="not both"):
        synthesize(LENGTHS, POISSON, seed=0, num_requests=5, duration_s=5.0)
    with pytest.raises(ValueError, match="closed loop"):
        synthesize(LENGTHS, LOOP, seed=0, duration_s=5.0)


def test_lognormal_think_times_have_the_mean_asked_for():
    pauses_s = lognormal_think(100_000, np.random.default_rng(0), mean_s=30.0, sigma=1.0) / 1e9
    assert pauses_s.mean() == pytest.approx(30.0, rel=0.03)
    assert np.median(pauses_s) == pytest.approx(30.0 * np.exp(-0.5), rel=0.03)
