"""Azure LLM inference traces (2023, 2024, 2025 multimodal): CSV with dates for arrivals.

`TIMESTAMP,ContextTokens,GeneratedTokens`, as published in Azure/AzurePublicDataset (Patel et al.,
Splitwise, ISCA 2024). Stamps have up to seven fraction digits; 2024 adds `+00:00` and drops a zero
fraction. A stamp without an offset is read as UTC. `NumImages` is not modelled.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence

import numpy as np

from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.csv_rows import csv_header, csv_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import MAX_NS, Field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import checked
from kvsim.workload.traces.source import Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
STAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))? ?(Z|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
EPOCH = datetime.date(1970, 1, 1).toordinal()
SECOND = 10**9


def read_azure(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    fields = [
        Field("TIMESTAMP", stamp_ns, bulk_stamps),
        tokens_field("ContextTokens"),
        tokens_field("GeneratedTokens"),
    ]
    ledger.note("time stamps without an offset are read as UTC")
    if "NumImages" in csv_header(source.head):
        ledger.note("NumImages is not modelled: prompts hold their text tokens only")
    for records in csv_records(source, COLUMNS, ledger):
        columns = checked(records, fields, ledger)
        yield Chunk(source.name, records.lines, *columns)


def stamp_ns(value: object) -> int:
    """Nanoseconds since 1970 UTC of an ISO 8601 date and time."""
    match = STAMP.fullmatch(str(value).strip()) if isinstance(value, str) else None
    rule = "is not a date and time like 2023-11-16 18:15:46.6805900"
    if match is None:
        raise BadRow("TIMESTAMP", value or None, rule if value else "is blank")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    try:
        days = datetime.date(year, month, day).toordinal() - EPOCH
    except ValueError:
        raise BadRow("TIMESTAMP", value, rule) from None
    if hour > 23 or minute > 59 or second > 59:
        raise BadRow("TIMESTAMP", value, rule)
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    if match[9]:
        offset = (int(match[10]) * 60 + int(match[11])) * 60
        seconds += -offset if match[9] == "+" else offset
    ns = seconds * SECOND + int((match[7] or "").ljust(9, "0"))
    if abs(ns) > MAX_NS:
        raise BadRow("TIMESTAMP", value, "is outside the clock (int64 nanoseconds)")
    return ns


def bulk_stamps(values: Sequence[object]) -> np.ndarray | None:
    """Stamps of one common width at once; None where a stamp differs from the first in form."""
    width = len(values[0]) if values else 0  # type: ignore[arg-type]
    joined = "".join(values)  # type: ignore[arg-type]
    if width < 19 or not joined.isascii() or set(map(len, values)) != {width}:  # type: ignore[arg-type]
        return None
    text = np.frombuffer(joined.encode(), np.uint8).reshape(-1, width)
    if joined[width - 6 : width] == "+00:00" and width >= 25:
        if (text[:, -6:] != text[0, -6:]).any():
            return None
        text = text[:, :-6]
    marks = [4, 7, 10, 13, 16] + ([19] if text.shape[1] > 19 else [])
    form = text[0, marks].tobytes().decode()
    if form[:5] not in ("-- ::", "--T::") or form[5:] not in ("", ".") or text.shape[1] > 29:
        return None
    digits = np.delete(text, marks, axis=1)
    if (text[:, marks] != text[0, marks]).any() or digits.min() < 48 or digits.max() > 57:
        return None
    if text.shape[1] == 20:  # a dot with no digit behind it
        return None
    digits = digits.astype(np.int64) - 48
    clock = digits[:, 8:14] @ np.array([36000, 3600, 600, 60, 10, 1], np.int64)
    if _clock_overruns(digits):
        return None
    days = _days(joined, width, text)
    if days is None:
        return None
    places = digits.shape[1] - 14
    fraction = digits[:, 14:] @ 10 ** np.arange(8, 8 - places, -1, dtype=np.int64)
    return (days * 86400 + clock) * SECOND + fraction


def _clock_overruns(digits: np.ndarray) -> bool:
    hours = digits[:, 8] * 10 + digits[:, 9]
    return bool(hours.max() > 23 or digits[:, 10].max() > 5 or digits[:, 12].max() > 5)


def _days(joined: str, width: int, text: np.ndarray) -> np.ndarray | None:
    """Days since 1970 a row; a date is parsed only where it differs from the row before."""
    changed = np.flatnonzero((text[1:, :10] != text[:-1, :10]).any(axis=1)) + 1
    starts = np.concatenate([[0], changed])
    days = np.empty(len(starts), np.int64)
    for i, row in enumerate(starts.tolist()):
        try:
            date = datetime.date.fromisoformat(joined[row * width : row * width + 10])
        except ValueError:
            return None
        if not 1700 < date.year < 2200:
            return None
        days[i] = date.toordinal() - EPOCH
    return np.repeat(days, np.diff(np.concatenate([starts, [len(text)]])))
