"""Chart `waste`: mean shares of the KV pool by kind, one bar a run (as Kwon et al., Fig. 2)."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.study.definitions import SLOT_KINDS
from kvsim.study.plots.kinds import KIND_STYLES, LEAST_SHOWN, kind_handles
from kvsim.study.plots.select import Selection
from kvsim.study.plots.style import CHAR_IN, legend_above, new_figure, wrapped

BAR_IN = 0.32


def waste_chart(selection: Selection) -> Figure | None:
    """None where no run has made a step."""
    bars = [
        (run.label, run.point.summary["waste"])
        for run in selection.runs
        if run.point.summary["num_steps"]
    ]
    if not bars:
        return None
    kinds = [k for k in SLOT_KINDS if any(waste[k] >= LEAST_SHOWN for _, waste in bars)]
    figure = new_figure(0.55 + BAR_IN * len(bars))
    axes = figure.add_subplot()
    for row, (_, waste) in enumerate(bars):
        left = 0.0
        for kind in kinds:
            _segment(axes, row, kind, left, waste[kind] * 100)
            left += waste[kind] * 100
    axes.set_yticks(range(len(bars)), [wrapped(label, 26, 2) for label, _ in bars])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 100), ylim=(len(bars) - 0.5, -0.5))
    axes.spines["left"].set_visible(False)
    note = f", {selection.note}" if selection.note else ""
    axes.set_xlabel(f"Mean share of the KV cache (%){note}")
    legend_above(figure, *kind_handles(kinds))
    figure.draw_without_rendering()  # places the axes, whose width decides which numbers fit
    for row, (_, waste) in enumerate(bars):
        _label(axes, row, [(kind, waste[kind] * 100) for kind in kinds])
    return figure


def _segment(axes: Axes, row: int, kind: str, left: float, percent: float) -> None:
    style = KIND_STYLES[kind]
    axes.barh(
        row,
        percent,
        height=0.72,
        left=left,
        facecolor=style.color,
        hatch=style.hatch,
        edgecolor=style.hatch_color,
        linewidth=0,
    )


def _label(axes: Axes, row: int, parts: list[tuple[str, float]]) -> None:
    figure = axes.get_figure()
    percent_in = axes.get_window_extent().width / figure.dpi / 100
    left = 0.0
    for kind, percent in parts:
        text = f"{percent:.1f}"
        if percent * percent_in > len(text) * CHAR_IN + 0.06:
            style = KIND_STYLES[kind]
            box = {"facecolor": style.color, "edgecolor": "none", "pad": 1.2}
            axes.text(
                left + percent / 2,
                row,
                text,
                ha="center",
                va="center_baseline",
                color=style.text_color,
                bbox=box if style.hatch else None,
            )
        left += percent
