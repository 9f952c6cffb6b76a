"""Per-step columns as exact time-weighted means over bins, so that long runs stay drawable."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from kvsim.study.definitions import SLOT_KINDS
from kvsim.study.results import IDLE, STEPS
from kvsim.study.tables import Table

SPANS = ("replica", "start_ns", "end_ns")
NS_PER_S = 1e9
LONGEST_SHOWN = 1.5
NEVER_USED = "never_used"


class TimeAxis(NamedTuple):
    end_ns: int
    label: str
    unit_ns: float


def read_columns(path: Path, names: tuple[str, ...]) -> Table | None:
    """Columns of a parquet file; None where it is absent or has no rows."""
    if not path.is_file():
        return None
    table = pq.read_table(path, columns=list(names))
    if not table.num_rows:
        return None
    return {name: table[name].to_numpy() for name in names}


def read_steps(folder: Path, names: tuple[str, ...]) -> Table | None:
    return read_columns(folder / STEPS, (*SPANS, *names))


def time_axis(folders: list[Path], note: str) -> TimeAxis | None:
    """The axis that runs share: it ends with the longest, but runs that drain their queue for long
    are cut at LONGEST_SHOWN times the shortest. None where no run has made a step."""
    tables = (read_columns(folder / STEPS, ("end_ns",)) for folder in folders)
    ends = [int(table["end_ns"].max()) for table in tables if table is not None]
    if not ends:
        return None
    end_ns = round(min(max(ends), LONGEST_SHOWN * min(ends)))
    span_s = end_ns / NS_PER_S
    name, seconds = ("s", 1) if span_s <= 1800 else ("min", 60) if span_s <= 14400 else ("h", 3600)
    cut = "longer runs are cut" if end_ns < max(ends) else ""
    label = "; ".join(filter(None, (", ".join(filter(None, (f"Time ({name})", note))), cut)))
    return TimeAxis(end_ns, label, seconds * NS_PER_S)


def time_edges_ns(spans: Table, axis_ns: int, num_bins: int) -> np.ndarray:
    """Equal bins from 0 to the end of the last span or of the axis; float64 [num_bins + 1]."""
    return np.linspace(0, float(min(spans["end_ns"].max(), axis_ns)), num_bins + 1)


def binned_mean(
    start_ns: np.ndarray, end_ns: np.ndarray, values: np.ndarray, edges_ns: np.ndarray
) -> np.ndarray:
    """Time-weighted mean in each bin of a value that is 0 outside the spans [start, end).

    Spans are sorted and do not overlap; they are cut where a bin begins or ends.
    """
    weighted = values * (end_ns - start_ns).astype(float)
    before = np.concatenate([[0.0], np.cumsum(weighted)])
    span = np.searchsorted(start_ns, edges_ns, side="right") - 1
    inside = np.maximum(span, 0)
    covered = np.clip(edges_ns - start_ns[inside], 0, (end_ns - start_ns)[inside])
    integral = np.where(span < 0, 0.0, before[inside] + values[inside] * covered)
    return np.diff(integral) / np.diff(edges_ns)


def replica_means(steps: Table, name: str, edges_ns: np.ndarray) -> np.ndarray:
    """binned_mean of a column, averaged over the replicas; 0 while a replica has no step."""
    first = np.flatnonzero(np.diff(steps["replica"], prepend=-1))
    last = np.append(first[1:], len(steps["replica"]))
    total = np.zeros(len(edges_ns) - 1)
    for low, high in zip(first, last, strict=True):
        start, end, values = (steps[key][low:high] for key in ("start_ns", "end_ns", name))
        total += binned_mean(start, end, values, edges_ns)
    return total / num_replicas(steps)


def num_replicas(steps: Table) -> int:
    return int(steps["replica"].max()) + 1


def read_memory(folder: Path) -> Table | None:
    """The slots by kind, and those never used, in every step and, between them, while a replica has
    no work."""
    slots = tuple(f"{kind}_slots" for kind in (*SLOT_KINDS, NEVER_USED))
    parts = [read_columns(folder / name, (*SPANS, *slots)) for name in (STEPS, IDLE)]
    there = [part for part in parts if part is not None]
    if not there:
        return None
    joined = {name: np.concatenate([part[name] for part in there]) for name in there[0]}
    order = np.lexsort((joined["start_ns"], joined["replica"]))
    return {name: column[order] for name, column in joined.items()}


def memory_shares(memory: Table, edges_ns: np.ndarray) -> dict[str, np.ndarray]:
    """Shares of the pool by kind in each bin, which add up to 1 up to the end of the run, and the
    share never used until then."""
    pool = float(sum(int(memory[f"{kind}_slots"][0]) for kind in SLOT_KINDS))
    kinds = (*SLOT_KINDS, NEVER_USED)
    return {kind: replica_means(memory, f"{kind}_slots", edges_ns) / pool for kind in kinds}


def bins_of(num_panels: int) -> int:
    """Bins in each panel, so that a chart of many panels stays a small file."""
    return min(max(2400 // num_panels, 120), 600)
