"""All chunks of a trace made into one Workload: clock, order, ids and streams settled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import NO_TIME, PRIVATE, Chunk
from kvsim.workload.traces.ledger import Ledger, counted
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.reorder import in_order
from kvsim.workload.traces.timeline import Timeline, seconds
from kvsim.workload.workload import Workload

PLAIN = {  # neutral values, in the order of Workload's columns
    "num_samples": 1,
    "after": -1,
    "think_ns": 0,
    "session": -1,
    "max_tokens": -1,
    "priority": 0,
}


class Origin(NamedTuple):
    """Where a trace comes from; stamps of an absolute clock count from the first arrival."""

    name: str
    format_name: str
    is_absolute: bool


def assemble(
    chunks: Iterable[Chunk], origin: Origin, options: ReadOptions, ledger: Ledger
) -> Workload:
    """The whole trace in memory; raises TraceError where it breaks a rule that no option lifts."""
    parts: list[Chunk] = []
    timeline, names = Timeline(), Names()
    for chunk in chunks:
        timeline.see(chunk)
        chunk.ids = names.unique(chunk.ids)
        chunk.lines = np.zeros(0, np.int64)  # only errors need them: they would be a column more
        parts.append(chunk)
    ledger.close()
    if not sum(map(len, parts)):
        raise TraceError(no_requests(origin, ledger))
    timeline.check(options, origin.is_absolute)
    arrival_ns = np.concatenate([part.arrival_ns for part in parts])
    shift = first_arrival(timeline, origin, options, ledger)
    arrival_ns = on_clock(arrival_ns, shift)
    note_rows(parts, timeline, ledger)
    timeline.remarks(ledger, origin.format_name, options.time_unit is not None)
    names.report(ledger)
    spans, offsets = _spans(parts)
    workload = Workload(
        arrival_ns,
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        *(_column(parts, name) for name in PLAIN),
        request_ids=_ids(parts),
        spans=spans,
        span_offsets=offsets,
        notes=ledger.notes,
    )
    if options.sort and timeline.num_backward:
        workload = in_order(workload)
        workload.notes.append(
            f"sorted by arrival: {counted(timeline.num_backward, 'backward step')}, the largest of "
            f"{seconds(timeline.largest_step_back)} s"
        )
    return workload


class Names:
    """Request ids seen so far; a repeated one gets a number behind it. Ids that are the row's own
    number, from the first row on, are no ids: rows are numbered anyway."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.num_numbered = 0  # leading rows whose id is their number
        self.num_repeats = 0

    def unique(self, ids: list[str] | None) -> list[str] | None:
        if ids is None:
            return None
        if not self.seen:
            first, last = self.num_numbered, self.num_numbered + len(ids)
            if ids == list(map(str, range(first, last))):
                self.num_numbered = last
                return None
            self.seen.update(map(str, range(first)))
        return [self._one(name) for name in ids]

    def _one(self, name: str) -> str:
        name = name.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be saved
        if name in self.seen:
            self.num_repeats += 1
            number = 2
            while f"{name}#{number}" in self.seen:
                number += 1
            name = f"{name}#{number}"
        self.seen.add(name)
        return name

    def report(self, ledger: Ledger) -> None:
        if self.num_repeats:
            ledger.note(f"{counted(self.num_repeats, 'repeated id')} made unique (a, a#2, ...)")


def no_requests(origin: Origin, ledger: Ledger) -> str:
    """The error of a trace without a request to simulate."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(ledger.dropped.items()))
    return f"{origin.name}: no requests" + (f": all rows dropped: {reasons}" if reasons else "")


def first_arrival(timeline: Timeline, origin: Origin, options: ReadOptions, ledger: Ledger) -> int:
    """What to take from every stamp, in nanoseconds; says so."""
    if timeline.earliest is None:
        ledger.note(
            "the source has no arrival times: every request arrives at 0 "
            "unless the run sets arrivals"
        )
        return 0
    if origin.is_absolute or options.rebase:
        if timeline.earliest:
            ledger.note("the first arrival is time 0")
        return timeline.earliest
    return 0


def on_clock(arrival_ns: np.ndarray, shift: int) -> np.ndarray:
    """Arrivals from the shifted zero; a row without a time of its own gets 0."""
    timed = arrival_ns != NO_TIME
    if timed.any() and int(arrival_ns[timed].max()) - shift > np.iinfo(np.int64).max:
        raise TraceError("the arrivals span more than the clock holds (int64 nanoseconds)")
    out = np.zeros(len(arrival_ns), np.int64)
    out[timed] = arrival_ns[timed] - shift
    return out


def note_rows(parts: Iterable[Chunk], timeline: Timeline, ledger: Ledger) -> None:
    zero_prompt = sum(int((part.prompt_tokens == 0).sum()) for part in parts)
    zero_output = sum(int((part.output_tokens == 0).sum()) for part in parts)
    if zero_prompt or zero_output:
        ledger.note(
            f"kept {counted(zero_prompt, 'request')} without prompt tokens and {zero_output} "
            "without output tokens: a run leaves them out"
        )


def _column(parts: list[Chunk], name: str) -> np.ndarray:
    columns = (getattr(part, name) for part in parts)
    return np.concatenate(
        [
            np.full(len(part), PLAIN[name], np.int64) if column is None else column
            for part, column in zip(parts, columns, strict=True)
        ]
    )


def _ids(parts: list[Chunk]) -> list[str] | None:
    if all(part.ids is None for part in parts):
        return None
    rows: Iterator[str] = (name for part in parts for name in part.ids or [""] * len(part))
    ids = [name or str(i) for i, name in enumerate(rows)]
    return None if all(name == str(i) for i, name in enumerate(ids)) else ids


def _spans(parts: list[Chunk]) -> tuple[np.ndarray | None, np.ndarray | None]:
    if all(part.spans is None for part in parts):
        return None, None
    counts = np.concatenate(
        [np.zeros(len(p), np.int64) if p.span_counts is None else p.span_counts for p in parts]
    )
    spans = np.concatenate([p.spans for p in parts if p.spans is not None])
    prompts = np.concatenate([part.prompt_tokens for part in parts])
    spans, counts = with_own_text(spans, counts, prompts, 0)
    highest = int(spans[:, 0].max(initial=-1))
    own = spans[:, 0] <= PRIVATE
    spans[own, 0] = highest + 1 + (PRIVATE - spans[own, 0])
    return spans, np.concatenate([[0], np.cumsum(counts)])


def with_own_text(
    spans: np.ndarray, counts: np.ndarray, prompts: np.ndarray, first_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """The spans where a prompt without any is one span of text that nobody shares."""
    bare = np.flatnonzero((counts == 0) & (prompts > 0))
    if not len(bare):
        return spans, counts
    places = (np.cumsum(counts) - counts)[bare]
    own = np.stack([PRIVATE - (bare + first_row), np.zeros_like(bare), prompts[bare]], axis=1)
    counts = counts.copy()
    counts[bare] = 1
    return np.insert(spans, places, own, axis=0), counts
