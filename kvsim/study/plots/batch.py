"""Chart `batch`: sequences running and waiting over time, one row a run; preemptions as ticks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvsim.study.plots.select import Selection, Shown
from kvsim.study.plots.style import FAINT, LINE_STYLES, new_figure, wrapped
from kvsim.study.plots.timeline import (
    num_replicas,
    read_steps,
    replica_means,
    time_axis,
    time_edges_ns,
)

ROW_IN = (1.6, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8)  # height of one of so many rows
NUM_BINS = 300  # in each panel: two dots a bin in print
COUNTS = ("num_running", "num_waiting", "num_preempted")
RUNNING, PREEMPTED, WAITING = LINE_STYLES[0].color, LINE_STYLES[1].color, "#444444"
LINE = {"baseline": None, "linewidth": 0.8, "clip_on": False, "zorder": 3}  # 0 lies on the axis
TICK = {"color": PREEMPTED, "linestyle": "", "marker": 3, "markersize": 3, "markeredgewidth": 0.4}


class Track(NamedTuple):
    """One run in bins of edges_ns: means over its replicas, and preemptions as a sum."""

    run: Shown
    edges_ns: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    preempted: np.ndarray
    num_preempted: int  # in the whole run, which may be longer than the axis
    num_replicas: int


def batch_chart(selection: Selection) -> Figure | None:
    """None where no run has made a step."""
    time = time_axis([run.point.folder for run in selection.runs], selection.note)
    if time is None:
        return None
    tracks = [t for run in selection.runs if (t := _track(run, time.end_ns)) is not None]
    figure = new_figure(0.5 + ROW_IN[min(len(tracks), len(ROW_IN)) - 1] * len(tracks))
    grid = figure.subplots(len(tracks), 2, sharex=True, sharey="col", squeeze=False)
    for (left, right), track in zip(grid, tracks, strict=True):
        _row(left, right, track, time.unit_ns)
    grid[0, 0].set_xlim(0, time.end_ns / time.unit_ns)
    for axes, name in zip(grid[0], ("running", "waiting"), strict=True):
        most = max(float(getattr(track, name).max()) for track in tracks)
        axes.set_ylim(0, max(1.0, 1.1 * most))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
    each = "; sequences per replica" if any(t.num_replicas > 1 for t in tracks) else ""
    figure.supxlabel(time.label + each, fontsize=8)
    figure.align_ylabels(grid)
    return figure


def _track(run: Shown, axis_ns: int) -> Track | None:
    steps = read_steps(run.point.folder, COUNTS)
    if steps is None:
        return None
    edges_ns = time_edges_ns(steps, axis_ns, NUM_BINS)
    preempted, _ = np.histogram(steps["start_ns"], edges_ns, weights=steps["num_preempted"])
    return Track(
        run,
        edges_ns,
        replica_means(steps, "num_running", edges_ns),
        replica_means(steps, "num_waiting", edges_ns),
        preempted,
        int(steps["num_preempted"].sum()),
        num_replicas(steps),
    )


def _row(left: Axes, right: Axes, track: Track, divisor: float) -> None:
    edges = track.edges_ns / divisor
    left.stairs(track.running, edges, color=RUNNING, **LINE)
    right.stairs(track.waiting, edges, color=WAITING, **LINE)
    left.set(ylabel="Running")
    right.set(ylabel="Waiting")
    left.set_title(wrapped(track.run.label, 28, 2))
    mean = track.run.point.summary["batch_size_mean"]
    if mean is not None:
        left.set_title(f"mean batch {mean:.1f}", loc="right", color=FAINT)
    if track.num_preempted:
        at = ((edges[1:] + edges[:-1]) / 2)[track.preempted > 0]
        right.plot(at, np.ones_like(at), **TICK, transform=right.get_xaxis_transform())
        plural = "s" if track.num_preempted > 1 else ""
        right.set_title(f"{track.num_preempted:,} preemption{plural}", loc="right", color=PREEMPTED)
