"""A trace file as a workload, as a summary, or as a file in kvsim's own format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.assemble import (
    PLAIN,
    Names,
    Origin,
    assemble,
    first_arrival,
    no_requests,
    on_clock,
    with_own_text,
)
from kvsim.workload.traces.chunk import PRIVATE, Chunk
from kvsim.workload.traces.detect import detected
from kvsim.workload.traces.formats import FORMATS, Format, check_options, opened
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.native_write import Table, span_texts, write_native, write_tables
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.summary import TraceSummary, summarize
from kvsim.workload.traces.timeline import Timeline, dropped_to
from kvsim.workload.workload import Workload

STRICT = ReadOptions()
OWN_TEXT = 10**17  # converted private streams start here: above any dense stream


def read_trace(
    path: str | Path, format: str = "auto", *, options: ReadOptions = STRICT
) -> Workload:
    """The requests of a trace; `format` is one of FORMATS, or auto to tell it from the content.

    Raises TraceError, a line a fault: file, line, field, what came and what is allowed. What was
    counted, estimated, dropped or assumed is in the workload's `notes`.
    """
    chosen = _chosen(path, format, options)
    ledger = Ledger(options.skip_bad_rows)
    chunks = _chunks(path, chosen, options, ledger)
    origin = Origin(Path(path).name, chosen.name, chosen.is_absolute)
    return assemble(chunks, origin, options, ledger)


def inspect_trace(
    path: str | Path, format: str = "auto", *, options: ReadOptions = STRICT
) -> TraceSummary:
    """What a trace holds, in one pass and little memory.

    Bad rows, backward steps and arrivals before zero are reported, not raised; TraceError is for
    files that cannot be read at all.
    """
    chosen = _chosen(path, format, options)
    ledger = Ledger(skip_bad_rows=True)
    chunks = _chunks(path, chosen, options, ledger)
    return summarize(chunks, Path(path).name, chosen, options, ledger)


def convert_trace(
    path: str | Path,
    out_path: str | Path,
    format: str = "auto",
    *,
    options: ReadOptions = STRICT,
) -> list[str]:
    """Writes a trace in kvsim's own format, .csv or .parquet, and returns the notes.

    Works chunk by chunk, except with sort and rebase, which need all rows at once. Text that one
    request alone has keeps to itself, but may get other stream numbers than read_trace gives it.
    """
    if options.sort or options.rebase:
        workload = read_trace(path, format, options=options)
        write_native(workload, out_path)
        return workload.notes
    chosen = _chosen(path, format, options)
    ledger = Ledger(options.skip_bad_rows)
    chunks = _chunks(path, chosen, options, ledger)
    origin = Origin(Path(path).name, chosen.name, chosen.is_absolute)
    write_tables(_tables(chunks, origin, options, ledger), Path(out_path))
    return ledger.notes


def _chosen(path: str | Path, format: str, options: ReadOptions) -> Format:
    name = detected(Path(path)) if format == "auto" else format
    if name not in FORMATS:
        raise TraceError(f"format: {name!r} is not one of auto, {', '.join(FORMATS)}")
    check_options(FORMATS[name], options)
    return FORMATS[name]


def _chunks(
    path: str | Path, chosen: Format, options: ReadOptions, ledger: Ledger
) -> Iterator[Chunk]:
    chunks = chosen.read(opened(Path(path), chosen), options, ledger)
    return dropped_to((chunk for chunk in chunks if len(chunk)), options.limit)


def _tables(
    chunks: Iterator[Chunk], origin: Origin, options: ReadOptions, ledger: Ledger
) -> Iterator[Table]:
    timeline, names = Timeline(), Names()
    num_rows, shift, zeros = 0, 0, np.zeros(2, np.int64)
    for chunk in chunks:
        timeline.see(chunk)
        if num_rows == 0:
            shift = first_arrival(timeline, origin, options, ledger)
        yield _table(chunk, num_rows, shift, names)
        num_rows += len(chunk)
        zeros += [int((chunk.prompt_tokens == 0).sum()), int((chunk.output_tokens == 0).sum())]
    ledger.close()
    if not num_rows:
        raise TraceError(no_requests(origin, ledger))
    timeline.check(options, origin.is_absolute)
    timeline.remarks(ledger, origin.format_name, options.time_unit is not None)
    names.report(ledger)
    if zeros.any():
        ledger.note(f"{zeros[0]} requests without prompt tokens, {zeros[1]} without output tokens")


def _table(chunk: Chunk, first_row: int, shift: int, names: Names) -> Table:
    numbers = {
        "arrival_ns": on_clock(chunk.arrival_ns, shift),
        "prompt_tokens": chunk.prompt_tokens,
        "output_tokens": chunk.output_tokens,
    }
    for name, neutral in PLAIN.items():
        column = getattr(chunk, name)
        numbers[name] = np.full(len(chunk), neutral, np.int64) if column is None else column
    ids = names.unique(chunk.ids) or [str(first_row + i) for i in range(len(chunk))]
    texts = [""] * len(chunk)
    if chunk.spans is not None and chunk.span_counts is not None:
        spans, counts = with_own_text(
            chunk.spans, chunk.span_counts, chunk.prompt_tokens, first_row
        )
        spans = spans.copy()
        own = spans[:, 0] <= PRIVATE
        spans[own, 0] = OWN_TEXT + (PRIVATE - spans[own, 0])
        texts = span_texts(spans, counts)
    return Table(numbers, ids, texts)
