"""Mooncake traces (Qin et al., FAST 2025): JSON Lines with hash ids of 512-token blocks.

`{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`. An id names a chained
block of prompt text, so it becomes a token stream of one block; the last id covers what is left
of the prompt. No ids means that nothing is known of the prompt's text, not that it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.workload.traces.block_ids import MOONCAKE_BLOCK, BlockIds, spans_of_blocks
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.json_rows import json_block
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.mooncake_lines import plain_rows
from kvsim.workload.traces.numbers import (
    DIGITS_BELOW,
    MAX_NS,
    MAX_TOKENS,
    time_field,
    tokens_field,
)
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.records import Records, checked
from kvsim.workload.traces.source import Lines, Source, line_blocks

DIALECT = ("session_id", "delay", "text_input", "messages")


def read_mooncake(source: Source, options: ReadOptions, ledger: Ledger) -> Iterator[Chunk]:
    block_size = options.block_size or MOONCAKE_BLOCK
    unit = options.time_unit or "ms"
    fields = [
        time_field("timestamp", unit),
        tokens_field("input_length"),
        tokens_field("output_length"),
    ]
    ids = BlockIds()
    num_fractions = 0
    for block in line_blocks(source):
        plain = _plain_chunk(source.name, block, DIGITS_BELOW[unit], block_size, ids)
        if plain is not None:
            ledger.read += len(plain)
            yield plain
            continue
        records = json_block(source.name, block, ledger)
        refuse_keys(records, DIALECT, "belongs to aiperf's dialect: format aiperf reads it", ledger)
        arrival_ns, prompts, outputs = checked(records, fields, ledger)
        num_fractions += int((arrival_ns % 10**6 != 0).sum())
        yield block_chunk(records, (arrival_ns, prompts, outputs), block_size, ids, ledger)
    ids.report(ledger)
    ledger.facts["fractional_stamps"] = num_fractions


def _plain_chunk(
    name: str, block: Lines, places: int, block_size: int, ids: BlockIds
) -> Chunk | None:
    """The quick way for rows as Mooncake writes them; None where the JSON must be looked at."""
    rows = plain_rows(block.lines)
    if rows is None or rows.timestamps.max() > MAX_NS // 10**places:
        return None
    if max(rows.inputs.max(), rows.outputs.max()) > MAX_TOKENS:
        return None
    if (rows.counts != -(-rows.inputs // block_size)).any():
        return None
    streams = ids.intern(rows.ids)
    ids.watch(streams, rows.counts)
    return Chunk(
        name,
        np.arange(block.first, block.first + len(rows.counts), dtype=np.int64),
        rows.timestamps * 10**places,
        rows.inputs,
        rows.outputs,
        spans=spans_of_blocks(streams, rows.counts, rows.inputs, block_size),
        span_counts=rows.counts,
    )


def refuse_keys(records: Records, keys: tuple[str, ...], rule: str, ledger: Ledger) -> None:
    """Books the rows that have one of `keys` as bad."""
    assert records.objects is not None
    bad = [key for key in keys if any(key in row for row in records.objects)]
    if not bad:
        return
    good = []
    for i, row in enumerate(records.objects):
        found = next((key for key in bad if key in row), None)
        if found is None:
            good.append(i)
        else:
            ledger.bad(records.name, int(records.lines[i]), BadRow(found, None, rule))
    records.keep(good)


def block_chunk(
    records: Records,
    columns: tuple[np.ndarray, np.ndarray, np.ndarray],
    block_size: int,
    ids: BlockIds,
    ledger: Ledger,
) -> Chunk:
    """The chunk of rows whose `hash_ids` cover the prompt, ceil(length / block_size) of them."""
    assert records.objects is not None
    lists = [row.get("hash_ids") or [] for row in records.objects]
    prompts = columns[1]
    if set(map(type, lists)) - {list}:
        counts = np.array([len(x) if isinstance(x, list) else -1 for x in lists], np.int64)
    else:
        counts = np.fromiter(map(len, lists), np.int64, len(lists))  # type: ignore[arg-type]
    expected = -(-prompts // block_size)
    wrong = (counts != expected) & (counts != 0)
    flat, bad_ids = ids.streams(lists, counts, wrong)
    if wrong.any() or bad_ids:
        good = []
        for i in range(len(lists)):
            fault = bad_ids.get(i) or _count_fault(counts[i], expected[i], block_size)
            if fault is None:
                good.append(i)
            else:
                ledger.bad(records.name, int(records.lines[i]), fault)
        records.keep(good)
        columns = tuple(column[good] for column in columns)  # type: ignore[assignment]
        counts = counts[good]
        prompts = columns[1]
    ids.watch(flat, counts)
    spans = spans_of_blocks(flat, counts, prompts, block_size)
    return Chunk(records.name, records.lines, *columns, spans=spans, span_counts=counts)


def _count_fault(count: int, expected: int, block_size: int) -> BadRow | None:
    if count < 0:
        return BadRow("hash_ids", None, "not a list of whole numbers >= 0")
    if count in (0, expected):
        return None
    return BadRow(
        "hash_ids",
        int(count),
        f"ids where ceil(input_length / {block_size}) is {expected}",
        reason=f"not ceil(input_length / {block_size}) ids",
    )
