"""What a trace holds, as `kvsim trace inspect` prints it: counts, times, prefix sharing, faults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.formats import Format
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.timeline import SECOND, Timeline


@dataclass(slots=True)
class TraceSummary:
    """`first_timestamp` (seconds) is the source's own, 0 where that is a date or a unix time, and
    None where there are no times. `requests` = `rows_read` less `dropped`.

    The `infinite_cache_…` counts are for a cache that forgets nothing and may hit the partial last
    block of a prompt: an upper bound of what an engine that caches full blocks can reach. They are
    None where prompts share no known blocks. `facts` are counts that only this format has.
    """

    name: str
    format: str
    requests: int = 0
    rows_read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    sum_prompt: int = 0
    sum_output: int = 0
    max_prompt: int = 0
    max_output: int = 0
    max_total: int = 0
    zero_prompt: int = 0
    zero_output: int = 0
    first_timestamp: float | None = None
    span_s: float | None = None
    backward_steps: int = 0
    equal_neighbours: int = 0
    largest_backward_step_s: float = 0.0
    arrivals_before_zero: int = 0
    sessions: int = 0
    block_size: int | None = None
    block_refs: int | None = None
    distinct_blocks: int | None = None
    infinite_cache_prefix_hit_blocks: int | None = None
    infinite_cache_prefix_hit_tokens: int | None = None
    requests_with_a_hit: int | None = None
    facts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """All of it as plain data, the format's own counts beside the others."""
        plain = asdict(self)
        return {**{key: value for key, value in plain.items() if key != "facts"}, **self.facts}


def summarize(
    chunks: Iterable[Chunk], name: str, chosen: Format, options: ReadOptions, ledger: Ledger
) -> TraceSummary:
    """One pass over the chunks; raises TraceError only where there are no requests at all."""
    out = TraceSummary(name, chosen.name)
    timeline, blocks = Timeline(), _Blocks()
    highest_session = -1
    for chunk in chunks:
        timeline.see(chunk)
        _add_lengths(out, chunk)
        if chunk.session is not None:
            highest_session = max(highest_session, int(chunk.session.max()))
        if chosen.block_size is not None:  # streams are hash ids, so they are dense
            blocks.add(chunk)
    ledger.close()
    if not out.requests:
        raise TraceError("\n".join([f"{name}: no requests", *ledger.faults]))
    out.sessions = highest_session + 1
    out.rows_read, out.dropped = ledger.read, dict(sorted(ledger.dropped.items()))
    timeline.remarks(ledger, chosen.name, options.time_unit is not None)
    _set_times(out, timeline, chosen.is_absolute and chosen.name != "burstgpt")
    if blocks.num_refs:
        out.block_size = options.block_size or chosen.block_size
        blocks.report(out)
    out.facts, out.faults, out.notes = ledger.facts, ledger.faults, ledger.notes
    return out


def _add_lengths(out: TraceSummary, chunk: Chunk) -> None:
    prompts, outputs = chunk.prompt_tokens, chunk.output_tokens
    out.requests += len(chunk)
    out.sum_prompt += int(prompts.sum())
    out.sum_output += int(outputs.sum())
    out.max_prompt = max(out.max_prompt, int(prompts.max()))
    out.max_output = max(out.max_output, int(outputs.max()))
    out.max_total = max(out.max_total, int((prompts + outputs).max()))
    out.zero_prompt += int((prompts == 0).sum())
    out.zero_output += int((outputs == 0).sum())


def _set_times(out: TraceSummary, timeline: Timeline, is_date: bool) -> None:
    if timeline.first is None or timeline.earliest is None or timeline.latest is None:
        return
    out.first_timestamp = 0.0 if is_date else timeline.first / SECOND
    out.span_s = (timeline.latest - timeline.earliest) / SECOND
    out.backward_steps = timeline.num_backward
    out.equal_neighbours = timeline.num_equal
    out.largest_backward_step_s = timeline.largest_step_back / SECOND
    out.arrivals_before_zero = timeline.num_negative


class _Blocks:
    """Prefix hits in a cache that forgets nothing, by the row that first had each block."""

    def __init__(self) -> None:
        self.first_row = np.full(1024, -1, np.int64)  # by stream
        self.num_rows = 0
        self.num_refs = 0
        self.num_hits = 0
        self.hit_tokens = 0
        self.num_requests_hit = 0

    def add(self, chunk: Chunk) -> None:
        if chunk.spans is not None and chunk.span_counts is not None:
            self._add(chunk.spans, chunk.span_counts)
        self.num_rows += len(chunk)

    def _add(self, spans: np.ndarray, counts: np.ndarray) -> None:
        rows = np.repeat(np.arange(len(counts)) + self.num_rows, counts)
        is_block = spans[:, 0] >= 0
        streams = spans[is_block, 0]
        if not len(streams):
            return
        self.num_refs += len(streams)
        self._grow(int(streams.max()) + 1)
        new = np.flatnonzero(self.first_row[streams] < 0)[::-1]  # so that the first row wins
        self.first_row[streams[new]] = rows[is_block][new]
        hit = np.zeros(len(spans), bool)
        hit[is_block] = self.first_row[streams] < rows[is_block]
        misses = np.concatenate([[0], np.cumsum(~hit)])
        before = np.repeat(misses[np.cumsum(counts) - counts], counts)
        leading = misses[1:] == before
        self.num_hits += int(leading.sum())
        self.hit_tokens += int(spans[leading, 2].sum())
        self.num_requests_hit += len(np.unique(rows[leading]))

    def _grow(self, size: int) -> None:
        if size > len(self.first_row):
            spare = np.full(max(size, 2 * len(self.first_row)), -1, np.int64)
            spare[: len(self.first_row)] = self.first_row
            self.first_row = spare

    def report(self, out: TraceSummary) -> None:
        out.block_refs = self.num_refs
        out.distinct_blocks = int((self.first_row >= 0).sum())
        out.infinite_cache_prefix_hit_blocks = self.num_hits
        out.infinite_cache_prefix_hit_tokens = self.hit_tokens
        out.requests_with_a_hit = self.num_requests_hit
