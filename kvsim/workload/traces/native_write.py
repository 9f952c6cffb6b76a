"""kvsim's own trace format, written (columns: see native). Files appear whole or not at all."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.reorder import answered
from kvsim.workload.traces.timeline import seconds
from kvsim.workload.workload import Workload

OPTIONAL = {
    "num_samples": 1,
    "session": -1,
    "after": -1,
    "think_ns": 0,
    "max_tokens": -1,
    "priority": 0,
}
ROWS_A_CHUNK = 1 << 16
LINE_ENDS = {ord("\r"): " ", ord("\n"): " "}


class Table(NamedTuple):
    """Rows to write: numbers by column name (times in ns), ids and spans as texts."""

    numbers: dict[str, np.ndarray]
    ids: list[str]
    spans: list[str] | None


def write_native(workload: Workload, path: str | Path) -> None:
    """Writes a workload as CSV, or as Parquet where the name ends in .parquet.

    read_trace gives the same columns, ids and spans back; `notes` are not part of the file.
    """
    names = [
        name for name, neutral in OPTIONAL.items() if (getattr(workload, name) != neutral).any()
    ]
    write_tables(_tables(workload, names), Path(path))


def write_tables(tables: Iterable[Table], path: Path) -> int:
    """Writes tables of the same columns to a temporary file, then gives it its name.

    Returns the number of rows; raises TraceError for a name whose ending is neither format.
    """
    write = {".csv": _write_csv, ".parquet": _write_parquet}.get(path.suffix.lower())
    if write is None:
        raise TraceError(f"{path.name}: a trace is written as .csv or .parquet")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            num_rows = write(tables, part)
            os.replace(part, path)
        except OSError as error:
            raise TraceError(f"{path.name}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return num_rows


def span_texts(spans: np.ndarray, counts: np.ndarray) -> list[str]:
    """`stream:start:length;...` a row, the answer of row j being stream `aj`."""
    parts = [
        f"{stream}:{start}:{length}" if stream >= 0 else f"a{answered(stream)}:{start}:{length}"
        for stream, start, length in spans.tolist()
    ]
    ends = np.cumsum(counts).tolist()
    starts = [0, *ends[:-1]]
    return [";".join(parts[i:j]) for i, j in zip(starts, ends, strict=True)]


def _tables(workload: Workload, names: list[str]) -> Iterator[Table]:
    every = ["arrival_ns", "prompt_tokens", "output_tokens", *names]
    for i in range(0, len(workload), ROWS_A_CHUNK):
        rows = slice(i, min(i + ROWS_A_CHUNK, len(workload)))
        ids = [workload.request_id(row) for row in range(rows.start, rows.stop)]
        texts = None
        if workload.spans is not None and workload.span_offsets is not None:
            offsets = workload.span_offsets[rows.start : rows.stop + 1]
            texts = span_texts(workload.spans[offsets[0] : offsets[-1]], np.diff(offsets))
        yield Table({name: getattr(workload, name)[rows] for name in every}, ids, texts)


def _write_csv(tables: Iterable[Table], path: Path) -> int:
    num_rows = 0
    with open(path, "w", encoding="utf-8", newline="") as file:
        for table in tables:
            names = list(table.numbers)
            if num_rows == 0:
                header = ["request_id", *(name.replace("_ns", "_s") for name in names)]
                file.write(",".join(header + (["spans"] if table.spans is not None else [])) + "\n")
            columns: list[Iterable[Any]] = [_quoted(table.ids)]
            for name, column in table.numbers.items():
                as_text = seconds if name.endswith("_ns") else str
                columns.append(map(as_text, column.tolist()))
            if table.spans is not None:
                columns.append(table.spans)
            file.writelines(",".join(row) + "\n" for row in zip(*columns, strict=True))
            num_rows += len(table.ids)
    return num_rows


def _quoted(ids: list[str]) -> list[str]:
    """Ids as CSV cells; a line end cannot stand in a cell, so it becomes a space."""
    if all(name.isalnum() for name in ids):
        return ids
    cells = []
    for name in ids:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="").writerow([name.translate(LINE_ENDS), 0])
        cells.append(buffer.getvalue().removesuffix(",0"))
    return cells


def _write_parquet(tables: Iterable[Table], path: Path) -> int:
    import pyarrow as pa  # here: most runs write no Parquet, and the import takes 0.1 s
    import pyarrow.parquet as pq

    num_rows, writer = 0, None
    try:
        for table in tables:
            columns: dict[str, object] = {"request_id": table.ids, **table.numbers}
            if table.spans is not None:
                columns["spans"] = table.spans
            batch = pa.table(columns)
            if writer is None:
                writer = pq.ParquetWriter(path, batch.schema)
            writer.write_table(batch)
            num_rows += len(table.ids)
    finally:
        if writer is not None:
            writer.close()
    return num_rows
