"""The rows of all chunks on one clock: where it starts, and whether it ever goes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import NO_TIME, Chunk
from kvsim.workload.traces.ledger import Ledger, counted
from kvsim.workload.traces.options import ReadOptions

SECOND = 10**9


@dataclass(slots=True)
class Timeline:
    """What has been seen of the arrivals so far, on the source's own clock.

    Order is judged over rows that arrive by themselves; `first`, `earliest` and `latest` are over
    all rows that have a time.
    """

    first: int | None = None
    earliest: int | None = None
    latest: int | None = None
    last: int | None = None
    num_open: int = 0
    num_backward: int = 0
    num_equal: int = 0
    largest_step_back: int = 0
    back_at: str = ""
    negative_at: str = ""
    num_negative: int = 0

    def see(self, chunk: Chunk) -> None:
        """Takes in a chunk's arrivals."""
        timed = chunk.arrival_ns != NO_TIME
        times = chunk.arrival_ns[timed]
        if not len(times):
            return
        if self.first is None:
            self.first = self.earliest = self.latest = int(times[0])
        assert self.earliest is not None and self.latest is not None
        self.earliest = min(self.earliest, int(times.min()))
        self.latest = max(self.latest, int(times.max()))
        is_open = timed if chunk.after is None else timed & (chunk.after < 0)
        self._see_open(chunk, np.flatnonzero(is_open))

    def _see_open(self, chunk: Chunk, rows: np.ndarray) -> None:
        times = chunk.arrival_ns[rows]
        if not len(times):
            return
        before = np.concatenate([[times[0] if self.last is None else self.last], times[:-1]])
        back = np.flatnonzero(times < before)
        if len(back):
            steps = [int(before[i]) - int(times[i]) for i in back]
            largest = max(range(len(steps)), key=steps.__getitem__)
            if steps[largest] > self.largest_step_back:
                self.largest_step_back = steps[largest]
                self.back_at = f"{chunk.name}:{int(chunk.lines[rows[back[largest]]])}"
        self.num_backward += len(back)
        self.num_equal += int((times == before).sum()) - (self.last is None)
        self.num_open += len(times)
        self.last = int(times[-1])
        negative = np.flatnonzero(times < 0)
        if len(negative) and not self.num_negative:
            row = rows[negative[0]]
            self.negative_at = f"{chunk.name}:{int(chunk.lines[row])}"
        self.num_negative += len(negative)

    def check(self, options: ReadOptions, is_absolute: bool) -> None:
        """Raises TraceError for what no option allows."""
        if self.num_negative and not is_absolute and not options.rebase:
            raise TraceError(
                f"{self.negative_at}: {counted(self.num_negative, 'arrival')} before zero "
                f"(first here; earliest {seconds(self.earliest or 0)} s): rebase: true moves the "
                "clock so that the first arrival is 0"
            )
        if self.num_backward and not options.sort:
            raise TraceError(
                f"{self.back_at}: time goes back: {counted(self.num_backward, 'inversion')}, "
                f"largest backward step {seconds(self.largest_step_back)} s (here): sort: true "
                "orders by arrival, which lays recordings over each other if the file holds several"
            )

    def remarks(self, ledger: Ledger, format_name: str, unit_was_given: bool) -> None:
        """Notes what looks odd about the clock: a wrong unit, a coarse one."""
        if self.first is None or self.earliest is None or self.latest is None:
            return
        span = self.latest - self.earliest
        fractions = ledger.facts.pop("fractional_stamps", 0)
        if fractions and not unit_was_given and self.num_open > 50 * max(span, 1) / SECOND:
            rate = self.num_open * SECOND / max(span, 1)
            ledger.note(
                f"the whole trace spans {seconds(span)} s ({rate:.0f} requests/s) and has "
                "fractions of a millisecond: if its stamps are seconds, give time_unit: s (format "
                f"{format_name} means milliseconds)"
            )
        instants = self.num_open - self.num_equal
        if self.num_open >= 16 and instants * 3 <= self.num_open and not self.num_backward:
            ledger.note(
                f"arrivals come at {instants} instants only, {self.num_open / instants:.1f} "
                "requests each: the source's clock is quantised, and a replay shows bursts that "
                "the service may not have seen"
            )


def dropped_to(chunks: Iterator[Chunk], limit: int | None) -> Iterator[Chunk]:
    """The chunks up to `limit` rows; reads no further than that."""
    left = limit
    for chunk in chunks:
        if left is not None and len(chunk) >= left:
            if left:
                yield chunk.head(left)
            return
        if left is not None:
            left -= len(chunk)
        yield chunk


def seconds(ns: int) -> str:
    """Nanoseconds as seconds, exactly, without trailing zeros."""
    sign = "-" if ns < 0 else ""
    whole, fraction = divmod(abs(ns), SECOND)
    return f"{sign}{whole}.{fraction:09d}".rstrip("0").rstrip(".")
