"""A comparison as figures: errors by metric, medians and spread over repeats, tables for screen and
file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from gpu_backend.compare import Comparison
from gpu_backend.trials import Trial, Variant

METRICS: dict[str, Callable[[dict], float | None]] = {
    "request_throughput": lambda s: s["request_throughput"],
    "output_throughput": lambda s: s["output_throughput"],
    "mean_ttft_ms": lambda s: s["mean_ttft_ms"],
    "p99_ttft_ms": lambda s: s["p99_ttft_ms"],
    "mean_tpot_ms": lambda s: s["mean_tpot_ms"],
    "p99_tpot_ms": lambda s: s["p99_tpot_ms"],
    "mean_e2el_ms": lambda s: s["mean_e2el_ms"],
    "p99_e2el_ms": lambda s: s["p99_e2el_ms"],
    "batch_size_mean": lambda s: s["batch_size_mean"],
    "kv_blocks_referenced": lambda s: s["kv_blocks"]["referenced"],
    "kv_used_peak": lambda s: s["kv_used_peak"],
    "preemptions": lambda s: s["preemptions"],
}
SHOWN = {
    "request_throughput": "throughput",
    "mean_ttft_ms": "TTFT",
    "mean_tpot_ms": "TPOT",
    "mean_e2el_ms": "E2EL",
    "batch_size_mean": "batch",
    "kv_blocks_referenced": "KV use",
}
FIGURES = (
    "policy", "load", "req/s offered", "req/s measured", "simulated", "E2EL ms measured",
    "simulated", "preempted measured", "simulated",
)  # fmt: skip
ERRORS = ("policy", "load", *SHOWN.values(), "one step", "all steps")


class Row(NamedTuple):
    """A metric of a trial."""

    variant: str
    load: float | None
    rate_per_s: float | None
    seed: int
    metric: str
    simulated: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Of the simulated figure, relative; None where there is nothing to divide by."""
        if self.simulated is None or self.measured is None:
            return None
        if self.simulated == self.measured:
            return 0.0
        return self.simulated / self.measured - 1 if self.measured else None


class Spread(NamedTuple):
    """A figure over the repeats of a point."""

    median: float
    low: float
    high: float


class Summary(NamedTuple):
    """A metric at one point of a variant: over its repeats, and the errors of the pairs."""

    variant: str
    load: float | None
    rate_per_s: float | None
    metric: str
    simulated: Spread | None
    measured: Spread | None
    error: Spread | None


def rows_of(comparison: Comparison) -> list[Row]:
    return [row for variant in comparison.variants for t in variant.trials for row in _rows(t)]


def summaries_of(comparison: Comparison) -> list[Summary]:
    return [
        _summary(trials, metric)
        for variant in comparison.variants
        for trials in points_of(variant)
        for metric in METRICS
    ]


def points_of(variant: Variant) -> Iterator[list[Trial]]:
    """The repeats of each load."""
    loads = dict.fromkeys(trial.load for trial in variant.trials)
    return ([t for t in variant.trials if t.load == load] for load in loads)


def step_errors(trials: list[Trial]) -> tuple[float, float]:
    """Of the fitted times of all their steps: mean relative error of one, unsigned, and of the
    sum."""
    told = [n for t in trials for n in t.steps.predicted_ns.tolist()]
    took = [n for t in trials for n in t.steps.measured_ns.tolist()]
    each = sum(abs(a / b - 1) for a, b in zip(told, took, strict=True)) / len(took)
    return each, sum(told) / sum(took) - 1


def figures_of(comparison: Comparison) -> list[tuple[str, ...]]:
    """A line for each point, under FIGURES: medians and ranges over the repeats."""
    lines = []
    for variant in comparison.variants:
        for trials in points_of(variant):
            throughput, e2el, preempted = (
                _summary(trials, metric)
                for metric in ("request_throughput", "mean_e2el_ms", "preemptions")
            )
            rate = trials[0].rate_per_s
            lines.append((
                variant.name,
                _load(trials[0].load),
                "-" if rate is None else f"{rate:.2f}",
                in_words(throughput.measured, "{:.2f}"),
                in_words(throughput.simulated, "{:.2f}"),
                in_words(e2el.measured, "{:,.0f}"),
                in_words(e2el.simulated, "{:,.0f}"),
                in_words(preempted.measured, "{:.0f}"),
                in_words(preempted.simulated, "{:.0f}"),
            ))  # fmt: skip
    return lines


