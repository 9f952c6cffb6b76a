"""The trace formats by name: one reader each, and which options it has a use for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from kvsim.errors import TraceError
from kvsim.workload.traces.block_ids import MOONCAKE_BLOCK, QWEN_BLOCK, WEKA_BLOCK
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.source import Source, open_source

Reader = Callable[[Source, ReadOptions, Ledger], Iterator[Chunk]]


class Format(NamedTuple):
    """A format and what it heeds: `uses` are the options beyond those common to all. Its reader is
    `read_<name>` of `module`, loaded when it is first called for: a run has use for one."""

    name: str
    module: str
    is_absolute: bool = False
    uses: frozenset[str] = frozenset()
    block_size: int | None = None
    reads_folders: bool = False

    @property
    def read(self) -> Reader:
        return getattr(import_module(f"{__package__}.{self.module}"), f"read_{self.name}")


def _formats(*formats: Format) -> dict[str, Format]:
    return {one.name: one for one in formats}


def _uses(*names: str) -> frozenset[str]:
    return frozenset(names)


FORMATS: dict[str, Format] = _formats(
    Format(
        "aiperf", "aiperf", False, _uses("time_unit", "block_size", "tokenizer"), MOONCAKE_BLOCK
    ),
    Format("azure", "azure", True),
    Format("burstgpt", "burstgpt", True, _uses("time_unit", "sessions")),
    Format("llmservingsim", "llmservingsim", False, _uses("time_unit")),
    Format("mooncake", "mooncake", False, _uses("time_unit", "block_size"), MOONCAKE_BLOCK),
    Format("native", "native"),
    Format("qwen", "qwen", False, _uses("time_unit", "block_size"), QWEN_BLOCK),
    Format("ragpulse", "ragpulse", False, _uses("time_unit")),
    Format("servegen", "servegen", False, _uses("duration_s"), None, True),
    Format("sharegpt", "sharegpt", False, _uses("tokenizer", "sessions")),
    Format("sharegpt_lengths", "sharegpt_lengths", False, _uses("sessions")),
    Format("splitwise", "vidur", False, _uses("time_unit")),
    Format("vidur", "vidur", False, _uses("time_unit")),
    Format("vllm_bench", "vllm_bench", True),
    Format("vllm_measured", "vllm_measured", True),
    Format("weka", "weka", False, _uses("sessions", "subagents"), WEKA_BLOCK, True),
)
OPTIONAL = ("time_unit", "block_size", "tokenizer", "sessions", "subagents", "duration_s")


def opened(path: Path, chosen: Format) -> Source:
    """The file as a source; a folder only for formats that are made of several files."""
    if path.is_dir() and chosen.reads_folders:
        return Source(path, path.name, False, "utf-8", "")
    return open_source(path)


def check_options(chosen: Format, options: ReadOptions) -> None:
    """Refuses an option that the format would not heed, and values without a meaning."""
    neutral = ReadOptions()
    for name in OPTIONAL:
        if name not in chosen.uses and getattr(options, name) != getattr(neutral, name):
            users = ", ".join(one.name for one in FORMATS.values() if name in one.uses)
            raise TraceError(f"{name}: format {chosen.name} has no use for it (only {users})")
    for name in ("limit", "block_size", "duration_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 2**40:
            raise TraceError(f"{name}: {value} is not above 0")
    if options.time_unit not in (None, "s", "ms", "us", "ns"):
        raise TraceError(f"time_unit: {options.time_unit!r} is not one of s, ms, us, ns")
    if options.sessions not in (None, "open", "closed"):
        raise TraceError(f"sessions: {options.sessions!r} is not one of open, closed")
