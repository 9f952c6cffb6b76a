"""aiperf's Mooncake dialect: JSON Lines with sessions, pauses and prompts given as text.

A line has exactly one of `input_length`, `text_input` or `messages`. Lines of one `session_id`
are its turns: the first has a `timestamp` (ms), a later one a `delay` (ms) after the answer before
it, or a timestamp of its own. A turn's length counts its new text; its prompt is the session so
far, answers included, and that text: `delay` turns without any shared ids are possible only so.
Hash ids cover 512 tokens of new text each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvsim.engine.request import Span, answer_stream
from kvsim.workload.traces.block_ids import BlockIds
from kvsim.workload.traces.chunk import NO_TIME, Chunk, Rows, private
from kvsim.workload.traces.json_rows import json_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import (
    DIGITS_BELOW,
    MAX_TOKENS,
    MISSING,
    nanoseconds,
    tokens,
)
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.source import Source
from kvsim.workload.traces.text_tokens import Count, token_count

LENGTHS = ("input_length", "text_input", "messages")


@dataclass(slots=True)
class _Session:
    number: int
    last: int = -1  # row of its last turn
    history: list[Span] = field(default_factory=list)


def read_aiperf(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    reader = _Reader(source, options, ledger)
    for records in json_records(source, ledger):
        for line, row in zip(records.lines.tolist(), records.objects or [], strict=True):
            try:
                reader.add(line, row)
            except BadRow as fault:
                ledger.bad(source.name, line, fault)
        yield reader.rows.take()
    if any(session.last >= 0 for session in reader.sessions.values()):
        ledger.note("a session's turns quote its earlier prompts and answers before their new text")


class _Reader:
    def __init__(self, source: Source, options: ReadOptions, ledger: Ledger) -> None:
        self.rows = Rows(source.name)
        self.ids = BlockIds()
        self.sessions: dict[str, _Session] = {}
        self.places = DIGITS_BELOW[options.time_unit or "ms"]
        self.block_size = options.block_size or 512
        self.tokenizer = options.tokenizer
        self.ledger = ledger
        self.counter: Count | None = None

    def add(self, line: int, row: dict[str, object]) -> None:
        new_tokens = self._new_tokens(row)
        output_tokens = tokens(row.get("output_length", MISSING), "output_length")
        blocks = self._blocks(row, new_tokens)
        session = self._session(row)
        arrival_ns, after, think_ns = self._arrival(row, session)
        history = session.history if session else []
        prompt_tokens = new_tokens + sum(span.length for span in history)
        if prompt_tokens > MAX_TOKENS:
            raise BadRow("input_length", prompt_tokens, "is more tokens than any prompt has")
        text = blocks if blocks else [Span(private(self.rows.index), 0, new_tokens)]
        spans = [span for span in [*history, *text] if span.length]
        if session is not None and session.number < 0:
            session.number = len(self.sessions)
            self.sessions[str(row["session_id"])] = session
        index = self.rows.add(
            line,
            arrival_ns,
            prompt_tokens,
            output_tokens,
            after=after,
            think_ns=think_ns,
            session=session.number if session else -1,
            spans=spans,
        )
        if session is not None:
            session.last = index
            session.history = [*spans, Span(answer_stream(index), 0, output_tokens)]

    def _session(self, row: dict[str, object]) -> _Session | None:
        name = row.get("session_id")
        if name is None:
            return None
        if not isinstance(name, str | int):
            raise BadRow("session_id", None, "is not a name")
        return self.sessions.get(str(name)) or _Session(-1)

    def _arrival(self, row: dict[str, object], session: _Session | None) -> tuple[int, int, int]:
        stamp, delay = row.get("timestamp"), row.get("delay")
        if delay is None or session is None or session.last < 0:
            value = MISSING if stamp is None else stamp
            return nanoseconds(value, self.places, "timestamp"), -1, 0
        think_ns = nanoseconds(delay, self.places, "delay")
        if think_ns < 0:
            raise BadRow("delay", delay, "is below 0")
        return NO_TIME, session.last, think_ns

    def _new_tokens(self, row: dict[str, object]) -> int:
        given = [name for name in LENGTHS if row.get(name) is not None]
        if len(given) != 1:
            raise BadRow(
                "input_length", len(given), f"of {', '.join(LENGTHS)} given: exactly one is needed"
            )
        if given == ["input_length"]:
            return tokens(row["input_length"], "input_length")
        if self.counter is None:
            self.counter = token_count(self.tokenizer, self.ledger)
        return min(sum(map(self.counter, _texts(given[0], row[given[0]]))), MAX_TOKENS)

    def _blocks(self, row: dict[str, object], new_tokens: int) -> list[Span]:
        ids = row.get("hash_ids") or []
        if not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids):
            raise BadRow("hash_ids", None, "not a list of whole numbers >= 0")
        expected = -(-new_tokens // self.block_size)
        if ids and len(ids) != expected:
            raise BadRow(
                "hash_ids",
                len(ids),
                f"ids where ceil(input_length / {self.block_size}) is {expected}",
                reason=f"not ceil(input_length / {self.block_size}) ids",
            )
        size = self.block_size
        return [
            Span(stream, 0, min(size, new_tokens - size * i))
            for i, stream in enumerate(self.ids.streams_of(ids))
        ]


def _texts(name: str, value: object) -> list[str]:
    if name == "text_input":
        if isinstance(value, str):
            return [value]
        raise BadRow(name, value, "is not text")
    if not isinstance(value, list):
        raise BadRow(name, None, "is not a list of messages")
    texts = []
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str):
            raise BadRow(name, None, "has a message whose content is not text")
        texts.append(content)
    return texts
