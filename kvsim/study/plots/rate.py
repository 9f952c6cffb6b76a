"""Chart `rate`: throughput and normalized latency over a swept number (as Kwon et al., Fig. 12)."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvsim.study.plots.select import is_number, is_rate, setting
from kvsim.study.plots.style import FAINT, legend_above, line_style, log_ticks, new_figure
from kvsim.study.results import Point

KNEE_S = 0.5  # s/token at which the paper reads off a system's sustained rate
WIDE = 30  # ratio of swept values from which their axis is logarithmic


class Curve(NamedTuple):
    """The runs of one variant in the order of the swept number."""

    label: str
    points: list[tuple[float, dict]]


def rate_chart(points: list[Point]) -> Figure | None:
    """None unless exactly one numeric key is swept, and some request finished."""
    swept = _swept_numbers(points)
    if len(swept) != 1 or all(p.summary["normalized_latency_s"] is None for p in points):
        return None
    key = swept[0]
    curves = _curves(points, key)
    figure = new_figure(2.4)
    left, right = figure.subplots(1, 2)
    throughput = "request_throughput" if is_rate(key) else "output_throughput"
    _plot(left, curves, throughput)
    _plot(right, curves, "normalized_latency_s")
    values = [at for curve in curves for at, _ in curve.points]
    for axes in (left, right):
        _swept_axis(axes, key, values)
    left.set_ylim(0, 1.08 * left.dataLim.ymax)
    if is_rate(key):
        _offered(left, max(values))
        left.set_ylabel("Throughput (req/s)")
    else:
        left.set_ylabel("Output throughput (tokens/s)")
    right.set_ylabel("Normalized latency (s/token)")
    _latency_axis(right, curves)
    if len(curves) > 1 or curves[0].label:
        legend_above(figure, left.get_lines()[: len(curves)], [c.label for c in curves])
    return figure


def _swept_numbers(points: list[Point]) -> list[str]:
    keys = dict.fromkeys(key for point in points for key in point.at)
    return [
        key
        for key in keys
        if len({point.at.get(key) for point in points if is_number(point.at.get(key))}) > 1
    ]


def _curves(points: list[Point], key: str) -> list[Curve]:
    curves: dict[str, Curve] = {}
    for point in points:
        if not is_number(point.at.get(key)):
            continue
        others = setting({name: value for name, value in point.at.items() if name != key})
        label = ", ".join(filter(None, (point.variant, others)))
        curve = curves.setdefault(label, Curve(label, []))
        curve.points.append((float(point.at[key]), point.summary))  # type: ignore[arg-type]
    for curve in curves.values():
        curve.points.sort(key=lambda item: item[0])
    return list(curves.values())


def _plot(axes: Axes, curves: list[Curve], figure: str) -> None:
    for place, curve in enumerate(curves):
        there = [(at, s[figure]) for at, s in curve.points if s[figure] is not None]
        style = line_style(place)
        axes.plot(
            [at for at, _ in there],
            [value for _, value in there],
            color=style.color,
            linestyle=style.linestyle,
            marker=style.marker,
            markerfacecolor="white" if place % 2 else style.color,
            clip_on=False,
            zorder=3,
        )


def _swept_axis(axes: Axes, key: str, values: list[float]) -> None:
    low, high = min(values), max(values)
    if is_rate(key):
        axes.set(xlim=(0, high * 1.02), xlabel="Request rate (req/s)")
        return
    axes.set_xlabel(key.rpartition(".")[2])
    if low > 0 and high / low >= WIDE:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _offered(axes: Axes, high: float) -> None:
    """Where all that is offered is served; its name stands where no throughput can be."""
    axes.plot([0, high], [0, high], color=FAINT, linewidth=0.6, zorder=1)
    top = min(high, axes.get_ylim()[1])
    axes.annotate(
        "offered",
        (top, top),
        (-20, -1),
        textcoords="offset points",
        color=FAINT,
        ha="right",
        va="top",
    )


def _latency_axis(axes: Axes, curves: list[Curve]) -> None:
    """Logarithmic, over a factor of 5 at least; with KNEE_S where latencies come near it."""
    axes.set_yscale("log")
    latencies = [s["normalized_latency_s"] for curve in curves for _, s in curve.points]
    known = [latency for latency in latencies if latency is not None]
    low, high = min(known) / 1.3, max(known) * 1.3
    stretch = max(5 * low / high, 1) ** 0.5
    low, high = low / stretch, high * stretch
    axes.set_ylim(low, high)
    log_ticks(axes.yaxis, low, high)
    if not low < KNEE_S < high / 1.2:
        return
    axes.axhline(KNEE_S, color=FAINT, linewidth=0.6, zorder=1)
    axes.annotate(
        f"{KNEE_S:g} s/token",
        (0, KNEE_S),
        (3, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=FAINT,
        va="bottom",
    )
