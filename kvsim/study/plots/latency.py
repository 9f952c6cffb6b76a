"""Chart `latency`: how TTFT, TPOT and E2EL are distributed over the finished requests of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.study.plots.select import Selection, Shown
from kvsim.study.plots.style import legend_above, line_style, log_ticks, new_figure
from kvsim.study.plots.timeline import read_columns
from kvsim.study.results import REQUESTS
from kvsim.study.tables import Table

MOST_POINTS = 500  # of a curve
GUIDES = (50, 99)
SHOWN = (0.5, 99.5)


class Measure(NamedTuple):
    column: str
    label: str
    per_ms: float


MEASURES = (
    Measure("ttft_ms", "Time to first token (s)", 1e-3),
    Measure("tpot_ms", "Time per output token (ms)", 1),
    Measure("e2el_ms", "End-to-end latency (s)", 1e-3),
)


def latency_chart(selection: Selection) -> Figure | None:
    """None where no request has finished."""
    found = ((run.label, _completed(run)) for run in selection.runs)
    tables = [(label, table) for label, table in found if table is not None]
    measures = [m for m in MEASURES if any(np.isfinite(t[m.column]).any() for _, t in tables)]
    if not tables:
        return None
    figure = new_figure(2.2)
    grid = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for axes, measure in zip(grid, measures, strict=True):
        for place, (_, table) in enumerate(tables):
            _curve(axes, table[measure.column] * measure.per_ms, place)
        axes.set(xscale="log", xlim=_limits(tables, measure), ylim=(0, 101), xlabel=measure.label)
        log_ticks(axes.xaxis, *axes.get_xlim())
        for percent in GUIDES:
            axes.axhline(percent, color="#C8C8C8", linewidth=0.5, zorder=0)
    grid[0].set_yticks((0, 25, 50, 75, 99), ("0", "25", "50", "75", "99"))
    note = f",\n{selection.note}" if selection.note else ""
    grid[0].set_ylabel(f"Finished requests (%){note}")
    if tables[0][0] or len(tables) > 1:
        handles = grid[0].get_lines()[: len(tables)]
        legend_above(figure, handles, [label for label, _ in tables])
    return figure


def _completed(run: Shown) -> Table | None:
    """The latencies of the requests that finished in the run's window; None if none did."""
    columns = ("finish_ns", *(measure.column for measure in MEASURES))
    table = read_columns(run.point.folder / REQUESTS, columns)
    if table is None:
        return None
    summary = run.point.summary
    start_ns, end_ns = (round(summary[f"window_{at}_s"] * 1e9) for at in ("start", "end"))
    done = (table["finish_ns"] > start_ns) & (table["finish_ns"] <= end_ns)
    return {name: column[done] for name, column in table.items()} if done.any() else None


def cumulative(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distribution of finite values as points of a step curve: value, percent at or below.

    Above MOST_POINTS values only as many order statistics are kept, each at its own height.
    """
    ordered = np.sort(values[np.isfinite(values)])
    count = min(len(ordered), MOST_POINTS)
    rank = np.linspace(1, len(ordered), count).round().astype(np.int64) if count else np.arange(0)
    return ordered[rank - 1], rank * 100 / max(len(ordered), 1)


def _curve(axes: Axes, values: np.ndarray, place: int) -> None:
    at, percent = cumulative(values)
    style = line_style(place)
    at, percent = np.append(at[:1], at), np.append(np.zeros(len(at[:1])), percent)
    axes.plot(at, percent, color=style.color, linestyle=style.linestyle, drawstyle="steps-post")


def _limits(tables: list[tuple[str, Table]], measure: Measure) -> tuple[float, float]:
    """Between the SHOWN percentiles of all runs: a few stragglers would squeeze the rest."""
    ends = [
        np.percentile(values[np.isfinite(values)], SHOWN) * measure.per_ms
        for _, table in tables
        if np.isfinite(values := table[measure.column]).any()
    ]
    low, high = np.min(ends), np.max(ends)
    margin = max((high / low) ** 0.03, 1.05)
    return low / margin, high * margin
