"""BurstGPT traces v1 to v3: CSV read by column name, since v3 inserts two columns.

`Timestamp` is seconds from midnight of day 1, to one second, so the clock is set to the first
arrival. `Response tokens` 0 marks a failed request. v3 has `Session ID` on conversation rows and
`Elapsed time`, the seconds to the end of the answer; with both, sessions can be closed loops.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.csv_rows import csv_header, csv_records
from kvsim.workload.traces.ledger import BadRow, Ledger, counted
from kvsim.workload.traces.numbers import bulk_tokens, time_field, tokens, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import Records, checked
from kvsim.workload.traces.source import Source

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    unit = options.time_unit or "s"
    header = csv_header(source.head)
    is_closed = options.sessions == "closed"
    fields = [
        time_field("Timestamp", unit),
        tokens_field("Request tokens"),
        tokens_field("Response tokens"),
    ]
    if is_closed:
        if not {"Session ID", "Elapsed time"} <= set(header):
            raise TraceError(
                f"{source.name}:1: sessions: closed needs Session ID and Elapsed time, which "
                "BurstGPT has from v3 on"
            )
        fields.append(time_field("Elapsed time", unit))
    sessions = Sessions()
    wrong_totals = 0
    for records in csv_records(source, COLUMNS, ledger):
        arrival_ns, prompts, outputs, *elapsed = checked(records, fields, ledger)
        chunk = Chunk(source.name, records.lines, arrival_ns, prompts, outputs)
        if "Total tokens" in header:
            wrong_totals += _wrong_totals(records, prompts + outputs)
        if "Session ID" in header:
            chunk.session = sessions.numbers(records.columns["Session ID"])
        if is_closed:
            sessions.chain(chunk, elapsed[0])
        yield chunk
        sessions.num_rows += len(chunk)
    if wrong_totals:
        ledger.note(
            "Total tokens, which is not used, differs from Request tokens + Response tokens in "
            f"{counted(wrong_totals, 'row')}"
        )


def _wrong_totals(records: Records, totals: np.ndarray) -> int:
    stated = records.columns["Total tokens"]
    numbers = bulk_tokens(stated)
    if numbers is not None:
        return int((numbers != totals).sum())
    return sum(map(_differs, stated, totals.tolist()))


def _differs(stated: str, total: int) -> bool:
    try:
        return tokens(stated, "Total tokens") != total
    except BadRow:
        return True


class Sessions:
    """Session ids as dense numbers, and the last request of each."""

    def __init__(self) -> None:
        self.by_id: dict[str, int] = {}
        self.last: dict[int, tuple[int, int]] = {}  # session -> row, end of its answer
        self.num_rows = 0

    def numbers(self, ids: list[str]) -> np.ndarray:
        if not any(ids):
            return np.full(len(ids), -1, np.int64)
        by_id = self.by_id
        return np.array(
            [by_id.setdefault(one, len(by_id)) if one.strip() else -1 for one in ids], np.int64
        )

    def chain(self, chunk: Chunk, elapsed_ns: np.ndarray) -> None:
        """Lets each turn follow its session's last one, after the pause that was measured."""
        assert chunk.session is not None
        chunk.after = np.full(len(chunk), -1, np.int64)
        chunk.think_ns = np.zeros(len(chunk), np.int64)
        for i in np.flatnonzero(chunk.session >= 0).tolist():
            session = int(chunk.session[i])
            arrival = int(chunk.arrival_ns[i])
            before = self.last.get(session)
            if before is not None:
                chunk.after[i] = before[0]
                chunk.think_ns[i] = min(max(0, arrival - before[1]), 2**62)
            self.last[session] = (self.num_rows + i, arrival + int(elapsed_ns[i]))