def errors_of(comparison: Comparison) -> list[tuple[str, ...]]:
    """A line for each point, under ERRORS: of the means, in %, and of the fitted step times."""
    lines = []
    for variant in comparison.variants:
        for trials in points_of(variant):
            errors = [_summary(trials, metric).error for metric in SHOWN]
            steps = [step_errors([trial]) for trial in trials]
            each, total = (_spread(list(column)) for column in zip(*steps, strict=True))
            lines.append((
                variant.name,
                _load(trials[0].load),
                *(in_words(error, "{:+.1f}", 100) for error in errors),
                in_words(each, "{:.1f}", 100),
                in_words(total, "{:+.1f}", 100),
            ))  # fmt: skip
    return lines


def _load(load: float | None) -> str:
    return "all at once" if load is None else f"{load:g}"


FIGURES_TITLE = "Median over the repeats [lowest, highest]; load: share of the measured capacity"
ERRORS_TITLE = (
    "Error of the simulated figure in %: median of the repeats [lowest, highest]; of means, of the "
    "fitted time of one step (unsigned), and of the sum of all"
)


def replay_line(comparison: Comparison) -> str:
    replays = [trial.replay for variant in comparison.variants for trial in variant.trials]
    steps = sum(replay.num_steps for replay in replays)
    values = sum(replay.num_values for replay in replays)
    count = sum(len(replay.differences) for replay in replays)
    return (
        f"replay of {len(replays)} runs, measured step times in the simulator: {steps:,} steps, "
        f"{values:,} values, {count} differences"
    )


def in_words(spread: Spread | None, form: str, times: float = 1) -> str:
    """`median [lowest, highest]`, or one number where they are equal."""
    if spread is None:
        return "-"
    middle, low, high = (form.format(value * times) for value in spread)
    return middle if low == high else f"{middle} [{low}, {high}]"


def print_comparison(comparison: Comparison) -> None:
    console = Console(width=170, highlight=False, markup=False)
    for name, value in comparison.environment.items():
        if value is not None:
            console.print(f"{name}: {value}", soft_wrap=True)
    seeds = sorted({t.seed for variant in comparison.variants for t in variant.trials})
    console.print(f"seeds: {', '.join(map(str, seeds))}")
    for title, columns, lines in (
        (FIGURES_TITLE, FIGURES, figures_of(comparison)),
        (ERRORS_TITLE, ERRORS, errors_of(comparison)),
    ):
        console.print(_table(title, columns, lines))
    console.print(replay_line(comparison), soft_wrap=True)


def _table(title: str, columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    for place, name in enumerate(columns):
        title = name.replace(" ", "\n", 1) if place > 1 else name
        table.add_column(title, justify="left" if place < 2 else "right", no_wrap=True)
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        table.add_row(*line, end_section=after is not None and after[0] != line[0])
    return table


def _rows(trial: Trial) -> list[Row]:
    at = (trial.variant, trial.load, trial.rate_per_s, trial.seed)
    return [
        Row(*at, metric, figure(trial.simulated), figure(trial.measured))
        for metric, figure in METRICS.items()
    ]


def _summary(trials: list[Trial], metric: str) -> Summary:
    rows = [row for trial in trials for row in _rows(trial) if row.metric == metric]
    first = rows[0]
    columns = ([getattr(row, name) for row in rows] for name in ("simulated", "measured", "error"))
    spreads = (_spread([v for v in values if v is not None]) for values in columns)
    return Summary(first.variant, first.load, first.rate_per_s, metric, *spreads)


def _spread(values: list[float]) -> Spread | None:
    return Spread(median(values), min(values), max(values)) if values else None
