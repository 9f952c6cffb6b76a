"""The trace formats by name: one reader each, and which options it has a use for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvsim.errors import TraceError
from kvsim.workload.traces.aiperf import read_aiperf
from kvsim.workload.traces.azure import read_azure
from kvsim.workload.traces.burstgpt import read_burstgpt
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.llmservingsim import read_llmservingsim
from kvsim.workload.traces.mooncake import BLOCK_SIZE as MOONCAKE_BLOCK
from kvsim.workload.traces.mooncake import read_mooncake
from kvsim.workload.traces.native import read_native
from kvsim.workload.traces.options import ReadOptions
from kvsim.workload.traces.qwen import BLOCK_SIZE as QWEN_BLOCK
from kvsim.workload.traces.qwen import read_qwen
from kvsim.workload.traces.ragpulse import read_ragpulse
from kvsim.workload.traces.servegen import read_servegen
from kvsim.workload.traces.sharegpt import read_sharegpt
from kvsim.workload.traces.sharegpt_lengths import read_sharegpt_lengths
from kvsim.workload.traces.source import Source, open_source
from kvsim.workload.traces.vidur import read_splitwise, read_vidur
from kvsim.workload.traces.vllm_bench import read_vllm_bench
from kvsim.workload.traces.vllm_measured import read_vllm_measured
from kvsim.workload.traces.weka import BLOCK_SIZE as WEKA_BLOCK
from kvsim.workload.traces.weka import read_weka

Reader = Callable[[Source, ReadOptions, Ledger], Iterator[Chunk]]


class Format(NamedTuple):
    """A reader and what it heeds: `uses` are the options beyond those common to all."""

    name: str
    read: Reader
    is_absolute: bool = False
    uses: frozenset[str] = frozenset()
    block_size: int | None = None
    reads_folders: bool = False


def _formats(*formats: Format) -> dict[str, Format]:
    return {one.name: one for one in formats}


def _uses(*names: str) -> frozenset[str]:
    return frozenset(names)


FORMATS: dict[str, Format] = _formats(
    Format("aiperf", read_aiperf, False, _uses("time_unit", "block_size", "tokenizer"), 512),
    Format("azure", read_azure, True),
    Format("burstgpt", read_burstgpt, True, _uses("time_unit", "sessions")),
    Format("llmservingsim", read_llmservingsim, False, _uses("time_unit")),
    Format("mooncake", read_mooncake, False, _uses("time_unit", "block_size"), MOONCAKE_BLOCK),
    Format("native", read_native),
    Format("qwen", read_qwen, False, _uses("time_unit", "block_size"), QWEN_BLOCK),
    Format("ragpulse", read_ragpulse, False, _uses("time_unit")),
    Format("servegen", read_servegen, False, _uses("duration_s"), None, True),
    Format("sharegpt", read_sharegpt, False, _uses("tokenizer", "sessions")),
    Format("sharegpt_lengths", read_sharegpt_lengths, False, _uses("sessions")),
    Format("splitwise", read_splitwise, False, _uses("time_unit")),
    Format("vidur", read_vidur, False, _uses("time_unit")),
    Format("vllm_bench", read_vllm_bench, True),
    Format("vllm_measured", read_vllm_measured, True),
    Format("weka", read_weka, False, _uses("sessions", "subagents"), WEKA_BLOCK, True),
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
