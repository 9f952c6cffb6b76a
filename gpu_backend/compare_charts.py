"""Charts of a comparison: throughput and latency over the request rate, simulated and measured; and
every step's time, predicted against measured."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpu_backend.compare import Comparison
from gpu_backend.compare_tables import Summary, step_errors, summaries_of
from gpu_backend.trials import Variant
from kvsim.study.plots.style import (
    FAINT,
    INK,
    LineStyle,
    legend_above,
    line_style,
    log_ticks,
    new_figure,
    save,
    styled,
    wrapped,
)
from kvsim.study.results import CHARTS

PANELS = (
    ("request_throughput", "Throughput (req/s)", 1.0),
    ("mean_e2el_ms", "Mean end-to-end latency (s)", 1e-3),
)
COLUMNS = 3  # panels of step times in a row
CELLS = 45  # of a panel of step times, across
MEASURED = {"linestyle": "", "markersize": 4.2, "capsize": 2.2, "elinewidth": 0.8, "zorder": 4}


def draw(comparison: Comparison, folder: Path) -> None:
    """Write the charts into `folder`/charts, as PNG and SVG."""
    target = folder / CHARTS
    target.mkdir()
    with styled():
        save(_rates(comparison), target, "measured")
        save(_step_times(comparison.variants), target, "step_time")


def _rates(comparison: Comparison) -> Figure:
    """One row for each pool size: variants of one pool are what may be compared."""
    variants, summaries = comparison.variants, summaries_of(comparison)
    pools = list(dict.fromkeys(_pool(variant) for variant in variants))
    figure = new_figure(0.4 + 2.0 * len(pools))
    grid = figure.subplots(len(pools), len(PANELS), squeeze=False)
    policies = list(dict.fromkeys(_policy(variant) for variant in variants))
    for axes_of_pool, pool in zip(grid, pools, strict=True):
        shown = [variant for variant in variants if _pool(variant) == pool]
        for axes, (metric, label, times) in zip(axes_of_pool, PANELS, strict=True):
            for variant in shown:
                style = line_style(policies.index(_policy(variant)))
                curve = [
                    one
                    for one in summaries
                    if one.variant == variant.name and one.metric == metric and one.rate_per_s
                ]
                _curve(axes, curve, style, times)
            axes.set(xlim=(0, None), ylabel=label)
        left, right = axes_of_pool
        left.set_ylim(0, None)
        _offered(left)
        low, high = right.dataLim.intervaly
        if math.isfinite(low):  # some rate has requests that finished both ways
            right.set(yscale="log", ylim=(low / 1.25, high * 1.25))
            log_ticks(right.yaxis, *right.get_ylim())
        if len(pools) > 1:
            blocks, size = pool
            left.set_title(f"pool of {blocks:,} x {size} tokens")
    figure.supxlabel("Request rate (req/s)", fontsize=8)
    styles = [line_style(place) for place in range(len(policies))]
    handles = [
        *(Line2D([], [], color=s.color, marker=s.marker, linestyle=s.linestyle) for s in styles),
        Line2D([], [], color=INK),
        Line2D([], [], color=INK, marker="o", linestyle=""),
    ]
    legend_above(figure, handles, [*policies, "line: simulated", "mark: measured (range)"])
    return figure


def _pool(variant: Variant) -> tuple[int | None, int]:
    return variant.experiment.kv.num_blocks, variant.experiment.kv.block_size


def _policy(variant: Variant) -> str:
    """In words: a variant's name says the pool too."""
    policy = variant.experiment.kv.policy
    if policy.kind == "contiguous":
        return f"contiguous, {policy.reserve}"
    return {"paged": "paged", "paged_sharing": "paged + sharing"}[policy.kind]


def _curve(axes: Axes, curve: list[Summary], style: LineStyle, times: float) -> None:
    there = sorted(
        (one for one in curve if one.simulated and one.measured), key=lambda one: one.rate_per_s
    )
    rates = [one.rate_per_s for one in there]
    told = [one.simulated.median * times for one in there]
    axes.plot(rates, told, color=style.color, linestyle=style.linestyle, zorder=3)
    middle, low, high = (
        np.array([getattr(one.measured, name) * times for one in there])
        for name in ("median", "low", "high")
    )
    axes.errorbar(
        rates,
        middle,
        yerr=np.stack([middle - low, high - middle]),
        color=style.color,
        marker=style.marker,
        **MEASURED,
    )


def _offered(axes: Axes) -> None:
    high = min(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([0, high], [0, high], color=FAINT, linewidth=0.6, zorder=1)
    axes.annotate(
        "offered",
        (high, high),
        (-16, -2),
        textcoords="offset points",
        color=FAINT,
        ha="right",
        va="top",
    )


def _step_times(variants: list[Variant]) -> Figure:
    """All steps of a variant's real runs: how many fall into each cell, dark is many."""
    columns = min(len(variants), COLUMNS)
    rows = -(-len(variants) // columns)
    figure = new_figure(0.4 + 2.2 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    ends = [
        times
        for variant in variants
        for trial in variant.trials
        for times in (trial.steps.measured_ns, trial.steps.predicted_ns)
    ]
    low, high = (edge(np.concatenate(ends)) / 1e6 for edge in (np.min, np.max))
    low, high = low / 1.1, high * 1.1
    for axes, variant in zip(grid, variants, strict=False):
        _cloud(axes, variant, (low, high))
    for axes in grid[len(variants) :]:
        axes.set_visible(False)
    for axes in grid[max(len(variants) - columns, 0) : len(variants)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("Measured step time (ms)", fontsize=8)
    figure.supylabel("Predicted step time (ms)", fontsize=8)
    return figure


def _cloud(axes: Axes, variant: Variant, ends: tuple[float, float]) -> None:
    measured, predicted = (
        np.concatenate([getattr(trial.steps, name) for trial in variant.trials]) / 1e6
        for name in ("measured_ns", "predicted_ns")
    )
    extent = (*np.log10(ends), *np.log10(ends))
    axes.hexbin(
        measured,
        predicted,
        gridsize=CELLS,
        xscale="log",
        yscale="log",
        bins="log",
        mincnt=1,
        cmap="Blues",
        vmin=0.3,
        linewidths=0.1,
        extent=extent,
    )
    axes.plot(ends, ends, color=INK, linewidth=0.7, zorder=4)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, *ends)
    axes.set_title(wrapped(variant.name, 34, 1))
    each, total = step_errors(variant.trials)
    text = f"{len(measured):,} steps\nmean |error| {100 * each:.1f} %\nsum {100 * total:+.1f} %"
    axes.annotate(text, (0.04, 0.96), xycoords="axes fraction", va="top")
