"""How the charts look: sizes, colours, line styles, names, and files without dates."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

WIDTH_IN = 7.0  # two columns of a paper
DPI = 200
LEGEND_LINE_IN = 0.17
INK, FAINT = "#222222", "#6E6E6E"
CHAR_IN = 0.068  # mean width of a character of 8 pt
RC = {
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same on every machine
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 3,
    "axes.labelpad": 3,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "lines.linewidth": 1.2,
    "lines.markersize": 3.8,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.4,
    "legend.handletextpad": 0.6,
    "legend.borderaxespad": 0.2,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.04,
    "svg.hashsalt": "kvsim",
    "svg.fonttype": "path",
}


class LineStyle(NamedTuple):
    color: str
    linestyle: str | tuple
    marker: str


LINE_STYLES = (  # Okabe and Ito's colours, darkened where they would be too light for a line
    LineStyle("#0072B2", "-", "o"),
    LineStyle("#D55E00", (0, (4, 1.5)), "s"),
    LineStyle("#009E73", (0, (5, 1.2, 1, 1.2)), "^"),
    LineStyle("#000000", (0, (1, 1)), "D"),
    LineStyle("#B8558F", (0, (7, 1.5, 1, 1.2, 1, 1.2)), "v"),
    LineStyle("#E69F00", "-", "X"),
    LineStyle("#56B4E9", (0, (4, 1.5)), "P"),
    LineStyle("#777777", (0, (5, 1.2, 1, 1.2)), "*"),
)


def line_style(place: int) -> LineStyle:
    return LINE_STYLES[place % len(LINE_STYLES)]


@contextmanager
def styled() -> Iterator[None]:
    """The style, and nothing of the user's own, while the block runs."""
    session = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")
    default = {k: v for k, v in matplotlib.rcParamsDefault.items() if k not in session}
    with matplotlib.rc_context({**default, **RC}), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # a letter that the font lacks is drawn as a box
        yield


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as PNG and SVG, without date or version."""
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def wrapped(name: str, width: int, lines: int) -> str:
    """A name in at most `lines` lines of `width` characters; what is too long loses its middle."""
    kept, rows = len(name), textwrap.wrap(name, width)
    while len(rows) > lines:
        kept -= 1
        tail = kept // 2
        rows = textwrap.wrap(f"{name[: kept - tail]}\u2026{name[-tail:]}", width)
    return "\n".join(rows)


def legend_above(figure: Figure, handles: list, labels: list[str]) -> None:
    """A legend over all panels, in as many columns as the width allows; the figure grows by it."""
    labels = [wrapped(label, 48, 2) for label in labels]
    widths = [max(map(len, label.split("\n"))) * CHAR_IN + 0.5 for label in labels]
    columns = len(labels)
    while columns > 1 and _legend_in(widths, columns) > figure.get_figwidth():
        columns -= 1
    rows = -(-len(labels) // columns)
    columns = -(-len(labels) // rows)  # even rows
    lines = 1 + max(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE_IN * rows * lines)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def _legend_in(widths: list[float], columns: int) -> float:
    rows = -(-len(widths) // columns)  # legends fill column by column
    return sum(max(widths[at : at + rows]) for at in range(0, len(widths), rows))


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Plain numbers on a logarithmic axis: at decades; at 2 and 5 too up to two decades; evenly
    spaced up to a factor of 5."""
    if high / low > 5:
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    else:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
