"""Arrival processes: their rates and burstiness in closed form, and rates on the same luck."""

from functools import partial

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.workload.arrivals import (
    RateState,
    all_at_once,
    gamma,
    markov_modulated,
    piecewise,
    poisson,
    replay,
    within,
)
from kvsim.workload.chance import rng

PROCESSES = {
    "poisson": partial(poisson, rate_per_s=4.0),
    "gamma": partial(gamma, rate_per_s=4.0, cv=3.0),
    "piecewise": partial(piecewise, segments=[(0, 1.0), (60, 0.0), (90, 8.0)]),
    "markov": partial(markov_modulated, states=[RateState(2.0, 30.0), RateState(0.0, 5.0)]),
    "all at once": all_at_once,
    "replay": partial(replay, arrival_ns=np.arange(200_000) * 10**8, speed=2.0),
}


def dispersion(arrival_ns: np.ndarray, bin_s: float) -> float:
    """Variance over mean of counts in bins of bin_s; 1 for Poisson."""
    counts = np.bincount((arrival_ns // round(bin_s * 1e9)).astype(int))[:-1]
    return counts.var() / counts.mean()


def coefficient_of_variation(arrival_ns: np.ndarray) -> float:
    gaps = np.diff(arrival_ns, prepend=0)
    return gaps.std() / gaps.mean()


@pytest.mark.parametrize("name", PROCESSES)
def test_times_are_whole_nanoseconds_never_fall_and_depend_on_the_seed_alone(name):
    arrival_ns = PROCESSES[name](5000, rng(1, "arrivals"))
    assert arrival_ns.dtype == np.int64 and len(arrival_ns) == 5000
    assert arrival_ns[0] >= 0 and (np.diff(arrival_ns) >= 0).all()
    assert (arrival_ns == PROCESSES[name](5000, rng(1, "arrivals"))).all()


@pytest.mark.parametrize("name", PROCESSES)
def test_the_first_arrivals_do_not_depend_on_how_many_are_asked_for(name):
    few, many = (PROCESSES[name](n, rng(1, "arrivals")) for n in (100, 5000))
    assert (few == many[:100]).all()
    assert len(PROCESSES[name](0, rng(1, "arrivals"))) == 0


@pytest.mark.parametrize("process", [poisson, partial(gamma, cv=2.0)])
def test_rates_are_compared_on_the_same_luck(process):
    slow = process(1000, rng(3, "arrivals"), rate_per_s=1.0)
    fast = process(1000, rng(3, "arrivals"), rate_per_s=8.0)
    assert np.abs(slow - 8 * fast).max() <= 8  # each rounded to a nanosecond


def test_poisson_has_dispersion_one_at_every_scale():
    arrival_ns = poisson(200_000, rng(0, "arrivals"), rate_per_s=10.0)
    assert arrival_ns[-1] / 1e9 == pytest.approx(20_000, rel=0.01)
    assert coefficient_of_variation(arrival_ns) == pytest.approx(1.0, abs=0.02)
    for bin_s in (1.0, 10.0):
        num_bins = 20_000 / bin_s
        assert dispersion(arrival_ns, bin_s) == pytest.approx(1.0, abs=4 * (2 / num_bins) ** 0.5)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_gaps_have_the_mean_and_the_variation_asked_for(cv):
    arrival_ns = gamma(200_000, rng(0, "arrivals"), rate_per_s=5.0, cv=cv)
    assert arrival_ns[-1] / 1e9 == pytest.approx(40_000, rel=4 * cv / 200_000**0.5)
    assert coefficient_of_variation(arrival_ns) == pytest.approx(cv, rel=0.03)


def test_piecewise_has_each_segments_rate_and_none_where_it_is_zero():
    segments = [(0.0, 5.0), (1000.0, 0.0), (2000.0, 20.0), (3000.0, 1.0)]
    arrival_s = piecewise(26_000, rng(0, "arrivals"), segments=segments) / 1e9
    counts = np.histogram(arrival_s, [0, 1000, 2000, 3000, 3500])[0]
    for count, expected in zip(counts, (5000, 0, 20_000, 500), strict=True):
        assert abs(count - expected) <= 4 * expected**0.5


def test_piecewise_ends_where_its_last_rate_is_zero():
    arrival_ns = piecewise(1000, rng(0, "arrivals"), segments=[(0.0, 2.0), (50.0, 0.0)])
    assert 60 < len(arrival_ns) < 140 and arrival_ns[-1] < 50e9


def test_markov_modulated_has_the_steady_states_mean_rate_and_dispersion():
    slow, fast = RateState(2.0, 40.0), RateState(20.0, 10.0)
    rate = (2.0 * 40 + 20.0 * 10) / 50  # 5.6 a second
    counts = [
        within(partial(markov_modulated, states=[slow, fast]), partial(rng, seed, "a"), 400 * 10**9)
        for seed in range(300)
    ]
    # two states: variance of a long count over its mean, 1 + 2 p (1 - p) (r1 - r2)^2 / (r q)
    share, relax = 10 / 50, 1 / 40 + 1 / 10
    span = 400 * relax
    settled = 1 - (1 - np.exp(-span)) / span
    dispersion = 1 + 2 * share * (1 - share) * (20 - 2) ** 2 / (rate * relax) * settled
    error = (dispersion * rate * 400 / 300) ** 0.5
    assert np.mean(counts) == pytest.approx(rate * 400, abs=4 * error)
    assert np.var(counts) / np.mean(counts) == pytest.approx(dispersion, rel=4 * (2 / 300) ** 0.5)


def test_replay_changes_speed_and_ends_with_what_it_replays():
    arrival_ns = np.array([5, 10, 40], np.int64)
    assert replay(9, rng(0, "a"), arrival_ns=arrival_ns, speed=5.0).tolist() == [1, 2, 8]


def test_a_duration_holds_the_arrivals_before_its_end_however_many():
    process = partial(poisson, rate_per_s=100.0)
    num_requests = within(process, partial(rng, 0, "arrivals"), 60 * 10**9)
    arrival_ns = process(num_requests + 1, rng(0, "arrivals"))
    assert arrival_ns[-2] < 60 * 10**9 <= arrival_ns[-1]
    with pytest.raises(UserError, match="all at once"):
        within(all_at_once, partial(rng, 0, "arrivals"), 10**9)


def test_one_name_does_not_move_another():
    assert (rng(0, "a").random(4) == rng(0, "a").random(4)).all()
    streams = [rng(seed, name).random(4) for seed in (0, 1) for name in ("a", "b", "ab")]
    assert len({row.tobytes() for row in streams}) == 6
