"""Exact distributions of whole numbers, couplings of ranks, pairs from a trace."""

import math

import numpy as np
import pytest

from kvsim.workload.chance import rng
from kvsim.workload.discrete import (
    fixed,
    from_quantiles,
    geometric,
    lognormal,
    lognormal_mixture,
    lognormal_mu,
    uniform,
)
from kvsim.workload.lengths import Coupling, Joint, empirical, gaussian, scaled
from kvsim.workload.sessions import sharegpt_turns
from kvsim.workload.workload import columns

DISTRIBUTIONS = {
    "fixed": fixed(128),
    "uniform": uniform(32, 512),
    "geometric": geometric(6.0, high=300),
    "lognormal": lognormal(5.0, 0.8, low=4, high=1024),
    "mixture": lognormal_mixture([1, 3], [2.0, 5.5], [0.5, 0.3], low=1, high=2000),
    "quantiles": from_quantiles([0, 0.5, 0.9, 0.9, 1], [3, 8.4, 8.4, 20, 31]),
    "turns": sharegpt_turns(),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_is_a_table_whose_mass_is_one(name):
    exact = DISTRIBUTIONS[name]
    values = np.arange(exact.low, exact.high + 1)
    assert exact.cdf[-1] == 1.0 and (exact.pmf() >= 0).all()
    assert exact.mean() == pytest.approx(exact.pmf() @ values)
    assert exact.std() ** 2 == pytest.approx(exact.pmf() @ values**2 - exact.mean() ** 2, abs=1e-6)
    assert exact.up_to(np.array([exact.low - 1, exact.high, exact.high + 9])).tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_evenly_spread_ranks_give_back_the_distribution(name):
    exact = DISTRIBUTIONS[name]
    values = exact.at((np.arange(100_000) + 0.5) / 100_000)
    assert values.dtype == np.int64
    assert (values.min(), values.max()) >= (exact.low, exact.low)
    assert values.mean() == pytest.approx(exact.mean(), rel=1e-3)
    for probability in (0.1, 0.5, 0.9, 0.99):
        drawn = np.quantile(values, probability, method="inverted_cdf")
        assert abs(drawn - exact.quantile(probability)) <= 1


def test_lognormals_have_the_closed_forms_mean_and_median():
    wide = lognormal(lognormal_mu(200.0, 0.6), 0.6, low=1, high=10_000)
    assert wide.mean() == pytest.approx(200.0, rel=1e-3)
    assert wide.quantile(0.5) == pytest.approx(200.0 * math.exp(-0.18), abs=1)


def test_clipping_leaves_what_it_cuts_on_the_ends():
    cut = lognormal(5.0, 1.0, low=50, high=200)
    assert cut.pmf()[0] == pytest.approx(0.5 * math.erfc((5 - math.log(50.5)) / 2**0.5))
    assert cut.pmf()[-1] == pytest.approx(0.5 * math.erfc((math.log(199.5) - 5) / 2**0.5))


def test_turns_of_sharegpt_have_the_files_median_and_p90():
    turns = sharegpt_turns()
    assert turns.quantile(0.5) == 3 and turns.quantile(0.9) == 14
    assert turns.pmf()[0] == pytest.approx(0.304)


@pytest.mark.parametrize("correlation", [-0.7, 0.0, 0.3, 0.9])
def test_a_gaussian_coupling_has_the_rank_correlation_asked_for(correlation):
    joint = Joint(uniform(1, 4000), uniform(1, 4000), gaussian(correlation))
    assert joint.spearman() == pytest.approx(correlation, abs=0.01)
    prompt, output = joint(50_000, rng(0, "lengths"))
    assert np.corrcoef(prompt, output)[0, 1] == pytest.approx(correlation, abs=0.02)


@pytest.mark.parametrize(
    "weights", [np.ones((1, 1)), np.eye(4), [[0, 1, 2], [3, 1, 0], [0, 5, 1]], np.eye(3)[::-1]]
)
def test_a_coupling_moves_no_marginal(weights):
    coupling = Coupling.from_weights(np.array(weights))
    ranks, luck = rng(0, "lengths").random((100_000, 2)).T
    answers = np.sort(coupling.output_ranks(ranks, luck))
    assert answers[0] >= 0 and answers[-1] < 1
    expected = (coupling.cells.sum(axis=0) / len(coupling.cells)).cumsum()
    counts = np.searchsorted(answers, np.arange(1, len(expected) + 1) / len(expected)) / 100_000
    assert np.abs(counts - expected).max() < 0.007
    assert coupling.cells.sum(axis=1) == pytest.approx(1.0)


def test_ranks_at_the_very_ends_stay_in_their_row():
    last = np.nextafter(1.0, 0.0)
    coupling = Coupling.from_weights(np.eye(8))
    ranks = np.array([0.0, 0.0, last, last, 0.125, 0.125])
    answers = coupling.output_ranks(ranks, np.array([0.0, last, 0.0, last, 0.0, last]))
    assert ((answers * 8).astype(int) == (ranks * 8).astype(int)).all()


def test_a_context_limit_cuts_answers_and_never_prompts():
    joint = Joint(uniform(1, 90), uniform(1, 90), gaussian(0.5), max_total_tokens=100)
    prompt, output = joint(100_000, rng(0, "lengths"))
    assert (prompt + output).max() == 100 and output.min() == 1
    assert output.mean() == pytest.approx(joint.output_as_cut().mean(), rel=0.01)
    assert (prompt + output).mean() == pytest.approx(joint.total().mean(), rel=0.01)
    assert joint.output_as_cut().mean() < joint.output.mean()


def test_empirical_draws_keep_a_prompt_with_its_answer():
    trace = columns(np.arange(5), np.array([1, 2, 3, 4, 5]), np.array([10, 20, 30, 40, 50]))
    prompt, output = empirical(1000, rng(0, "lengths"), workload=trace)
    assert (output == 10 * prompt).all() and set(prompt.tolist()) == {1, 2, 3, 4, 5}


def test_scaled_lengths_are_those_of_the_sampler_in_their_order_rounded_up():
    joint = Joint(uniform(1, 40), uniform(1, 300), gaussian(0.4))
    plain = joint(500, rng(3, "lengths"))
    small = scaled(500, rng(3, "lengths"), sampler=joint, scale=0.125)
    for one, whole in zip(small, plain, strict=True):
        assert one.tolist() == [math.ceil(tokens / 8) for tokens in whole.tolist()]
    assert min(map(min, small)) == 1
