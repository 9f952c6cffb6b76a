"""Presets: their exact distributions against published figures, their draws, the data they fit."""

import csv
import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvsim.errors import ConfigError
from kvsim.workload.chance import rng
from kvsim.workload.discrete import Discrete
from kvsim.workload.lengths import Joint
from kvsim.workload.presets import PRESETS, load_preset
from tests.shared import SHARED, needs_shared

ROOT = Path(__file__).resolve().parents[1]
NUM_DRAWS = 20_000


class Side(NamedTuple):
    mean: float
    p50: float
    p90: float
    p99: float


class Published(NamedTuple):
    prompt: Side
    output: Side
    rank_correlation: float


# sharegpt: Kwon et al. 2023 and their artifact's pairs; alpaca: their Fig. 11 as a histogram (its
# correlation is not known, so the preset has none); the others: all rows of the public files
PUBLISHED = {
    "sharegpt": Published(Side(161.31, 35, 506, 1460), Side(337.99, 271, 754, 1280), 0.214),
    "alpaca": Published(Side(19.56, 16.4, 30.7, 74), Side(58.60, 42.7, 125, 269), 0.0),
    "azure-conv": Published(Side(1154.7, 1020, 2734, 4142), Side(211.1, 129, 424, 601), 0.073),
    "azure-code": Published(Side(2047.8, 1469, 5188, 7436), Side(27.9, 13, 55, 251), -0.021),
    "mooncake-conversation": Published(
        Side(12035, 6909, 27367, 85400), Side(342.6, 350, 597, 1119), 0.072
    ),
}


def marginals(joint: Joint, published: Published) -> list[tuple[Discrete, Side]]:
    return [(joint.prompt, published.prompt), (joint.output_as_cut(), published.output)]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(mid_ranks(x), mid_ranks(y))[0, 1])


def mid_ranks(values: np.ndarray) -> np.ndarray:
    _, of_row, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[of_row]


def ks(exact: Discrete, values: np.ndarray) -> float:
    """sup |F - F_values| over the whole numbers."""
    at = np.arange(min(exact.low, values.min()), max(exact.high, values.max()) + 1)
    below = np.searchsorted(np.sort(values), at, side="right") / len(values)
    return float(np.abs(exact.up_to(at) - below).max())


def test_every_preset_has_a_catalog_file_and_published_figures():
    catalog = ROOT / "kvsim" / "catalog" / "workloads"
    assert sorted(path.stem for path in catalog.glob("*.json")) == sorted(PRESETS)
    assert sorted(PUBLISHED) == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_the_exact_distribution_has_the_published_means_and_quantiles(name):
    joint = load_preset(name)
    for exact, side in marginals(joint, PUBLISHED[name]):
        assert exact.mean() == pytest.approx(side.mean, rel=0.02)
        for probability, tokens in ((0.5, side.p50), (0.9, side.p90), (0.99, side.p99)):
            assert exact.quantile(probability) == pytest.approx(tokens, rel=0.05)
    assert joint.spearman() == pytest.approx(PUBLISHED[name].rank_correlation, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PRESETS)
def test_draws_are_off_by_three_standard_errors_more_at_most(name, seed):
    joint = load_preset(name)
    draws = joint(NUM_DRAWS, rng(seed, "lengths"))
    for (exact, side), tokens in zip(marginals(joint, PUBLISHED[name]), draws, strict=True):
        allowed = 0.02 * side.mean + 3 * exact.std() / NUM_DRAWS**0.5
        assert abs(tokens.mean() - side.mean) <= allowed
        for probability, target in ((0.5, side.p50), (0.9, side.p90), (0.99, side.p99)):
            # the standard error of a quantile, in probability, where the distribution is known
            luck = 3 * (probability * (1 - probability) / NUM_DRAWS) ** 0.5
            drawn = np.quantile(tokens, probability, method="inverted_cdf")
            middle = exact.quantile(probability)
            assert drawn >= 0.95 * target - (middle - exact.quantile(probability - luck))
            assert drawn <= 1.05 * target + (exact.quantile(probability + luck) - middle)
    drawn = rank_correlation(*draws)
    assert abs(drawn - PUBLISHED[name].rank_correlation) <= 0.05 + 3 / NUM_DRAWS**0.5


@pytest.mark.parametrize("name", PRESETS)
def test_draws_follow_the_exact_marginals_and_the_exact_total(name):
    joint = load_preset(name)
    draws = joint(NUM_DRAWS, rng(0, "lengths"))
    limit = 1.95 / NUM_DRAWS**0.5  # Kolmogorov's 0.1 % point
    assert ks(joint.prompt, draws.prompt_tokens) < limit
    assert ks(joint.output_as_cut(), draws.output_tokens) < limit
    assert ks(joint.total(), draws.prompt_tokens + draws.output_tokens) < limit
    assert rank_correlation(*draws) == pytest.approx(joint.spearman(), abs=0.03)


