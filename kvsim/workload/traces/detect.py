"""Which format a trace has, told from its first lines."""

from __future__ import annotations

import json
from pathlib import Path

from kvsim.errors import TraceError
from kvsim.workload.traces.csv_rows import csv_header
from kvsim.workload.traces.ledger import shown
from kvsim.workload.traces.source import Source, open_source

# a format has all keys of its row; the first row that fits wins
JSON_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sharegpt", ("conversations",)),
    ("sharegpt", ("items",)),
    ("sharegpt_lengths", ("conversation", "turns")),
    ("vllm_measured", ("input_toks", "queued_ts")),
    ("llmservingsim", ("input_toks",)),
    ("llmservingsim", ("sub_requests",)),
    ("qwen", ("chat_id", "timestamp")),
    ("weka", ("requests", "block_size")),
    ("vllm_bench", ("input_lens",)),
    ("vllm_bench", ("request_throughput",)),
    ("aiperf", ("text_input",)),
    ("aiperf", ("messages",)),
    ("aiperf", ("delay",)),
)
CSV_COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("azure", ("TIMESTAMP", "ContextTokens")),
    ("azure", ("ContextTokens", "GeneratedTokens")),
    ("burstgpt", ("Request tokens", "Response tokens")),
    ("vidur", ("num_prefill_tokens", "num_decode_tokens")),
    ("splitwise", ("arrival_timestamp", "prompt_size", "token_size")),
    ("sharegpt_lengths", ("prompt_tokens", "output_tokens", "first_role")),
    ("native", ("prompt_tokens", "output_tokens")),
)


def detected(path: Path) -> str:
    """The format's name; raises TraceError where the first lines do not tell."""
    if path.is_dir():
        return _folder(path)
    source = open_source(path)
    name = "native" if source.is_parquet else _text(source)
    if name is None:
        first = next((line for line in source.head.split("\n") if line.strip()), "")
        raise TraceError(
            f"{source.name}:1: cannot tell the trace's format from {shown(first.strip())}: "
            "no header or keys of a known one; name the format"
        )
    return name


def _folder(path: Path) -> str:
    if any(path.glob("*-trace.csv")):
        return "servegen"
    if any(path.glob("*.json")) or any(path.glob("*.jsonl")):
        return "weka"
    raise TraceError(
        f"{path.name}: a folder without chunk-N-trace.csv (servegen) or session files (weka)"
    )


def _text(source: Source) -> str | None:
    head = source.head.lstrip()
    if head.startswith("["):
        return "sharegpt"
    if head.startswith("{"):
        return _json(head)
    header = csv_header(head)
    found = next((name for name, keys in CSV_COLUMNS if set(keys) <= set(header)), None)
    if found is None and source.name.endswith("-trace.csv"):
        return "servegen"
    if found is None and ";" in head.split("\n", 1)[0]:
        return _semicolons(head)
    return found


def _semicolons(head: str) -> str | None:
    names = {cell.strip(' "') for cell in head.split("\n", 1)[0].split(";")}
    return next((name for name, keys in CSV_COLUMNS if set(keys) <= names), None)


def _json(head: str) -> str | None:
    rows = [row for row in map(_object, head.split("\n")[:200]) if row is not None]
    if not rows:
        return _pretty(head)
    if any("session_id" in row and not isinstance(row.get("hash_ids"), dict) for row in rows) and (
        all("input_toks" not in row and "sub_requests" not in row for row in rows)
    ):
        return "aiperf"
    if any(isinstance(row.get("hash_ids"), dict) for row in rows):
        return "ragpulse"
    for name, keys in JSON_KEYS:
        if any(set(keys) <= set(row) for row in rows):
            return name
    if any("input_length" in row for row in rows):
        return "mooncake"
    return None


def _object(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _pretty(head: str) -> str | None:
    """A JSON object over many lines, or one longer than the head."""
    for key, name in (
        ('"hash_id_scope"', "weka"),
        ('"input_tokens": "{', "servegen"),
        ('"text_tokens": "{', "servegen"),
        ('"request_throughput"', "vllm_bench"),
        ('"input_lens"', "vllm_bench"),
        ('"requests"', "weka"),
        ('"conversations"', "sharegpt"),
        ('"sub_requests"', "llmservingsim"),
        ('"input_length"', "mooncake"),
    ):
        if key in head:
            return name
    return None
