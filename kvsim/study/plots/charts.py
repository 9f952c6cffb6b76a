"""Every chart that a results folder has the data for, written beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from kvsim.errors import UserError
from kvsim.study.plots.batch import batch_chart
from kvsim.study.plots.latency import latency_chart
from kvsim.study.plots.memory import memory_chart
from kvsim.study.plots.rate import rate_chart
from kvsim.study.plots.select import Selection, select
from kvsim.study.plots.style import save, styled
from kvsim.study.plots.waste import waste_chart
from kvsim.study.results import CHARTS, Point, read_points

CHARTS_OF_RUNS: dict[str, Callable[[Selection], Figure | None]] = {
    "waste": waste_chart,
    "memory": memory_chart,
    "batch": batch_chart,
    "latency": latency_chart,
}


def draw(folder: Path) -> list[Path]:
    """Write the charts of a results folder into its `charts`; returns the files, PNG then SVG.

    A chart without data is left out: no finished request, no step, no swept key. Of a comparison
    swept over a key, the charts of single runs show its highest request rate, and say so.
    Raises UserError if the folder holds no results.
    """
    points = read_points(folder)
    try:
        with styled():
            figures = _figures(points)
            target = folder / CHARTS
            if figures:
                target.mkdir(exist_ok=True)
            return [path for name, figure in figures.items() for path in save(figure, target, name)]
    except OSError as error:
        raise UserError(f"{folder / CHARTS}: cannot be written: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{folder}: its tables or summary are damaged: {error!r}") from None


def _figures(points: list[Point]) -> dict[str, Figure]:
    selection = select(points)
    figures = {name: chart(selection) for name, chart in CHARTS_OF_RUNS.items()}
    figures["rate"] = rate_chart(points)
    return {name: figure for name, figure in figures.items() if figure is not None}
