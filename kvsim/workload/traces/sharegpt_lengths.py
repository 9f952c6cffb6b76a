"""Token counts of ShareGPT chats without their text: CSV of first exchanges, JSON Lines of chats.

CSV: `prompt_tokens,output_tokens,first_role`. JSON Lines:
`{"conversation": 0, "turns": [["human", 62], ["gpt", 398], ...]}`; read like ShareGPT itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.workload.traces.chats import Turn, add_first_exchange, add_session
from kvsim.workload.traces.chunk import NO_TIME, Chunk, Rows
from kvsim.workload.traces.csv_rows import csv_records
from kvsim.workload.traces.json_rows import json_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import tokens, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import checked
from kvsim.workload.traces.source import Source

COLUMNS = ("prompt_tokens", "output_tokens")


def read_sharegpt_lengths(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    if source.head.lstrip().startswith("{"):
        yield from _chats(source, options.sessions == "closed", ledger)
        return
    fields = [tokens_field(name) for name in COLUMNS]
    for records in csv_records(source, COLUMNS, ledger):
        prompts, outputs = checked(records, fields, ledger)
        no_time = np.full(len(prompts), NO_TIME, np.int64)
        yield Chunk(source.name, records.lines, no_time, prompts, outputs)


def _chats(source: Source, is_closed: bool, ledger: Ledger) -> Iterator[Chunk]:
    rows = Rows(source.name)
    facts = ledger.facts
    facts.update(conversations=0, turns=0, tokens=0)
    for records in json_records(source, ledger):
        for line, row in zip(records.lines.tolist(), records.objects or [], strict=True):
            try:
                turns = [_turn(turn) for turn in _list(row.get("turns"))]
            except BadRow as fault:
                ledger.bad(source.name, line, fault)
                continue
            session = facts["conversations"]
            name = str(row.get("conversation", session))
            facts["conversations"] += 1
            facts["turns"] += len(turns)
            facts["tokens"] += sum(turn.num_tokens for turn in turns)
            added = 0
            if is_closed:
                added = add_session(rows, line, turns, session, name)
            elif len(turns) >= 2:
                add_first_exchange(rows, line, turns, name)
                added = 1
            if added:
                ledger.read += added - 1
            else:
                ledger.drop("a chat without a question and its answer")
        yield rows.take()


def _list(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    raise BadRow("turns", None, "is not a list of turns")


def _turn(value: object) -> Turn:
    if not isinstance(value, list) or len(value) != 2:
        raise BadRow("turns", None, "has a turn that is not [role, tokens]")
    return Turn(str(value[0]), tokens(value[1], "turns"))
