"""The figures of a vLLM start-up log, or of a /metrics page, as users paste them."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvsim.memory.printed import Printed

# colours; the prefixes that loggers and launchers put before a line
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PREFIX = re.compile(
    r"\((?:\w*(?:EngineCore|Worker|APIServer)\w*)[^)]*\)"
    r"|\b(?:INFO|WARNING|ERROR)(?: \d\d-\d\d)? \d\d:\d\d:\d\d(?:\.\d+)? (?:\[?[\w./]+:\d+\])"
    r"|^\s*(?:INFO|WARNING|ERROR):",
    re.MULTILINE,
)
NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
GIB = rf"{NUMBER} ?Gi?B"


class StartLog(NamedTuple):
    """printed: the figures of one start, as text; None where the log has none. kv_gib_by_rank:
    one a rank that printed it, the smallest is printed.kv_gib. The rest is the engine's own line
    on how it was started."""

    printed: Printed
    kv_gib_by_rank: tuple[str, ...]
    engine_version: str | None
    model: str | None
    dtype: str | None
    quantization: str | None
    kv_dtype: str | None
    tensor: int | None
    pipeline: int | None
    block_size: int | None
    graphs_gib: str | None
    enforce_eager: bool | None


def read_start_log(text: str) -> StartLog:
    """The last start in the text. Lines may be coloured, prefixed and wrapped anywhere but in a
    figure; what is not found stays None."""
    flat = _flat(text)
    starts = [m.start() for m in re.finditer(r"Initializing an? (?:V1 )?LLM engine", flat)]
    flat = flat[starts[-1] :] if starts else flat
    ranks = _all(flat, rf"Available KV cache memory: {GIB}") or _all(
        flat, rf"reserved for KV Cache is {GIB}"
    )
    ranks = ranks or _all(flat, rf"Reserved for KV cache: {GIB}")
    available = _one(flat, rf"available KV cache memory \({GIB}\)")
    smallest = min(ranks, key=float, default=available)
    return StartLog(
        printed=_printed(flat, smallest),
        kv_gib_by_rank=tuple(ranks),
        engine_version=_one(flat, r"LLM engine \(v?([\w.+]+)\)")
        or _one(flat, r"vLLM API server version v?(\d[\w.+]*)"),
        model=_one(flat, r"config: model=['\"]([^'\"]+)['\"]"),
        dtype=_one(flat, r"\bdtype=(?:torch\.)?(\w+)"),
        quantization=_known(_one(flat, r"\bquantization=(\w+)")),
        kv_dtype=_one(flat, r"\b(?:kv_)?cache_dtype=\"?(?:torch\.)?(\w+)"),
        tensor=_int(_one(flat, r"\btensor_parallel_size=(\d+)")),
        pipeline=_int(_one(flat, r"\bpipeline_parallel_size=(\d+)")),
        block_size=_int(_one(flat, r"\bblock_size=\"?(\d+)")),
        graphs_gib=_one(flat, rf"Graph capturing finished in \d+ secs?, took {GIB}"),
        enforce_eager={"True": True, "False": False}.get(
            _one(flat, r"\benforce_eager=(\w+)") or ""
        ),
    )


def _printed(flat: str, kv_gib: str | None) -> Printed:
    share = _one(flat, rf"gpu_memory_utilization[ (=\"]*{NUMBER}")
    percent = _one(flat, rf"Memory utilization: {NUMBER}%")
    return Printed(
        total_gib=_one(flat, rf"total_gpu_memory \({GIB}\)")
        or _one(flat, rf"Total GPU memory: {GIB}"),
        gpu_memory_utilization=float(percent) / 100 if percent else _float(share),
        weights_gib=_one(flat, rf"model weights take {GIB}")
        or _one(flat, rf"(?:Loading model weights|Model loading) took {GIB}")
        or _one(flat, rf"Model weights: {GIB}"),
        runtime_gib=_one(flat, rf"non_torch_memory takes {GIB}")
        or _one(flat, rf"Wasted memory: {GIB}"),
        activation_gib=_one(flat, rf"PyTorch activation peak memory takes {GIB}")
        or _one(flat, rf"Peak activations memory: {GIB}"),
        kv_gib=kv_gib,
        num_blocks=_int(
            _one(flat, rf"# (?:GPU|cuda|rocm|xpu) blocks: {NUMBER}")
            or _one(flat, r"num_gpu_blocks=\"(\d+)\"")
        ),
        num_host_blocks=_int(
            _one(flat, rf"# (?:CPU|cpu) blocks: {NUMBER}")
            or _one(flat, r"num_cpu_blocks=\"(\d+)\"")
        ),
        swap_gib=_swap(flat),
        tokens=_int(
            _one(flat, rf"GPU KV cache size: {NUMBER} tokens")
            or _one(flat, rf"can be stored in(?: the)? KV cache \({NUMBER}\)")
            or _one(flat, rf"Maximum sequence length allowed in the cache: {NUMBER}")
        ),
        max_model_len=_int(
            _one(flat, rf"Maximum concurrency for {NUMBER} tokens per request")
            or _one(flat, rf"max seq len \({NUMBER}\)")
            or _one(flat, rf"\bmax_seq_len={NUMBER}")
            or _one(flat, rf"KV cache for {NUMBER} tokens")
        ),
        concurrency=_one(flat, rf"tokens per request: {NUMBER}x")
        or _one(flat, rf"Minimum concurrency: {NUMBER}x"),
        needed_gib=_one(flat, rf"{GIB} KV cache is needed"),
        estimated_max_len=_int(_one(flat, rf"estimated maximum model length is {NUMBER}")),
    )


def _swap(flat: str) -> float | None:
    """swap_space_bytes of a /metrics page; the start-up log of a server does not print it."""
    found = _one(flat, r"swap_space_bytes=\"([\d.e+]+)\"")
    return None if found is None else float(found) / 2**30


def _flat(text: str) -> str:
    """One line: no colours, no prefixes, single spaces, wrapped words at most apart by one."""
    plain = PREFIX.sub(" ", ANSI.sub("", text))
    return re.sub(r"\s+", " ", plain)


def _all(flat: str, pattern: str) -> list[str]:
    return [found.replace(",", "") for found in re.findall(pattern, flat)]


def _one(flat: str, pattern: str) -> str | None:
    found = _all(flat, pattern)
    return found[-1].rstrip(",") if found else None


def _int(found: str | None) -> int | None:
    return None if found is None else int(float(found))


def _float(found: str | None) -> float | None:
    return None if found is None else float(found)


def _known(found: str | None) -> str | None:
    return None if found in (None, "None") else found
