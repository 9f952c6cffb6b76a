"""LLMServingSim's JSON Lines: single requests and agentic sessions, mixed line by line.

`{"input_toks", "output_toks", "arrival_time_ns"}`, or `{"session_id", "arrival_time_ns",
"sub_requests": [{"input_toks", "output_toks", "tool_duration_ns"}]}`: a sub-request arrives when
the answer before it has ended and its tool has run. Two lines with one session id are two
sessions. Token ids, where a line has them, are not read: the lengths are input_toks.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsim.workload.traces.chunk import NO_TIME, Chunk, Rows
from kvsim.workload.traces.json_rows import json_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import (
    DIGITS_BELOW,
    MISSING,
    nanoseconds,
    time_field,
    tokens,
    tokens_field,
)
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import Records, checked
from kvsim.workload.traces.source import Source


def read_llmservingsim(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    places = DIGITS_BELOW[options.time_unit or "ns"]
    fields = [
        time_field("arrival_time_ns", options.time_unit or "ns"),
        tokens_field("input_toks"),
        tokens_field("output_toks"),
    ]
    rows = Rows(source.name)
    sessions = _Sessions()
    for records in json_records(source, ledger):
        assert records.objects is not None
        if not any("sub_requests" in row for row in records.objects):
            columns = checked(records, fields, ledger)
            rows.index += len(columns[0])
            yield Chunk(source.name, records.lines, *columns)
            continue
        _mixed(records, places, rows, sessions, ledger)
        yield rows.take()
    if sessions.num_repeats:
        ledger.note(f"repeated session ids: {sessions.num_repeats} (each line is a session)")
    if sessions.num_sessions:
        ledger.note("sub-requests arrive after the answer before them and their tool (closed loop)")


class _Sessions:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num_sessions = 0
        self.num_repeats = 0

    def open(self, name: object) -> int:
        if name is not MISSING:
            self.num_repeats += str(name) in self.names
            self.names.add(str(name))
        self.num_sessions += 1
        return self.num_sessions - 1


def _mixed(records: Records, places: int, rows: Rows, sessions: _Sessions, ledger: Ledger) -> None:
    for line, row in zip(records.lines.tolist(), records.objects or [], strict=True):
        try:
            arrival_ns = nanoseconds(row.get("arrival_time_ns", MISSING), places, "arrival_time_ns")
            if "sub_requests" in row:
                chain = _chain(row["sub_requests"], places)
            else:
                rows.add(line, arrival_ns, *_lengths(row))
                continue
        except BadRow as fault:
            ledger.bad(records.name, line, fault)
            continue
        if not chain:
            ledger.drop("a session without sub-requests")
            continue
        session, after, think_ns = sessions.open(row.get("session_id", MISSING)), -1, 0
        ledger.read += len(chain) - 1  # a line counts as one row a sub-request
        for prompt_tokens, output_tokens, tool_ns in chain:
            after = rows.add(
                line,
                arrival_ns if after < 0 else NO_TIME,
                prompt_tokens,
                output_tokens,
                after=after,
                think_ns=think_ns,
                session=session,
            )
            think_ns = tool_ns


def _chain(value: object, places: int) -> list[tuple[int, int, int]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise BadRow("sub_requests", None, "is not a list of requests")
    chain = []
    for one in value:
        tool_ns = nanoseconds(one.get("tool_duration_ns", 0), places, "tool_duration_ns")
        if tool_ns < 0:
            raise BadRow("tool_duration_ns", tool_ns, "is below 0")
        chain.append((*_lengths(one), tool_ns))
    return chain


def _lengths(row: dict[str, object]) -> tuple[int, int]:
    return (
        tokens(row.get("input_toks", MISSING), "input_toks"),
        tokens(row.get("output_toks", MISSING), "output_toks"),
    )
