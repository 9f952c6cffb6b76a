"""How the kinds of KV slots look: dark to light as well as by colour, two of them hatched."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.patches import Patch

LEAST_SHOWN = 0.0005  # share of a pool below which a kind has no legend entry


class KindStyle(NamedTuple):
    label: str
    color: str
    hatch: str
    hatch_color: str
    text_color: str


KIND_STYLES = {
    "token": KindStyle("Token states", "#0B4F8A", "", "none", "white"),
    "reserved": KindStyle("Reservation", "#8CC4EA", "", "none", "black"),
    "internal": KindStyle("Internal frag.", "#E0722A", "////", "#6E2A00", "black"),
    "external": KindStyle("External frag. & others", "#F5C75B", "\\\\\\\\", "#7A5A00", "black"),
    "cached": KindStyle("Cached", "#3FA38A", "", "none", "black"),
    "free": KindStyle("Free", "#EDEDED", "", "none", "black"),
}


def kind_handles(kinds: list[str]) -> tuple[list[Patch], list[str]]:
    """Legend handles and labels of kinds, in the order of the stack."""
    styles = [KIND_STYLES[kind] for kind in kinds]
    patches = [
        Patch(facecolor=s.color, hatch=s.hatch, edgecolor=s.hatch_color, linewidth=0)
        for s in styles
    ]
    return patches, [style.label for style in styles]
