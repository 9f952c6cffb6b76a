"""ShareGPT chats: a JSON array or JSON Lines of `{"id", "conversations": [{"from", "value"}]}`.

Also read: `items` for `conversations`, `role`/`content` for `from`/`value`, turns that are JSON
in strings. By default a record is one request, its first two turns (see chats.add_first_exchange);
with sessions: closed it is a chat of closed-loop turns. Records with nothing to simulate are part
of the data (empty or one-turn chats), so they are counted by reason and are no error. The files
have no arrival times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvsim.workload.traces.chats import Turn, add_first_exchange, add_session
from kvsim.workload.traces.chunk import Chunk, Rows
from kvsim.workload.traces.json_array import Element, array_elements
from kvsim.workload.traces.json_rows import decoded, json_records
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.source import Source
from kvsim.workload.traces.text_tokens import Count, token_count

ROWS_A_CHUNK = 4096


def read_sharegpt(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    count = token_count(options.tokenizer, ledger)
    is_closed = options.sessions == "closed"
    ledger.note(
        "chats are closed-loop sessions: a turn follows the answer before it at once"
        if is_closed
        else "a chat is one request: its first two turns, whatever their roles"
    )
    rows = Rows(source.name)
    for number, (line, record) in enumerate(_records(source, ledger)):
        try:
            turns = _turns(record, None if is_closed else 2, count)
            name = str(record.get("id", number)) if isinstance(record, dict) else str(number)
            if not is_closed:
                add_first_exchange(rows, line, turns, name)
            elif not (added := add_session(rows, line, turns, number, name)):
                raise BadRow("conversations", None, "no question with an answer")
            else:
                ledger.read += added - 1  # a record counts as one row a request
        except BadRow as fault:
            ledger.drop(fault.reason)
        if len(rows) >= ROWS_A_CHUNK:
            yield rows.take()
    yield rows.take()


def _records(source: Source, ledger: Ledger) -> Iterator[Element]:
    if source.head.lstrip("\ufeff \t\r\n").startswith("["):
        for element in array_elements(source, ledger):
            ledger.read += 1
            yield element
        return
    for records in json_records(source, ledger):
        for line, row in zip(records.lines.tolist(), records.objects or [], strict=True):
            yield Element(line, row)


def _turns(record: object, limit: int | None, count: Count) -> Sequence[Turn]:
    """The first `limit` turns; BadRow says why a record is no chat."""
    if not isinstance(record, dict):
        raise BadRow("record", None, "not a JSON object")
    key = "conversations" if "conversations" in record else "items"
    turns = record.get(key)
    if key not in record:
        raise BadRow("conversations", None, "is missing")
    if not isinstance(turns, list):
        raise BadRow(key, None, "is not a list of turns")
    if len(turns) < 2:
        raise BadRow(key, None, "fewer than two turns")
    return [_turn(turn, count) for turn in turns[:limit]]


def _turn(turn: object, count: Count) -> Turn:
    if isinstance(turn, str):
        turn = decoded(turn)
    if not isinstance(turn, dict):
        raise BadRow("turn", None, "is not an object")
    text = turn.get("value", turn.get("content"))
    if not isinstance(text, str):
        raise BadRow("turn", None, "has no text")
    return Turn(str(turn.get("from", turn.get("role"))), count(text))
