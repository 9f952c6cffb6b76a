"""RAGPulse traces: JSON Lines of retrieval-augmented prompts, with content ids by component.

`timestamp` is seconds, as text. The ids name contents (system prompt, passages, history, ...)
whose lengths are in side files that are not part of the trace, so how many tokens two prompts
share cannot be told from it: prompts are read as private text. Dividing a prompt evenly over its
ids would give one passage a different length in every prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.json_rows import json_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import time_field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import Records, checked
from kvsim.workload.traces.source import Source


def read_ragpulse(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    fields = [
        time_field("timestamp", options.time_unit or "s"),
        tokens_field("input_length"),
        tokens_field("output_length"),
    ]
    sessions: dict[str, int] = {}
    ledger.note(
        "content ids name text of unknown length (it is in RAGPulse's side files): no prompt "
        "shares text with another"
    )
    for records in json_records(source, ledger):
        _refuse_odd_sessions(records, ledger)
        columns = checked(records, fields, ledger)
        assert records.objects is not None
        names = [row.get("session_id") for row in records.objects]
        session = np.array(
            [
                -1 if name is None else sessions.setdefault(str(name), len(sessions))
                for name in names
            ],
            np.int64,
        )
        yield Chunk(source.name, records.lines, *columns, session=session)


def _refuse_odd_sessions(records: Records, ledger: Ledger) -> None:
    assert records.objects is not None
    good = []
    for i, row in enumerate(records.objects):
        if isinstance(row.get("session_id"), str | int | None):
            good.append(i)
        else:
            fault = BadRow("session_id", None, "is not a name")
            ledger.bad(records.name, int(records.lines[i]), fault)
    if len(good) < len(records.lines):
        records.keep(good)
