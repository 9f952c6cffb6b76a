"""WEKA traces (kv-cache-tester): agent sessions as JSON, one a file, one a line, or a folder.

A session's `requests` have `t` (seconds from its start), `in`, `out` and `hash_ids` of its 64-token
blocks, floor(in / 64) of them; what is left of the prompt is private. Ids are local to a file
unless `hash_id_scope` says else. By default a request arrives `think_time` after the answer before
it (closed loop); sessions: open replays `t`. Files do not say when a session began: all begin at 0.
Nested agents (`type: subagent`) are left out and counted, or, with subagents, run beside their
parent from the pause after its last answer on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvsim.engine.request import Span
from kvsim.errors import TraceError
from kvsim.workload.traces.block_ids import WEKA_BLOCK, BlockIds
from kvsim.workload.traces.chunk import Chunk, Rows, private
from kvsim.workload.traces.json_rows import decoded, json_records
from kvsim.workload.traces.ledger import BadRow, Ledger, counted
from kvsim.workload.traces.numbers import DIGITS_BELOW, MISSING, nanoseconds, tokens
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.source import Source, open_source, text_blocks

SECONDS = DIGITS_BELOW["s"]
MAX_THINK_NS = 2**62


def read_weka(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    reader = _Reader(options, ledger)
    for file in _files(source):
        for name, session in _sessions(file, ledger):
            yield reader.session(name, session)
    reader.report()


def _files(source: Source) -> Iterator[Source]:
    if not source.path.is_dir():
        yield source
        return
    for path in sorted(source.path.iterdir()):
        if path.is_file() and path.name.removesuffix(".gz").endswith((".json", ".jsonl")):
            yield open_source(path)


def _sessions(source: Source, ledger: Ledger) -> Iterator[tuple[str, dict[str, object]]]:
    first = source.head.lstrip().split("\n", 1)
    if len(first) == 1 or first[0].rstrip().endswith("}"):  # a session a line
        many = len(first) > 1 and bool(first[1].strip())
        for records in json_records(source, ledger):
            for line, row in zip(records.lines.tolist(), records.objects or [], strict=True):
                yield (f"{source.name}:{line}" if many else source.name), row
        return
    try:
        session = decoded("".join(text_blocks(source)))
    except BadRow as fault:
        raise TraceError(f"{source.name}: {fault.rule}") from None
    if not isinstance(session, dict):
        raise TraceError(f"{source.name}: not a JSON object")
    ledger.read += 1
    yield source.name, session


class _Agent(NamedTuple):
    """Whose requests these are, and the instant their `t` counts from."""

    name: str  # of the file, as errors show it
    label: str  # of its requests
    block_size: int
    session: int
    start_ns: int


class _Turn(NamedTuple):
    """The last request of a chain: where its answer ended, as far as the file tells."""

    row: int = -1
    t_ns: int = 0
    api_ns: int = 0


class _Reader:
    def __init__(self, options: ReadOptions, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
        self.rows = Rows("")
        self.ids = BlockIds()
        self.num_sessions = 0
        self.num_left_out = 0
        ledger.facts["subagents"] = 0

    def session(self, name: str, session: dict[str, object]) -> Chunk:
        """One session's requests. A session counts as one row read a request."""
        requests = session.get("requests")
        self.ledger.read -= 1
        self.rows.name = name
        if not isinstance(requests, list):
            raise TraceError(f"{name}: requests: no such list: not a WEKA session")
        size = session.get("block_size", WEKA_BLOCK)
        if type(size) is not int or not 0 < size < 2**31:
            raise TraceError(f"{name}: block_size: not a whole number above 0")
        if session.get("hash_id_scope", "local") == "local":
            self.ids = BlockIds(self.ids.end)
        label = str(session.get("id", name))
        self._chain(_Agent(name, label, size, self._open(), 0), requests, _Turn())
        return self.rows.take()

    def report(self) -> None:
        if self.num_left_out:
            self.ledger.note(
                f"left out {counted(self.ledger.facts['subagents'], 'nested agent')} with "
                f"{counted(self.num_left_out, 'request')} (subagents: true adds them)"
            )
        if self.options.sessions != "open":
            self.ledger.note("turns arrive think_time after the answer before them (closed loop)")
        if self.num_sessions > 1:
            self.ledger.note("the files do not say when sessions began: every one begins at 0")

    def _open(self) -> int:
        self.num_sessions += 1
        return self.num_sessions - 1

    def _chain(self, agent: _Agent, requests: list[object], last: _Turn) -> None:
        for i, request in enumerate(requests):
            try:
                if not isinstance(request, dict):
                    raise BadRow("request", None, "is not an object")
                if request.get("type") == "subagent":
                    self._nested(agent, request, i, last)
                    continue
                self.ledger.read += 1
                last = self._request(agent, request, i, last)
            except BadRow as fault:
                self.ledger.bad(agent.name, f"requests[{i}]", fault)

    def _nested(self, agent: _Agent, request: dict[str, object], place: int, last: _Turn) -> None:
        """A nested agent's requests: a session of its own that starts from its parent's."""
        requests = request.get("requests")
        if not isinstance(requests, list):
            raise BadRow("requests", None, "is not a list")
        if any(isinstance(one, dict) and one.get("type") == "subagent" for one in requests):
            raise BadRow("requests", None, "has an agent within an agent")
        self.ledger.facts["subagents"] += 1
        if not self.options.subagents:
            self.num_left_out += len(requests)
            return
        start_ns = agent.start_ns + nanoseconds(request.get("t", MISSING), SECONDS, "t")
        label = f"{agent.label}/{place}"
        nested = agent._replace(label=label, session=self._open(), start_ns=start_ns)
        self._chain(nested, requests, last)

    def _request(self, agent: _Agent, request: dict[str, object], place: int, last: _Turn) -> _Turn:
        t_ns = agent.start_ns + nanoseconds(request.get("t", MISSING), SECONDS, "t")
        if abs(t_ns) > MAX_THINK_NS:
            raise BadRow("t", t_ns, "is outside the clock (int64 nanoseconds)")
        prompt_tokens = tokens(request.get("in", MISSING), "in")
        output_tokens = tokens(request.get("out", MISSING), "out")
        api_ns = _optional_ns(request, "api_time") or 0
        think_ns = _optional_ns(request, "think_time")
        is_first_of_nested = agent.start_ns > 0 and place == 0
        if think_ns is None or is_first_of_nested:
            think_ns = max(0, t_ns - last.t_ns - last.api_ns)
        is_closed = self.options.sessions != "open" and last.row >= 0
        spans = self._spans(request, prompt_tokens, agent.block_size)
        row = self.rows.add(
            place + 1,
            t_ns,
            prompt_tokens,
            output_tokens,
            after=last.row if is_closed else -1,
            think_ns=min(think_ns, MAX_THINK_NS) if is_closed else 0,
            session=agent.session,
            request_id=f"{agent.label}/{place}",
            spans=spans,
        )
        return _Turn(row, t_ns, api_ns)

    def _spans(self, request: dict[str, object], prompt_tokens: int, size: int) -> list[Span]:
        ids = request.get("hash_ids") or []
        if not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids):
            raise BadRow("hash_ids", None, "not a list of whole numbers >= 0")
        if ids and len(ids) != prompt_tokens // size:
            raise BadRow(
                "hash_ids",
                len(ids),
                f"ids where floor(in / {size}) is {prompt_tokens // size}",
                reason=f"not floor(in / {size}) ids",
            )
        if not ids:
            return []
        spans = [Span(stream, 0, size) for stream in self.ids.streams_of(ids)]
        rest = prompt_tokens - size * len(ids)
        return [*spans, Span(private(self.rows.index), 0, rest)] if rest else spans


def _optional_ns(request: dict[str, object], name: str) -> int | None:
    value = request.get(name)
    if value is None:
        return None
    ns = nanoseconds(value, SECONDS, name)
    if ns < 0:
        raise BadRow(name, value, "is below 0")
    return ns
