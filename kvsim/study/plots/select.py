"""Which runs of a results folder a chart shows, and what it calls them."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.study.results import Point

RATE = "rate_per_s"  # how the key of a request rate ends
MOST_SWEPT = 8  # points of a sweep without variants that are shown side by side


class Shown(NamedTuple):
    """A run and its name in a chart ("" for the only one)."""

    label: str
    point: Point


class Selection(NamedTuple):
    """The runs shown together; `note` says which of a sweep they are ("" if that is plain), and
    follows the label of an axis."""

    runs: list[Shown]
    note: str


def select(points: list[Point]) -> Selection:
    """Every variant at the most loaded point of a sweep: the highest request rate, or else the
    last point swept. A sweep without variants shows its points instead, at most MOST_SWEPT."""
    variants = list(dict.fromkeys(point.variant for point in points))
    if not points:
        return Selection([], "")
    if len(variants) == 1 and len(points) > 1:
        return _swept(points)
    heaviest = max(enumerate(points), key=lambda item: (_rate(item[1]), item[0]))[1].at
    runs = [Shown(point.variant, point) for point in points if point.at == heaviest]
    if len(runs) == len(points):
        return Selection(runs, "")
    which = "highest" if any(map(is_rate, heaviest)) else "last"
    return Selection(runs, f"at {setting(heaviest)} ({which} swept)")


def setting(at: dict[str, object]) -> str:
    """Swept values in words: `2 req/s, max_num_seqs 64`."""
    return ", ".join(
        f"{_plain(value)} req/s" if is_rate(key) else f"{key.rpartition('.')[2]} {_plain(value)}"
        for key, value in at.items()
    )


def is_rate(key: str) -> bool:
    return key.rpartition(".")[2] == RATE


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _swept(points: list[Point]) -> Selection:
    last = len(points) - 1
    count = min(len(points), MOST_SWEPT)
    places = [round(place * last / (count - 1)) for place in range(count)]
    runs = [Shown(setting(points[place].at), points[place]) for place in places]
    note = f"{count} of {len(points)} swept points" if count < len(points) else ""
    return Selection(runs, ", ".join(filter(None, (points[0].variant, note))))


def _rate(point: Point) -> float:
    rates = (value for key, value in point.at.items() if is_rate(key) and is_number(value))
    return max(rates, default=0.0)  # type: ignore[type-var]


def _plain(value: object) -> str:
    return f"{value:g}" if is_number(value) else str(value)