def test_sharegpt_stays_within_the_context_of_its_pairs():
    draws = load_preset("sharegpt")(200_000, rng(0, "lengths"))
    assert (draws.prompt_tokens + draws.output_tokens).max() <= 2048
    assert min(draws.prompt_tokens.min(), draws.output_tokens.min()) >= 1


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_requests_do_not_depend_on_how_many_are_drawn(name):
    joint = load_preset(name)
    few, many = joint(100, rng(7, "lengths")), joint(1000, rng(7, "lengths"))
    assert (few.prompt_tokens == many.prompt_tokens[:100]).all()
    assert (few.output_tokens == many.output_tokens[:100]).all()


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'shargpt' is not one of .*nearest is 'sharegpt'"):
        load_preset("shargpt")


@needs_shared
def test_the_catalog_is_what_the_fitting_tool_makes_of_the_data(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location(
        "fit_workloads", ROOT / "experiments" / "fit_workloads.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main([str(SHARED / "data"), str(tmp_path)])
    for name in PRESETS:
        made = (tmp_path / f"{name}.json").read_bytes()
        assert made == (ROOT / "kvsim" / "catalog" / "workloads" / f"{name}.json").read_bytes()


@needs_shared
def test_sharegpt_is_close_to_its_pairs_in_prompt_output_and_total():
    pairs = csv_pairs("paper/sharegpt_opt_lengths.csv")
    prompt, output = pairs[pairs.sum(axis=1) <= 2048].T
    joint = load_preset("sharegpt")
    assert ks(joint.prompt, prompt) < 0.01
    assert ks(joint.output_as_cut(), output) < 0.01
    assert ks(joint.total(), prompt + output) < 0.01
    assert joint.spearman() == pytest.approx(rank_correlation(prompt, output), abs=0.01)


@needs_shared
def test_alpaca_is_close_to_the_histograms_it_stands_for():
    histograms = json.loads((SHARED / "data" / "paper" / "fig_points.json").read_text())
    joint = load_preset("alpaca")
    for side, exact in (("input", joint.prompt), ("output", joint.output)):
        left, right, density = np.array(histograms["fig11_alpaca_hist"][side]).T
        below = np.concatenate(([0.0], np.cumsum(density * (right - left))))
        tokens = np.arange(exact.low, exact.high)
        histogram = np.interp(tokens + 0.5, np.concatenate((left[:1], right)), below)
        assert np.abs(exact.up_to(tokens) - histogram).max() < 0.005


FULL_FILES = {
    "azure-conv": "azure2023_conv",
    "azure-code": "azure2023_code",
    "mooncake-conversation": "mooncake_conversation",
}


@needs_shared
@pytest.mark.parametrize("name", FULL_FILES)
def test_presets_pass_through_the_quantiles_of_all_rows_in_the_total_too(name):
    stats = json.loads((SHARED / "data" / "traces" / "stats.json").read_text())
    joint = load_preset(name)
    percentiles = stats["quantiles_0_to_100"][FULL_FILES[name]]
    for side, exact in (("prompt", joint.prompt), ("output", joint.output)):
        assert off_at(exact, dict(enumerate(percentiles[side]))) < 0.001
    total = stats["datasets"][FULL_FILES[name]]["total"]
    known = {p: total[f"p{p}"] for p in (1, 5, 25, 50, 75, 90, 95, 99)}
    assert off_at(joint.total(), known) < 0.01
    assert joint.total().mean() == pytest.approx(total["mean"], rel=0.005)


@needs_shared
@pytest.mark.parametrize(
    ("name", "most"), [("azure-conv", 0.06), ("azure-code", 0.025), ("mooncake-conversation", 0.06)]
)
def test_presets_are_as_close_to_the_slices_as_the_slices_are_to_all_rows(name, most):
    prompt, output = trace_pairs(name).T
    joint = load_preset(name)
    assert ks(joint.prompt, prompt) < most
    assert ks(joint.output, output) < most
    assert ks(joint.total(), prompt + output) < most


@needs_shared
def test_independent_sides_would_miss_the_total_of_azure_conv():
    prompt, output = trace_pairs("azure-conv").T
    joint = load_preset("azure-conv")
    assert ks(Joint(joint.prompt, joint.output).total(), prompt + output) > 0.15


def off_at(exact: Discrete, quantiles: dict[int, float]) -> float:
    """The most probability by which `exact` misses one of the quantiles, given in percent."""
    off = 0.0
    for percent, tokens in quantiles.items():
        below, upto = exact.up_to(np.ceil([tokens - 1, tokens]).astype(int))
        off = max(off, percent / 100 - upto, below - percent / 100)
    return off


def trace_pairs(name: str) -> np.ndarray:
    if name == "azure-conv":
        return csv_pairs("traces/AzureLLMInferenceTrace_conv.csv")
    if name == "azure-code":
        return csv_pairs("traces/AzureLLMInferenceTrace_code.csv")
    lines = (SHARED / "data" / "traces" / "mooncake_conversation_trace.jsonl").open()
    records = [json.loads(line) for line in lines]
    return np.array([[record["input_length"], record["output_length"]] for record in records])


def csv_pairs(path: str) -> np.ndarray:
    with (SHARED / "data" / path).open() as lines:
        return np.array([[int(row[-2]), int(row[-1])] for row in list(csv.reader(lines))[1:]])
