"""Results of `vllm bench serve --save-result --save-detailed`: one JSON object of lists.

`input_lens`, `output_lens` and, in newer versions, `start_times` (seconds); a failed request
keeps its place with an answer of 0 tokens. Without start_times the file has no arrivals. After
the field list of vLLM's benchmarks/serve.py; the summary's milliseconds are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import NO_TIME, Chunk
from kvsim.workload.traces.json_rows import decoded
from kvsim.workload.traces.ledger import BadRow, Ledger, counted
from kvsim.workload.traces.numbers import time_field, tokens_field
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import Records, checked
from kvsim.workload.traces.source import Source, text_blocks


def read_vllm_bench(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    try:
        result = decoded("".join(text_blocks(source)))
    except BadRow as fault:
        hint = ""
        if "Extra data" in fault.rule:
            hint = ": several results in one file (--append-result): keep one"
        raise TraceError(f"{source.name}: {fault.rule}{hint}") from None
    if not isinstance(result, dict):
        raise TraceError(f"{source.name}: not a JSON object")
    names = ["input_lens", "output_lens"] + (["start_times"] if result.get("start_times") else [])
    lists = [result.get(name) for name in names]
    for name, values in zip(names, lists, strict=True):
        if not isinstance(values, list):
            raise TraceError(f"{source.name}: {name}: no such list: save with --save-detailed")
        if len(values) != len(lists[0]):  # type: ignore[arg-type]
            raise TraceError(
                f"{source.name}: {name}: {len(values)} values, where input_lens has {len(lists[0])}"  # type: ignore[arg-type]
            )
    objects = [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]  # type: ignore[arg-type]
    records = Records(source.name, np.arange(1, len(objects) + 1), {}, objects)
    ledger.read += len(objects)
    fields = [tokens_field("input_lens"), tokens_field("output_lens")]
    if len(names) == 3:
        fields.append(time_field("start_times", "s"))
    prompts, outputs, *times = checked(records, fields, ledger)
    failed = int((outputs == 0).sum())
    if failed:
        ledger.note(f"failed in the benchmark: {counted(failed, 'request')} (answers of 0 tokens)")
    arrival_ns = times[0] if times else np.full(len(prompts), NO_TIME, np.int64)
    yield Chunk(source.name, records.lines, arrival_ns, prompts, outputs)
