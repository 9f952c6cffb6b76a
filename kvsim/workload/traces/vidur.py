"""Length files of Vidur, Sarathi-Serve and splitwise-sim: CSV of prompt and answer lengths.

Vidur: `num_prefill_tokens,num_decode_tokens`, with `arrived_at` (seconds, with float noise) where
the file has arrivals. Vidur itself clips such rows to its longest context; this reader does not.
splitwise-sim: `arrival_timestamp` (seconds), `prompt_size`, `token_size`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.workload.traces.chunk import NO_TIME, Chunk
from kvsim.workload.traces.csv_rows import csv_header, csv_records
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.numbers import time_field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import checked
from kvsim.workload.traces.source import Source

VIDUR = ("num_prefill_tokens", "num_decode_tokens")
SPLITWISE = ("prompt_size", "token_size")


def read_vidur(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    return length_rows(source, "arrived_at", VIDUR, options, ledger)


def read_splitwise(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    return length_rows(source, "arrival_timestamp", SPLITWISE, options, ledger)


def length_rows(
    source: Source,
    arrival: str,
    lengths: tuple[str, str],
    options: ReadOptions,
    ledger: Ledger,
) -> Iterator[Chunk]:
    """Chunks of a CSV with two columns of lengths and perhaps one of arrivals."""
    fields = [tokens_field(name) for name in lengths]
    has_arrivals = arrival in csv_header(source.head)
    if has_arrivals:
        fields.append(time_field(arrival, options.time_unit or "s"))
    for records in csv_records(source, lengths, ledger):
        prompts, outputs, *times = checked(records, fields, ledger)
        arrival_ns = times[0] if times else np.full(len(prompts), NO_TIME, np.int64)
        yield Chunk(source.name, records.lines, arrival_ns, prompts, outputs)
