"""Rows of a CSV file, by the names in its header."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from operator import methodcaller

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.ledger import BadRow, Ledger, shown
from kvsim.workload.traces.records import Records
from kvsim.workload.traces.source import Lines, Source, line_blocks

CSV_BYTES = 1 << 21


def csv_records(source: Source, required: Sequence[str], ledger: Ledger) -> Iterator[Records]:
    """A CSV file's rows, some megabytes at a time; `required` must be among its header's names."""
    header: list[str] | None = None
    for block in line_blocks(source, CSV_BYTES):
        if header is None:
            block, header = _after_header(source.name, block, required)
            if header is None:
                continue
        records = _plain_rows(source.name, block, header) or _odd_rows(
            source.name, block, header, ledger
        )
        ledger.read += len(records.lines)
        if len(records.lines):
            yield records


def csv_header(head: str) -> list[str]:
    """The column names in the first line that is not blank."""
    line = next((line for line in head.splitlines() if line.strip()), "")
    return [cell.strip() for cell in _cells(line) or []]


def _after_header(
    name: str, block: Lines, required: Sequence[str]
) -> tuple[Lines, list[str] | None]:
    for i, line in enumerate(block.lines):
        if not line.strip():
            continue
        header = [cell.strip() for cell in _cells(line) or []]
        _check_header(name, block.first + i, line, header, required)
        return Lines(block.first + i + 1, block.lines[i + 1 :]), header
    return block, None


def _check_header(
    name: str, number: int, line: str, header: list[str], required: Sequence[str]
) -> None:
    where = f"{name}:{number}"
    absent = [column for column in required if column not in header]
    if absent and line.count(";") >= len(required) - 1 > 0:
        raise TraceError(f"{where}: expected comma-separated values, this has semicolons")
    if absent and len(absent) == len(required):
        raise TraceError(
            f"{where}: no header: expected {','.join(required)}, got {shown(line.strip())}"
        )
    if absent:
        raise TraceError(f"{where}: the header has no column {', '.join(absent)}")
    if len(set(header)) < len(header):
        raise TraceError(f"{where}: the header names a column twice")


def _plain_rows(name: str, block: Lines, header: list[str]) -> Records | None:
    """The quick way, for rows without quotes that all have the header's number of cells."""
    lines, first, width = block.lines, block.first, len(header)
    commas = set(map(methodcaller("count", ","), lines))
    if commas != {width - 1} or width == 1:
        return None
    flat = ",".join(lines).split(",")
    columns = {column: flat[i::width] for i, column in enumerate(header)}
    if header[0] in columns[header[0]] or any('"' in line for line in lines):
        return None
    return Records(name, np.arange(first, first + len(lines), dtype=np.int64), columns)


def _odd_rows(name: str, block: Lines, header: list[str], ledger: Ledger) -> Records:
    numbers: list[int] = []
    rows: list[list[str]] = []
    for number, line in enumerate(block.lines, block.first):
        if not line.strip():
            continue
        cells = _cells(line)
        if cells is not None and len(cells) == len(header):
            if [cell.strip() for cell in cells] != header:
                numbers.append(number)
                rows.append(cells)
                continue
            fault = BadRow("header", None, "appears again (are these files joined?)")
        elif cells is None:
            fault = BadRow("row", None, "a quote that does not end on its line")
        else:
            fault = BadRow("row", len(cells), f"cells where the header has {len(header)}")
        ledger.read += 1
        ledger.bad(name, number, fault)
    columns = {column: [row[i] for row in rows] for i, column in enumerate(header)}
    return Records(name, np.array(numbers, np.int64), columns)


def _cells(line: str) -> list[str] | None:
    if '"' not in line:
        return line.split(",")
    try:
        rows = list(csv.reader([line], strict=True))
    except csv.Error:
        return None
    return rows[0] if len(rows) == 1 else None
