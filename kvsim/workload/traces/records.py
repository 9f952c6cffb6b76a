"""Rows of a CSV or JSONL file as columns of raw values, and their numbers checked."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from operator import methodcaller
from typing import Any

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.ledger import BadRow, Ledger, shown
from kvsim.workload.traces.numbers import MISSING, Field
from kvsim.workload.traces.source import Lines, Source, line_blocks

CSV_BYTES = 1 << 21


@dataclass(slots=True)
class Records:
    """Rows with line numbers: `columns` by name for CSV, `objects` for JSON Lines."""

    name: str
    lines: np.ndarray
    columns: dict[str, list[Any]]  # text cells, or numbers where a file has types
    objects: list[dict[str, object]] | None = None

    def column(self, name: str) -> Sequence[object]:
        if self.objects is None:
            return self.columns[name]
        return [row.get(name, MISSING) for row in self.objects]

    def keep(self, rows: list[int]) -> None:
        """Narrows to the rows of these positions."""
        self.lines = self.lines[rows]
        self.columns = {name: [col[i] for i in rows] for name, col in self.columns.items()}
        if self.objects is not None:
            self.objects = [self.objects[i] for i in rows]


def checked(records: Records, fields: Sequence[Field], ledger: Ledger) -> list[np.ndarray]:
    """An int64 column a field; rows with a bad value are booked and leave `records` too."""
    raw = [records.column(field.name) for field in fields]
    done = [field.bulk(column) for field, column in zip(fields, raw, strict=True)]
    if all(column is not None for column in done):
        return done  # type: ignore[return-value]
    good: list[int] = []
    rows: list[list[int]] = []
    for i, values in enumerate(zip(*raw, strict=True)):
        try:
            rows.append([field.parse(value) for field, value in zip(fields, values, strict=True)])
            good.append(i)
        except BadRow as fault:
            ledger.bad(records.name, int(records.lines[i]), fault)
    if len(good) < len(records.lines):
        records.keep(good)
    return list(np.array(rows, np.int64).reshape(-1, len(fields)).T)


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


def _no_float(text: str) -> str:
    return text  # NaN and Infinity are not JSON: a number field refuses the text


def _decimal(text: str) -> Decimal | str:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent no decimal holds
        return text


DECODER = json.JSONDecoder(parse_float=_decimal, parse_constant=_no_float)


def json_records(source: Source, ledger: Ledger) -> Iterator[Records]:
    """The objects of a JSON Lines file; blank lines count as lines, not as rows."""
    for block in line_blocks(source):
        records = json_block(source.name, block, ledger)
        if len(records.lines):
            yield records


def json_block(name: str, block: Lines, ledger: Ledger) -> Records:
    """The objects of some lines; a line that is none is booked as bad."""
    lines = block.lines
    numbers = [i for i, line in enumerate(lines) if line and not line.isspace()]
    texts = lines if len(numbers) == len(lines) else [lines[i] for i in numbers]
    try:
        objects = [DECODER.decode(text) for text in texts]
    except (ValueError, RecursionError):
        objects = None
    where = np.array(numbers, np.int64) + block.first
    if objects is None or set(map(type, objects)) - {dict}:
        where, objects = _odd_objects(name, where.tolist(), texts, ledger)
    ledger.read += len(objects)
    return Records(name, where, {}, objects)


def _odd_objects(
    name: str, numbers: list[int], texts: list[str], ledger: Ledger
) -> tuple[np.ndarray, list[dict[str, object]]]:
    kept: list[int] = []
    objects: list[dict[str, object]] = []
    for number, text in zip(numbers, texts, strict=True):
        try:
            row = decoded(text)
            if not isinstance(row, dict):
                raise BadRow("row", text[:60], "is not a JSON object")
        except BadRow as fault:
            ledger.read += 1
            ledger.bad(name, number, fault)
            continue
        kept.append(number)
        objects.append(row)
    return np.array(kept, np.int64), objects


def decoded(text: str) -> object:
    """One JSON value, its decimals exact; raises BadRow."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        rule = f"not JSON: {error.msg} (column {error.colno})"
        raise BadRow("row", None, rule, reason="not JSON") from None
    except RecursionError:
        raise BadRow("row", None, "not JSON: nested too deeply") from None
    except ValueError:
        raise BadRow("row", None, "not JSON: a number with thousands of digits") from None
