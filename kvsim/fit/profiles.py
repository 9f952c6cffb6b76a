"""Steps put together from a profile of operators: a layer's linear parts, attention, the head."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvsim.errors import UserError
from kvsim.latency.demand import Load

PROFILE_FILES = ("dense.csv", "attention.csv", "per_sequence.csv")
ONCE = ("embedding", "final_layernorm")  # a step, not a layer
TWICE = ("layernorm",)  # before attention and before the MLP
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def profile_steps(folder: Path, num_layers: int) -> Iterator[tuple[Load, float, str]]:
    """(load, seconds, phase) of the step around each row of attention.csv: num_layers times its
    attention and the linear parts at as many tokens, and what a step has once. Microseconds between
    the profile's sizes lie on straight lines. UserError names file and line."""
    dense = _curves(folder / "dense.csv", "tokens")
    ends = _curves(folder / "per_sequence.csv", "sequences")
    times = {name: num_layers * (2 if name in TWICE else 1) for name in dense} | dict.fromkeys(
        ONCE, 1
    )
    largest = max(sizes[-1] for sizes, _ in dense.values())
    for line, row in _rows(folder / "attention.csv", (*ATTENTION, "time_us")):
        chunk, cached, decodes, context = (row[name] for name in ATTENTION)
        tokens, chunks = chunk + decodes, min(chunk, 1)
        if not tokens or not row["time_us"] > 0:
            raise UserError(f"{folder / 'attention.csv'}, line {line}: no tokens, or no time")
        if tokens > largest:
            continue
        total = num_layers * row["time_us"]
        total += sum(times[name] * np.interp(tokens, *curve) for name, curve in dense.items())
        total += sum(np.interp(decodes + chunks, *curve) for curve in ends.values())
        load = Load(tokens, decodes, decodes * context, chunks, chunk * (cached + chunk / 2))
        yield load, total * 1e-6, "decode" if not chunk else "mixed" if decodes else "prefill"


def _curves(path: Path, size: str) -> dict[str, tuple[list[float], list[float]]]:
    """Sizes, rising, and microseconds of each layer."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for _, row in _rows(path, ("layer", size, "time_us")):
        found[row["layer"]][row[size]] = row["time_us"]
    if not found:
        raise UserError(f"{path}: no rows")
    ordered = {name: sorted(curve.items()) for name, curve in found.items()}
    return {
        name: ([at for at, _ in pairs], [us for _, us in pairs]) for name, pairs in ordered.items()
    }


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if missing := set(columns) - set(reader.fieldnames or ()):
            raise UserError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
        for line, row in enumerate(reader, 2):
            try:
                yield line, {c: row[c] if c == "layer" else float(row[c]) for c in columns}
            except (TypeError, ValueError) as error:
                raise UserError(f"{path}, line {line}: {error}") from None
