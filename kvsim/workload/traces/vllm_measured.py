"""Requests measured on a real vLLM (LLMServingSim's bench): JSON Lines of lengths and time stamps.

`queued_ts`, `scheduled_ts`, `first_token_ts` and `last_token_ts` are seconds of a monotonic
clock; the arrival is `queued_ts`, from which the measured TTFT counts. The timings are no part of
a workload: read_timings gives them, to set beside a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.json_rows import json_records
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.numbers import MISSING, time_field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import checked
from kvsim.workload.traces.source import Source, open_source


class Timings(NamedTuple):
    """Measured times of N requests in file order, int64 [N] ns from the first request queued."""

    queued_ns: np.ndarray
    scheduled_ns: np.ndarray
    first_token_ns: np.ndarray
    last_token_ns: np.ndarray


def read_vllm_measured(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    fields = [
        time_field("queued_ts", "s"),
        tokens_field("input_toks"),
        tokens_field("output_toks"),
    ]
    ledger.note("arrivals are queued_ts; the measured times of tokens in the file are not used")
    for records in json_records(source, ledger):
        columns = checked(records, fields, ledger)
        assert records.objects is not None
        names = [row.get("request_id", MISSING) for row in records.objects]
        ids = ["" if name is MISSING else str(name) for name in names]
        yield Chunk(source.name, records.lines, *columns, ids=ids if all(ids) else None)


def read_timings(path: str | Path) -> Timings:
    """The measured times of a vllm_measured file; raises TraceError for a bad row."""
    fields = [time_field(f"{name[:-3]}_ts", "s") for name in Timings._fields]
    ledger = Ledger(skip_bad_rows=False)
    parts = [
        checked(records, fields, ledger) for records in json_records(open_source(path), ledger)
    ]
    ledger.close()
    table = np.concatenate([np.stack(part) for part in parts], axis=1)
    return Timings(*(table - table[0].min()))
