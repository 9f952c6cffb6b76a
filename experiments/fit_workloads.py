"""Makes the length presets of kvsim/catalog/workloads from the published data they stand for.

    python experiments/fit_workloads.py DATA [OUT]

DATA holds paper/sharegpt_opt_lengths.csv, paper/fig_points.json, traces/stats.json and the trace
slices in traces/; it is not part of this repository. A preset is 104 quantiles of each marginal
and a K x K table of how often the K-ths of prompt and answer ranks meet: enough for means within
1 %, far from enough to restore a row. Same data, same bytes. Writes <preset>.json into OUT (the
catalog by default) and prints how far each preset is from what it was made from.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np

from kvsim.workload.chance import rng
from kvsim.workload.discrete import from_quantiles
from kvsim.workload.presets import parse_preset

CATALOG = Path(__file__).resolve().parents[1] / "kvsim" / "catalog" / "workloads"
PROBABILITIES = np.append(np.arange(100) / 100, [0.995, 0.999, 0.9995, 1.0])
WEIGHT_UNIT = 100_000  # rank weights are whole parts of it
MIXTURE_DRAWS = 2_000_000


def fit_all(data: Path) -> dict[str, dict]:
    """Every preset's file contents by its name."""
    return {
        "sharegpt": _sharegpt(data / "paper" / "sharegpt_opt_lengths.csv"),
        "alpaca": _alpaca(data / "paper" / "fig_points.json"),
        "azure-conv": _azure_conv(data / "traces"),
        "azure-code": _azure_code(data / "traces"),
        "mooncake-conversation": _mooncake(data / "traces"),
    }


def _sharegpt(path: Path) -> dict:
    pairs = _csv_pairs(path)
    prompt, output = pairs[pairs.sum(axis=1) <= 2048].T
    return _preset(
        "ShareGPT under OPT's tokenizer, first human turn and first reply, pairs with prompt + "
        "output <= 2048: the length pairs of the PagedAttention paper's artifact (Kwon et al. "
        "2023, SOSP), whose means the paper prints as 161.31 / 337.99.",
        np.quantile(prompt, PROBABILITIES),
        np.quantile(output, PROBABILITIES),
        _rank_weights(prompt, output, size=32),
        max_total_tokens=2048,
    )


def _alpaca(path: Path) -> dict:
    histograms = json.loads(path.read_text())["fig11_alpaca_hist"]
    return _preset(
        "Alpaca under OPT's tokenizer: the histograms of Fig. 11 of the PagedAttention paper (Kwon "
        "et al. 2023, SOSP), read from its vector drawing. How prompt and answer go together is "
        "not known: independent.",
        _histogram_quantiles(histograms["input"]),
        _histogram_quantiles(histograms["output"]),
        np.ones((1, 1)),
    )


def _azure_conv(traces: Path) -> dict:
    stats = json.loads((traces / "stats.json").read_text())
    mixture = stats["recommended_generators"]["azure2023_conv"]["joint"]
    return _preset(
        "Azure LLM inference trace 2023, conversation, all 19,366 rows: quantiles of each side; "
        "ranks go together as in a 16-part bivariate lognormal mixture fitted to the pairs, since "
        "certain prompt lengths go with certain answers and no single correlation says so.",
        _table_quantiles(stats, "azure2023_conv", "prompt"),
        _table_quantiles(stats, "azure2023_conv", "output"),
        _rank_weights(*_mixture_draws(mixture), size=32),
    )


def _azure_code(traces: Path) -> dict:
    stats = json.loads((traces / "stats.json").read_text())
    pairs = _csv_pairs(traces / "AzureLLMInferenceTrace_code.csv")
    return _preset(
        "Azure LLM inference trace 2023, code, all 8,819 rows: quantiles of each side; ranks go "
        "together as in the first 4,409 rows.",
        _table_quantiles(stats, "azure2023_code", "prompt"),
        _table_quantiles(stats, "azure2023_code", "output"),
        _rank_weights(*pairs.T, size=4),
    )


def _mooncake(traces: Path) -> dict:
    stats = json.loads((traces / "stats.json").read_text())
    with (traces / "mooncake_conversation_trace.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    return _preset(
        "Mooncake (FAST'25) conversation trace, all 12,031 rows: quantiles of each side; ranks go "
        "together as in the first 2,600 rows. Prompts are whole prompts, shared prefixes included.",
        _table_quantiles(stats, "mooncake_conversation", "prompt"),
        _table_quantiles(stats, "mooncake_conversation", "output"),
        _rank_weights(
            np.array([record["input_length"] for record in records]),
            np.array([record["output_length"] for record in records]),
            size=8,
        ),
    )


