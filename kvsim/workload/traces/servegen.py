"""ServeGen (Xiang et al. 2025): clients as distributions, from which a workload is sampled.

A client is a pair of files. `chunk-N-trace.csv`, without a header: `t,rate,cv,pattern,shape,scale`
for windows of 600 s, the pattern (Gamma or Weibull) being that of the gaps. `chunk-N-dataset.json`:
for windows of hours, the distributions of lengths as Python dicts in strings, which are parsed
as literals and never evaluated. Not ServeGen's own sampler: that draws all lengths of a request
from one random number, so that prompt and answer are perfectly correlated; here they are
independent. Windows keep their rate; a gap that crosses a window's edge goes on at the next rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gamma
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.ledger import BadRow, Ledger, counted
from kvsim.workload.traces.numbers import DIGITS_BELOW, exact, nanoseconds
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.servegen_pdfs import Lengths, read_lengths
from kvsim.workload.traces.source import Source, line_blocks, open_source

WINDOW_S = 600.0
SECOND = 10**9
WINDOW_NS = int(WINDOW_S) * SECOND
MAX_A_WINDOW = 10**7  # requests: more is a damaged rate
MIN_SHAPE, MAX_SHAPE = 1e-3, 1e6


class Window(NamedTuple):
    """A stretch of one client's trace; gaps have mean 1 / rate and this pattern and shape."""

    start_ns: int
    rate_per_s: float
    pattern: str
    shape: float


class Client(NamedTuple):
    """One client's windows by time and the lengths it draws from."""

    number: int
    windows: list[Window]
    lengths: list[Lengths]


