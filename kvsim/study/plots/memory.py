"""Chart `memory`: the KV pool over time, by kind, one panel a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvsim.study.definitions import SLOT_KINDS
from kvsim.study.plots.kinds import KIND_STYLES, LEAST_SHOWN, kind_handles
from kvsim.study.plots.select import Selection
from kvsim.study.plots.style import CHAR_IN, WIDTH_IN, legend_above, new_figure, wrapped
from kvsim.study.plots.timeline import (
    NEVER_USED,
    bins_of,
    memory_shares,
    read_memory,
    time_axis,
    time_edges_ns,
)

USED_SO_FAR = {"color": "black", "linewidth": 0.9, "linestyle": "--"}
COLUMNS_OF = {1: 1, 3: 3}  # panels in a row; of any other number 2


class Panel(NamedTuple):
    """Shares of one run's pool by kind, in bins of edges_ns."""

    label: str
    edges_ns: np.ndarray
    shares: dict[str, np.ndarray]


def memory_chart(selection: Selection) -> Figure | None:
    """None where no run has made a step."""
    time = time_axis([run.point.folder for run in selection.runs], selection.note)
    if time is None:
        return None
    panels = _panels(selection, time.end_ns)
    kinds = [k for k in SLOT_KINDS if any(p.shares[k].mean() >= LEAST_SHOWN for p in panels)]
    has_fresh = any(panel.shares[NEVER_USED].mean() >= LEAST_SHOWN for panel in panels)
    columns = COLUMNS_OF.get(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = new_figure(0.5 + (1.75, 1.5, 1.2, 1.1)[min(rows, 4) - 1] * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        edges = panel.edges_ns / time.unit_ns
        _stack(axes, edges, [(k, panel.shares[k] * 100) for k in kinds])
        if has_fresh:
            axes.stairs(100 - panel.shares[NEVER_USED] * 100, edges, baseline=None, **USED_SO_FAR)
        axes.set_title(wrapped(panel.label, int(WIDTH_IN / columns / CHAR_IN * 0.85), 2))
    for place, axes in enumerate(grid):
        axes.set_visible(place < len(panels))
        axes.tick_params(labelbottom=place + columns >= len(panels))
    grid[0].set(xlim=(0, time.end_ns / time.unit_ns), ylim=(0, 100), yticks=(0, 50, 100))
    figure.supxlabel(time.label, fontsize=8)
    figure.supylabel("Share of the KV cache (%)", fontsize=8)
    handles, labels = kind_handles(kinds)
    if has_fresh:
        handles, labels = [*handles, Line2D([], [], **USED_SO_FAR)], [*labels, "Used so far"]
    legend_above(figure, handles, labels)
    return figure


def _panels(selection: Selection, axis_ns: int) -> list[Panel]:
    panels = []
    for run in selection.runs:
        memory = read_memory(run.point.folder)
        if memory is not None:
            edges_ns = time_edges_ns(memory, axis_ns, bins_of(len(selection.runs)))
            panels.append(Panel(run.label, edges_ns, memory_shares(memory, edges_ns)))
    return panels


def _stack(axes: Axes, edges: np.ndarray, parts: list[tuple[str, np.ndarray]]) -> None:
    """Areas from the top of the stack down, each from 0: half the points of bands."""
    at = np.concatenate([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    tops = np.cumsum([share for _, share in parts], axis=0)
    for (kind, _), top in reversed(list(zip(parts, tops, strict=True))):
        style = KIND_STYLES[kind]
        axes.fill_between(
            at,
            np.concatenate([top[:1], top, top[-1:]]),
            facecolor=style.color,
            hatch=style.hatch,
            edgecolor=style.hatch_color,
            linewidth=0,
        )
