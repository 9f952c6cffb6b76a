"""A finished run, or a comparison of many, as a folder: written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvsim.engine.plan import LIMITS
from kvsim.errors import UserError
from kvsim.sim.feed import Outcome
from kvsim.study.tables import Run, Table

CONFIG, SUMMARY, POINTS = "config.yaml", "summary.json", "points.json"
REQUESTS, STEPS, IDLE = "requests.parquet", "steps.parquet", "idle.parquet"
CHARTS, RUNS = "charts", "runs"
COMPARED = "compare.json"  # a run on a model beside its simulation
_OF_A_RUN = "config.yaml|summary.json|(requests|steps|idle).parquet"
OURS = re.compile(
    f"({_OF_A_RUN})|points.json|{RUNS}/[0-9]+[^/]*/({_OF_A_RUN})"
    f"|{CHARTS}/(waste|memory|batch|rate|latency|measured|step_time).(png|svg)"
    "|compare.(json|csv|md)|steps.csv|step_time.yaml"
)
"""What may stand in a results folder."""

if TYPE_CHECKING:
    import pyarrow as pa


class Point(NamedTuple):
    """One run of a results folder.

    `variant` names the policy compared ("" in a run of one), `at` the swept values by key path,
    `folder` holds its requests.parquet and steps.parquet, `summary` its figures.
    """

    variant: str
    at: dict[str, object]
    folder: Path
    summary: dict


@contextmanager
def new_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes if not.

    Raises UserError if target exists and may not be replaced, or cannot be made. Only a folder
    that holds nothing but kvsim's results is ever replaced.
    """
    try:
        place = target.resolve()
        _check_replaceable(target, place, overwrite)
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{place.name[:100]}.", dir=place.parent))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{target}: cannot be written: {reason}") from None
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        if place.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{place.name[:100]}.", dir=place.parent))
            place.rename(old / "old")
            made.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        else:
            made.rename(place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_replaceable(target: Path, place: Path, overwrite: bool) -> None:
    if place == Path.cwd() or place in Path.cwd().parents:
        raise UserError(f"{target}: is the current folder or one above it; choose another -o")
    if not place.exists():
        return
    if not place.is_dir():
        raise UserError(f"{target}: is a file; choose another -o")
    files = sorted(path for path in place.rglob("*") if path.is_symlink() or not path.is_dir())
    if files and not overwrite:
        raise UserError(f"{target}: already exists; choose another -o, or add --overwrite")
    for path in files:
        name = path.relative_to(place).as_posix()
        if path.is_symlink() or not OURS.fullmatch(name):
            raise UserError(f"{target}: holds {name!r}, not kvsim's: it is not overwritten")
    if files and not (_says_kvsim(place) or _is_comparison(place)):
        raise UserError(f"{target}: not a results folder of kvsim; it is not overwritten")


def _says_kvsim(folder: Path) -> bool:
    """Whether its summary, or the first of its points, was written by kvsim."""
    try:
        summaries = [point.summary for point in read_points(folder)]
        return bool(summaries) and isinstance(summaries[0]["kvsim"], str)  # its version
    except (UserError, LookupError, TypeError):
        return False


def _is_comparison(folder: Path) -> bool:
    """Whether it holds runs on a model beside their simulations."""
    try:
        return "kvsim" in json.loads((folder / COMPARED).read_text())["environment"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_run(folder: Path, config_text: str, run: Run, summary: dict) -> None:
    """config.yaml, summary.json and the tables of one run: requests, steps, and idle (spans in
    which a replica had no work)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config_text)
    write_json(folder / SUMMARY, summary)
    _write_parquet(folder / REQUESTS, _named(_with_latencies(run), "outcome", _OUTCOMES))
    _write_parquet(folder / STEPS, _named(run.steps, "limit", LIMITS))
    _write_parquet(folder / IDLE, run.idle)


def write_points(folder: Path, config_text: str, points: list[Point]) -> None:
    """config.yaml and points.json of a comparison or sweep; the runs lie in folders below."""
    (folder / CONFIG).write_text(config_text)
    rows = [
        {
            "variant": point.variant,
            "at": point.at,
            "folder": point.folder.relative_to(folder).as_posix(),
            "summary": point.summary,
        }
        for point in points
    ]
    write_json(folder / POINTS, rows)


def read_points(folder: Path) -> list[Point]:
    """The runs of a results folder. Raises UserError if it is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder")
    try:
        if (folder / POINTS).is_file():
            rows = json.loads((folder / POINTS).read_text())
            points = [
                Point(row["variant"], row["at"], folder / row["folder"], row["summary"])
                for row in rows
            ]
        elif (folder / SUMMARY).is_file():
            points = [Point("", {}, folder, json.loads((folder / SUMMARY).read_text()))]
        else:
            raise UserError(f"{folder}: not a results folder: neither {SUMMARY} nor {POINTS}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: its {SUMMARY} or {POINTS} is damaged: {error!r}") from None
    for point in points:
        kinds = isinstance(point.variant, str), isinstance(point.at, dict)
        if not all((*kinds, isinstance(point.summary, dict), _is_inside(point.folder, folder))):
            raise UserError(f"{folder}: its {SUMMARY} or {POINTS} is damaged")
    if not points:
        raise UserError(f"{folder}: its {POINTS} names no run")
    return points


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


_OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome)


def _with_latencies(run: Run) -> dict[str, object]:
    """The requests table with ids and, for what finished, latencies in ms."""
    table, workload = run.requests, run.log.workload
    is_finished = table["outcome"] <= Outcome.LENGTH
    arrival, finish, first = (table[f"{k}_ns"] for k in ("arrival", "finish", "first_token"))
    answer = table["answer_tokens"]

    def latency(ns: np.ndarray, there: np.ndarray, per: np.ndarray | int = 1) -> np.ndarray:
        out = np.full(len(ns), np.nan)
        np.divide(ns / 1e6, per, out=out, where=there)
        return out

    ids = workload.request_ids or [str(index) for index in range(len(workload))]
    return {
        "request_id": ids,
        **table,
        "ttft_ms": latency(first - arrival, is_finished),
        "tpot_ms": latency(finish - first, is_finished & (answer > 1), np.maximum(answer - 1, 1)),
        "e2el_ms": latency(finish - arrival, is_finished),
    }


def _named(table: Table | dict, column: str, names: tuple[str, ...]) -> dict:
    import pyarrow as pa

    codes = _array(table[column].astype(np.int8))
    return {**table, column: pa.DictionaryArray.from_arrays(codes, _texts(list(names)))}


def _write_parquet(path: Path, columns: dict) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = [
        _texts(values)
        if isinstance(values, list)
        else _array(values)
        if isinstance(values, np.ndarray)
        else values
        for values in columns.values()
    ]
    table = pa.Table.from_arrays(arrays, names=list(columns))
    # delta encoding: half the bytes and half the time of the default for rising integers
    deltas = {
        field.name: "DELTA_BINARY_PACKED"
        for field in table.schema
        if field.type in (pa.int32(), pa.int64())
    }
    pq.write_table(
        table,
        path,
        compression="lz4",
        use_dictionary=[f.name for f in table.schema if pa.types.is_dictionary(f.type)],
        column_encoding=deltas,
    )


def _array(values: np.ndarray) -> pa.Array:
    """Over the column's own memory: `pa.array` would import pandas first, for 0.2 s."""
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    buffer = pa.py_buffer(values)
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def _texts(values: list[str]) -> pa.Array:
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(values), buffers)
