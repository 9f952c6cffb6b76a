"""Qwen-Bailian traces: JSON Lines with hash ids of 16-token blocks and chats by parent links.

Seconds as decimals; ids = ceil(input_length / 16). A turn's prompt holds the earlier turns, and
its ids say so: history is shared through them. Turns arrive at their own stamps (open loop), since
the trace does not say when answers ended. A root's `parent_chat_id` is -1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.workload.traces.block_ids import QWEN_BLOCK, BlockIds
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.json_rows import json_records
from kvsim.workload.traces.ledger import BadRow, Ledger, counted
from kvsim.workload.traces.mooncake import block_chunk
from kvsim.workload.traces.numbers import MISSING, Field, time_field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import checked
from kvsim.workload.traces.source import Source

ID_LIMIT = 2**63


def read_qwen(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    fields = [
        time_field("timestamp", options.time_unit or "s"),
        tokens_field("input_length"),
        tokens_field("output_length"),
        _chat_field("chat_id"),
        _chat_field("parent_chat_id"),
    ]
    ids, chats = BlockIds(), Chats()
    for records in json_records(source, ledger):
        columns = checked(records, fields, ledger)
        chunk = block_chunk(
            records,
            (columns[0], columns[1], columns[2]),
            options.block_size or QWEN_BLOCK,
            ids,
            ledger,
        )
        assert records.objects is not None
        chunk.ids = [str(row["chat_id"]) for row in records.objects]
        chunk.session = np.array(
            [chats.session(row["chat_id"], row["parent_chat_id"]) for row in records.objects],
            np.int64,
        )
        yield chunk
    ids.report(ledger)
    if chats.num_orphans:
        turns = counted(chats.num_orphans, "turn")
        ledger.note(f"the file lacks the parent of {turns}: each opens a session")


class Chats:
    """Sessions by parent links: a chat without a known parent opens one."""

    def __init__(self) -> None:
        self.sessions: dict[object, int] = {}
        self.num_sessions = 0
        self.num_orphans = 0

    def session(self, chat: object, parent: object) -> int:
        found = self.sessions.get(parent)
        if found is None:
            self.num_orphans += parent != -1
            found = self.num_sessions
            self.num_sessions += 1
        self.sessions[chat] = found
        return found


def _chat_field(name: str) -> Field:
    def parse(value: object) -> int:
        if type(value) is int and -1 <= value < ID_LIMIT:
            return value
        if value is MISSING:
            raise BadRow(name, None, "is missing")
        raise BadRow(name, value, "is not a whole number >= -1")

    def bulk(values: object) -> np.ndarray | None:
        if set(map(type, values)) != {int}:  # type: ignore[call-overload]
            return None
        try:
            numbers = np.array(values, np.int64)
        except OverflowError:
            return None
        return numbers if not len(numbers) or numbers.min() >= -1 else None

    return Field(name, parse, bulk)