def read_servegen(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    clients = [_client(pair, ledger) for pair in _pairs(source.path)]
    ledger.note(
        f"sampled from {counted(len(clients), 'ServeGen client')} with seed {options.seed}; prompt "
        "and answer lengths are independent"
    )
    samplers = [_Sampler(client, options.seed, ledger) for client in clients]
    end_ns = None if options.duration_s is None else round(options.duration_s * SECOND)
    ledger.close()  # bad windows are an error before anything is sampled
    ledger.dropped.clear()
    ledger.read = 0  # windows until here, requests from here on
    starts = sorted({window.start_ns for client in clients for window in client.windows})
    for start_ns in starts:
        if end_ns is not None and start_ns >= end_ns:
            return
        parts = [part for one in samplers if (part := one.window(start_ns)) is not None]
        if not parts:
            continue
        table = np.concatenate(parts, axis=1)
        table = table[:, np.argsort(table[0], kind="stable")]
        if end_ns is not None:
            table = table[:, table[0] < end_ns]
        ledger.read += table.shape[1]
        lines = np.full(table.shape[1], 1 + start_ns // WINDOW_NS)
        yield Chunk(source.name, lines, *table)


class _Sampler:
    """Draws one client's requests window by window, from a stream of chance of its own."""

    def __init__(self, client: Client, seed: int, ledger: Ledger) -> None:
        self.rng = np.random.default_rng([abs(seed), client.number])
        self.windows = {window.start_ns: window for window in client.windows}
        self.lengths = client.lengths
        self.ledger = ledger
        self.carry: float | None = None  # to the next arrival, in mean gaps

    def window(self, start_ns: int) -> np.ndarray | None:
        """int64 [3, n]: arrivals in order, prompt tokens, output tokens."""
        window = self.windows.get(start_ns)
        if window is None or window.rate_per_s <= 0:
            return None
        length = window.rate_per_s * WINDOW_S
        if self.carry is None:
            self.carry = float(self.rng.random() * self._gaps(window, 1)[0])
        places = [self.carry]
        if self.carry < length:
            places = self._places(window, length)
        self.carry = float(places[-1]) - length
        inside = np.asarray(places[:-1])
        if not len(inside):
            return None
        lengths = next((one for one in reversed(self.lengths) if one.start_ns <= start_ns), None)
        if lengths is None or not len(lengths.inputs):
            self.ledger.read += len(inside)
            for _ in inside:
                self.ledger.drop("arrivals in windows without a distribution of lengths")
            return None
        offset_ns = np.floor(inside / window.rate_per_s * SECOND).astype(np.int64)
        arrival_ns = start_ns + np.minimum(offset_ns, WINDOW_NS - 1)  # floats may round up to it
        prompts = sum(self._draw(one.values, one.chances, len(inside)) for one in lengths.inputs)
        outputs = self._draw(*lengths.outputs, len(inside))
        return np.stack([arrival_ns, np.asarray(prompts), outputs])

    def _places(self, window: Window, length: float) -> np.ndarray:
        """Arrivals in mean gaps from the window's start; the last one is behind its end."""
        assert self.carry is not None
        places = np.array([self.carry])
        while places[-1] <= length:
            count = int(length - places[-1]) + 16
            more = places[-1] + np.cumsum(self._gaps(window, count))
            places = np.concatenate([places, more])
            if len(places) > 4 * MAX_A_WINDOW:
                raise TraceError(f"window {window.start_ns // SECOND}: gaps of no length")
        return places[: int(np.searchsorted(places, length, side="right")) + 1]

    def _gaps(self, window: Window, count: int) -> np.ndarray:
        if window.pattern == "Gamma":
            return self.rng.gamma(window.shape, 1 / window.shape, count)
        return self.rng.weibull(window.shape, count) / gamma(1 + 1 / window.shape)

    def _draw(self, values: np.ndarray, chances: np.ndarray, count: int) -> np.ndarray:
        places = np.searchsorted(np.cumsum(chances), self.rng.random(count), side="right")
        return values[np.minimum(places, len(values) - 1)]


def _pairs(path: Path) -> list[tuple[Path | None, Path]]:
    """(trace file, data set file) of every client that `path` names."""
    if path.is_dir():
        traces = sorted(path.glob("*-trace.csv"), key=_number)
        if not traces:
            raise TraceError(f"{path.name}: no chunk-N-trace.csv in this folder")
        return [(trace, _sibling(trace)) for trace in traces]
    if path.name.endswith("-trace.csv"):
        return [(path, _sibling(path))]
    trace = path.with_name(path.name.removesuffix("-dataset.json") + "-trace.csv")
    return [(trace if trace.is_file() else None, path)]


def _sibling(trace: Path) -> Path:
    return trace.with_name(trace.name.removesuffix("-trace.csv") + "-dataset.json")


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(char for char in path.name if char.isdigit() and char.isascii())
    return int(digits[:9] or 0), path.name


def _client(pair: tuple[Path | None, Path], ledger: Ledger) -> Client:
    trace, dataset = pair
    lengths = read_lengths(open_source(dataset), ledger)
    if trace is None:
        if ledger.num_bad and not ledger.skip_bad_rows:
            ledger.close()
        raise TraceError(f"{dataset.name}: no chunk-N-trace.csv with the arrivals beside it")
    return Client(_number(trace)[0], _windows(open_source(trace), ledger), lengths)


def _windows(source: Source, ledger: Ledger) -> list[Window]:
    windows: list[Window] = []
    for block in line_blocks(source):
        for line, text in enumerate(block.lines, block.first):
            if not text.strip():
                continue
            ledger.read += 1
            try:
                window = _window(text.split(","))
                if windows and window.start_ns <= windows[-1].start_ns:
                    raise BadRow("t", text.split(",")[0], "is not after the window before it")
                windows.append(window)
            except BadRow as fault:
                ledger.bad(source.name, line, fault)
    return windows


def _window(cells: list[str]) -> Window:
    if len(cells) != 6:
        raise BadRow("window", len(cells), "cells where t,rate,cv,pattern,shape,scale belong")
    start_ns = nanoseconds(cells[0], DIGITS_BELOW["s"], "t")
    rate = float(exact(cells[1], "rate", "is not a number"))
    shape = float(exact(cells[4], "shape", "is not a number"))
    pattern = cells[3].strip()
    if start_ns < 0 or start_ns % WINDOW_NS:
        raise BadRow("t", cells[0], f"is not a multiple of {WINDOW_S:.0f} s")
    if not 0 <= rate * WINDOW_S <= MAX_A_WINDOW:
        raise BadRow("rate", cells[1], f"is not a rate from 0 to {MAX_A_WINDOW / WINDOW_S:.0f}")
    if rate and pattern not in ("Gamma", "Weibull"):
        raise BadRow("pattern", pattern, "is not one of Gamma, Weibull")
    lowest = MIN_SHAPE if pattern != "Weibull" else 0.05  # below, the mean overflows
    if rate and not lowest <= shape <= MAX_SHAPE:
        raise BadRow("shape", cells[4], f"is not from {lowest} to {MAX_SHAPE:.0f}")
    return Window(start_ns, rate, pattern, shape)
