"""kvsim's own trace format, read: CSV or Parquet with one request a row.

Columns by name: `arrival_s` (seconds, up to nine decimals) or `arrival_ns`, `prompt_tokens`,
`output_tokens`; optional `request_id`, `num_samples`, `session` (-1 or blank: none), `after` (the
row number, from 0, of the request whose end this one waits for; -1 or blank: none), `think_s` or
`think_ns`, `max_tokens` (the client's limit of the answer; -1 or blank: none), `priority` (lower
goes first; blank: 0), and `spans`: the prompt as `stream:start:length` joined by `;`, where a
number is shared text and `aj` is the answer of row j (`a12:0:40`). Blank `spans`: text that nobody
shares. Parquet holds the same columns, with times in `_ns` as int64. Written by native_write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.csv_rows import csv_header, csv_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.native_spans import add_spans
from kvsim.workload.traces.numbers import MAX_NS, Field, time_field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import Records, checked
from kvsim.workload.traces.source import Source

LENGTHS = ("prompt_tokens", "output_tokens")
TIMES = {"arrival": ("arrival_s", "arrival_ns"), "think": ("think_s", "think_ns")}
WHOLE_COLUMNS = {"num_samples": 1, "after": -1, "session": -1, "max_tokens": -1, "priority": 0}
WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


def read_native(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    if source.is_parquet:
        header, blocks = _parquet(source, ledger)
    else:
        header = csv_header(source.head)
        blocks = csv_records(source, LENGTHS, ledger)
    fields = _fields(source, header)
    names = [field.name.removesuffix("_s").removesuffix("_ns") for field in fields]
    num_rows = 0
    for records in blocks:
        columns = dict(zip(names, checked(records, fields, ledger), strict=True))
        chunk = Chunk(
            source.name,
            records.lines,
            columns["arrival"],
            columns["prompt_tokens"],
            columns["output_tokens"],
            num_samples=columns.get("num_samples"),
            after=columns.get("after"),
            think_ns=columns.get("think"),
            session=columns.get("session"),
            max_tokens=columns.get("max_tokens"),
            priority=columns.get("priority"),
        )
        if "request_id" in header:
            chunk.ids = [str(name) for name in records.columns["request_id"]]
        if "spans" in header:
            add_spans(chunk, [str(text) for text in records.columns["spans"]], num_rows)
        _check_after(chunk, num_rows, ledger)
        num_rows += len(chunk)
        yield chunk


def _fields(source: Source, header: list[str]) -> list[Field]:
    """The number columns that the file has; raises TraceError without an arrival."""
    arrival, think = (_time_column(source, header, kind) for kind in TIMES)
    if arrival is None:
        raise TraceError(f"{source.name}:1: the header has no column arrival_s")
    fields = [arrival, *(tokens_field(name) for name in LENGTHS)]
    for name, blank in WHOLE_COLUMNS.items():
        if name in header:
            fields.append(_whole_field(name, blank))
    return fields if think is None else [*fields, think]


def _time_column(source: Source, header: list[str], kind: str) -> Field | None:
    found = [name for name in TIMES[kind] if name in header]
    if len(found) == 2:
        raise TraceError(f"{source.name}:1: the header has both {' and '.join(found)}")
    if not found:
        return None
    field = time_field(found[0], "ns" if found[0].endswith("_ns") else "s")
    if kind == "arrival":
        return field

    def parse(value: object) -> int:
        ns = 0 if value == "" else field.parse(value)
        if ns < 0:
            raise BadRow(field.name, value, "is below 0")
        return ns

    def bulk(values: Sequence[object]) -> np.ndarray | None:
        ns = field.bulk(values)
        return ns if ns is None or not len(ns) or ns.min() >= 0 else None

    return Field(field.name, parse, bulk)


def _whole_field(name: str, blank: int) -> Field:
    """A whole number from `blank` on, which a cell left blank means."""

    def parse(value: object) -> int:
        if type(value) is int and blank <= value <= MAX_NS:
            return value
        text = str(value).strip()
        if text == "":
            return blank
        if not WHOLE.fullmatch(text) or int(text) < blank:
            raise BadRow(name, value, f"is not a whole number >= {blank}")
        return int(text)

    def bulk(values: Sequence[object]) -> np.ndarray | None:
        try:
            table = {value: parse(value) for value in set(values)}  # few differ, as a rule
        except BadRow:
            return None
        return np.array([table[value] for value in values], np.int64)

    return Field(name, parse, bulk)


def _check_after(chunk: Chunk, first_row: int, ledger: Ledger) -> None:
    if chunk.after is None:
        return
    wrong = np.flatnonzero(chunk.after >= np.arange(first_row, first_row + len(chunk)))
    if len(wrong):
        where = f"{chunk.name}:{int(chunk.lines[wrong[0]])}"
        raise TraceError(f"{where}: after: {int(chunk.after[wrong[0]])} is not an earlier row")
    if ledger.dropped and (chunk.after >= 0).any():
        raise TraceError(f"{chunk.name}: after: counts rows, so none can be skipped before it")


def _parquet(source: Source, ledger: Ledger) -> tuple[list[str], Iterator[Records]]:
    import pyarrow as pa  # here: most runs read no Parquet, and the import takes 0.1 s
    import pyarrow.parquet as pq

    damage = (pa.ArrowException, OSError, ValueError)  # ValueError: text that is no UTF-8
    try:
        file = pq.ParquetFile(source.path)
        header = list(file.schema_arrow.names)
    except damage as error:
        raise TraceError(f"{source.name}: not Parquet: {' '.join(str(error).split())}") from None
    absent = [name for name in LENGTHS if name not in header]
    if absent or len(set(header)) < len(header):
        fault = f"no column {', '.join(absent)}" if absent else "a column twice"
        raise TraceError(f"{source.name}: {fault}")

    def batches() -> Iterator[Records]:
        row = 1
        try:
            for batch in file.iter_batches(1 << 16):
                lines = np.arange(row, row + batch.num_rows, dtype=np.int64)
                row += batch.num_rows
                ledger.read += batch.num_rows
                columns = {name: _values(batch.column(name)) for name in header}
                yield Records(source.name, lines, columns)
        except damage as error:
            raise TraceError(
                f"{source.name}: damaged Parquet: {' '.join(str(error).split())}"
            ) from None

    return header, batches()


def _values(column: Any) -> Sequence[Any]:
    """Whole numbers as they are, anything else as the text that a CSV would hold."""
    if column.type == "int64" and not column.null_count:
        # not to_numpy: that would import pandas first, for 0.2 s
        numbers = np.frombuffer(column.buffers()[1], np.int64)
        return numbers[column.offset : column.offset + len(column)]
    values = column.to_pylist()
    if set(map(type, values)) == {int}:
        return values
    return ["" if value is None else str(value) for value in values]