def _preset(
    source: str,
    prompt: np.ndarray,
    output: np.ndarray,
    rank_weights: np.ndarray,
    *,
    max_total_tokens: int | None = None,
) -> dict:
    return {
        "source": source,
        "max_total_tokens": max_total_tokens,
        "probabilities": PROBABILITIES.round(4).tolist(),
        "prompt_tokens": np.round(prompt, 1).tolist(),
        "output_tokens": np.round(output, 1).tolist(),
        "rank_weights": np.rint(rank_weights * WEIGHT_UNIT).astype(int).tolist(),
    }


def _csv_pairs(path: Path) -> np.ndarray:
    """The last two columns of each row, prompt and output tokens: int64 [n, 2]."""
    with path.open() as lines:
        rows = csv.reader(lines)
        next(rows)
        return np.array([[int(row[-2]), int(row[-1])] for row in rows])


def _histogram_quantiles(bins: list[list[float]]) -> np.ndarray:
    """Quantiles of a histogram of (left edge, right edge, density), flat inside a bin."""
    edges, mass = [bins[0][0]], [0.0]
    for left, right, density in bins:
        edges += [left, right]
        mass += [mass[-1], mass[-1] + density * (right - left)]
    return np.interp(PROBABILITIES, np.array(mass) / mass[-1], edges)


def _table_quantiles(stats: dict, dataset: str, side: str) -> np.ndarray:
    """Quantiles at PROBABILITIES from a file's percentiles, its p99.9 and its mean.

    Those at 0.995 and 0.9995 are not published. Both are set at the same fraction of the way
    between their neighbours, the one that gives the whole its mean.
    """
    percentiles = stats["quantiles_0_to_100"][dataset][side]
    summary = stats["datasets"][dataset][side]
    p99, p999, p100 = percentiles[99], summary["p999"], percentiles[100]

    def bent(fraction: float) -> np.ndarray:
        inner = [p99 + fraction * (p999 - p99), p999 + fraction * (p100 - p999)]
        return np.array([*percentiles[:100], inner[0], p999, inner[1], p100])

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        is_over = from_quantiles(PROBABILITIES, bent(middle)).mean() > summary["mean"]
        low, high = (low, middle) if is_over else (middle, high)
    return bent(low)


def _mixture_draws(mixture: dict) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, output) tokens drawn from a bivariate lognormal mixture, rounded and clipped."""
    generator = rng(0, "mixture")
    weights = np.array(mixture["w"])
    part = generator.choice(len(weights), MIXTURE_DRAWS, p=weights / weights.sum())
    roots = np.linalg.cholesky(np.array(mixture["Sigma"]))[part]
    normal = generator.standard_normal((MIXTURE_DRAWS, 2))
    logs = np.array(mixture["mu"])[part] + np.einsum("nij,nj->ni", roots, normal)
    tokens = np.clip(np.rint(np.exp(logs)), mixture["clip_min"], mixture["clip_max"])
    return tokens[:, 0].astype(np.int64), tokens[:, 1].astype(np.int64)


def _rank_weights(prompt: np.ndarray, output: np.ndarray, *, size: int) -> np.ndarray:
    """The share of pairs whose ranks fall in each of size x size cells; ties are spread evenly."""
    x, x_of = _spread(prompt, size)
    y, y_of = _spread(output, size)
    weights = np.zeros((size, size))
    for start in range(0, len(prompt), 50_000):
        part = slice(start, start + 50_000)
        weights += x[x_of[part]].T @ y[y_of[part]]
    return weights / len(prompt)


def _spread(tokens: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each distinct length its share in each K-th of the ranks [V, K]; each row's length."""
    _, of_row, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    above = np.cumsum(counts)[:, None] / len(tokens)
    below = above - counts[:, None] / len(tokens)
    edges = np.arange(size + 1) / size
    overlap = np.minimum(above, edges[1:]) - np.maximum(below, edges[:-1])
    return np.clip(overlap, 0.0, None) / (above - below), of_row


def _as_json(preset: dict) -> str:
    """One key a line, a table one row a line."""
    lines = []
    for key, value in preset.items():
        text = json.dumps(value)
        if key == "rank_weights":
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str]) -> None:
    data, out = Path(arguments[0]), Path(arguments[1]) if len(arguments) > 1 else CATALOG
    for name, preset in fit_all(data).items():
        text = _as_json(preset)
        (out / f"{name}.json").write_text(text, encoding="utf-8")
        joint = parse_preset(text)
        sides = {"prompt": joint.prompt, "output": joint.output_as_cut(), "total": joint.total()}
        for side, exact in sides.items():
            quantiles = ", ".join(f"p{100 * p:g} {exact.quantile(p)}" for p in (0.5, 0.9, 0.99))
            print(f"{name:22} {side:6} mean {exact.mean():9.2f}, {quantiles}")
        print(f"{name:22} rank correlation {joint.spearman():.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
