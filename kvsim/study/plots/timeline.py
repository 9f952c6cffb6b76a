"""Per-step columns as exact time-weighted means over bins, so that long runs stay drawable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from kvsim.study.results import STEPS
from kvsim.study.tables import SLOT_KINDS, Table

SPANS = ("replica", "start_ns", "end_ns")
NS_PER_S = 1e9
LONGEST_SHOWN = 1.5


def read_columns(path: Path, names: tuple[str, ...]) -> Table | None:
    """Columns of a parquet file; None where it is absent or has no rows."""
    if not path.is_file():
        return None
    table = pq.read_table(path, columns=list(names))
    if not table.num_rows:
        return None
    return {
        name: table[name].to_numpy()
        if not str(table[name].type).startswith("dictionary")
        else np.array(table[name].to_pylist())
        for name in names
    }


def read_steps(folder: Path, names: tuple[str, ...]) -> Table | None:
    return read_columns(folder / STEPS, (*SPANS, *names))


def axis_end_ns(folders: list[Path]) -> int:
    """Where a time axis shared by runs ends: with the longest, but a run that drains its queue for
    long is cut at LONGEST_SHOWN times the shortest. 0 if none has made a step."""
    tables = (read_columns(folder / STEPS, ("end_ns",)) for folder in folders)
    ends = [int(table["end_ns"].max()) for table in tables if table is not None]
    return int(min(max(ends), LONGEST_SHOWN * min(ends))) if ends else 0


def time_edges_ns(steps: Table, axis_ns: int, num_bins: int) -> np.ndarray:
    """Equal bins from 0 to the end of the last step or of the axis; float64 [num_bins + 1]."""
    return np.linspace(0, float(min(steps["end_ns"].max(), axis_ns)), num_bins + 1)


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


def replica_means(
    steps: Table, name: str, edges_ns: np.ndarray, *, until_next: bool = False
) -> np.ndarray:
    """binned_mean of a column, averaged over the replicas; 0 while a replica has no step.

    With `until_next` a value lasts until the next step of its replica, or the last bin's end.
    """
    first = np.flatnonzero(np.diff(steps["replica"], prepend=-1))
    last = np.append(first[1:], len(steps["replica"]))
    total = np.zeros(len(edges_ns) - 1)
    for low, high in zip(first, last, strict=True):
        start, end = steps["start_ns"][low:high], steps["end_ns"][low:high]
        if until_next:
            end = np.append(start[1:], max(int(edges_ns[-1]), int(end[-1])))
        total += binned_mean(start, end, steps[name][low:high], edges_ns)
    return total / num_replicas(steps)


def num_replicas(steps: Table) -> int:
    return int(steps["replica"].max()) + 1


def memory_shares(steps: Table, edges_ns: np.ndarray) -> dict[str, np.ndarray]:
    """Shares of the pool by kind in each bin; they add up to 1.

    An idle replica has an empty pool: free, or external under the booking that calls all free
    memory of a contiguous pool so. Its cached slots stay what they were in its last step, which
    leaves out what the very last requests of a busy spell add to the cache.
    """
    pool = float(sum(int(steps[f"{kind}_slots"][0]) for kind in SLOT_KINDS))
    rest = "free" if steps["free_slots"].any() or not steps["external_slots"].any() else "external"
    shares = {
        kind: replica_means(steps, f"{kind}_slots", edges_ns, until_next=kind == "cached") / pool
        for kind in SLOT_KINDS
        if kind != rest
    }
    shares[rest] = np.clip(1 - sum(shares.values()), 0, 1)
    return {kind: shares[kind] for kind in SLOT_KINDS}


def time_axis(axis_ns: int, note: str) -> tuple[str, float]:
    """The label of a time axis, and the ns of its unit: seconds, minutes or hours."""
    units = (
        ("s", NS_PER_S, 1800),
        ("min", 60 * NS_PER_S, 4 * 3600),
        ("h", 3600 * NS_PER_S, np.inf),
    )
    name, unit_ns = next((n, ns) for n, ns, most_s in units if axis_ns <= most_s * NS_PER_S)
    return ", ".join(filter(None, (f"Time ({name})", note))), unit_ns


def bins_of(num_panels: int) -> int:
    """Bins in each panel, so that a chart of many panels stays a small file."""
    return min(max(2400 // num_panels, 120), 600)
