"""The flags and keys of `kvsim plan`: those of `vllm serve` that set memory, and kvsim's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
MOST = 10**12
AS_LONG_AS_FITS = -1  # max_model_len auto


class Fault(ValueError):
    """What a value should be."""


@dataclass(frozen=True)
class Asked:
    """What was asked for; None: the engine's, or the model's, default. A `_gib` is a figure that a
    log printed, which goes before the arithmetic; shape: a model's catalogue keys, inline."""

    model: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    dtype: str = "auto"
    block_size: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    num_gpu_blocks_override: int | None = None
    gpu: str | None = None
    engine: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    rate: float | None = None
    users: int | None = None
    gpu_memory_gib: float | None = None
    weights_gib: float | None = None
    activation_gib: float | None = None
    runtime_gib: float | None = None
    free_gib: tuple[float, ...] = ()
    shape: dict | None = None


class Flag(NamedTuple):
    read: Callable[[Any], Any]
    help: str
    short: str | None = None


def count(raw: Any) -> int:
    """A whole number from 1, as 16384, 16k (16,000) or 16K (16,384): vLLM's reading."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", str(raw).replace(",", "").strip())
    if found is None or isinstance(raw, bool):
        raise Fault("is not a whole number, as 16384, 16k (16,000) or 16K (16,384)")
    value = Decimal(found[1]) * SUFFIXES.get(found[2], 1)
    if value != int(value) or not 1 <= value <= MOST:
        raise Fault(f"is not a whole number from 1 to {MOST:,}")
    return int(value)


def length(raw: Any) -> int:
    return AS_LONG_AS_FITS if str(raw) in ("auto", "-1") else count(raw)


def number(raw: Any) -> float:
    try:
        value = float(raw)
    except (TypeError, ValueError, OverflowError):
        value = -1.0
    if isinstance(raw, bool) or not 0 < value <= MOST:
        raise Fault("is not a number above 0")
    return value


def share(raw: Any) -> float:
    value = number(raw)
    if value > 1:
        raise Fault("is not in 0..1")
    return value


def numbers(raw: Any) -> tuple[float, ...]:
    parts = raw if isinstance(raw, list) else str(raw).split(",")
    return tuple(number(part) for part in parts)


def text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise Fault("is not a text")
    return raw.strip()


def switch(raw: Any) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if (word := str(raw).lower()) not in known:
        raise Fault("is not true or false")
    return known[word]


def mapping(raw: Any) -> dict:
    if not isinstance(raw, dict):
        raise Fault("is not a mapping of a model's keys: give it in a YAML file")
    return raw


FLAGS: dict[str, Flag] = {
    "model": Flag(text, "as the positional MODEL"),
    "tensor_parallel_size": Flag(count, "GPUs that share each layer [1]", "tp"),
    "pipeline_parallel_size": Flag(count, "stages of layers [1]", "pp"),
    "data_parallel_size": Flag(count, "replicas [1]", "dp"),
    "max_model_len": Flag(length, "longest request, as 16384, 16k, or auto [the model's]"),
    "gpu_memory_utilization": Flag(share, "share of the GPU to use [0.9]"),
    "max_num_seqs": Flag(count, "requests in a step at most [engine's]"),
    "max_num_batched_tokens": Flag(count, "tokens in a step at most [engine's]"),
    "kv_cache_dtype": Flag(text, "auto, fp8, … [the model's dtype]"),
    "quantization": Flag(text, "fp8, awq, gptq, … [as published]", "q"),
    "dtype": Flag(text, "auto, bfloat16, float16, float32 [as published]"),
    "block_size": Flag(count, "tokens of a KV block [engine's]"),
    "enforce_eager": Flag(switch, "no CUDA graphs"),
    "enable_prefix_caching": Flag(switch, "share equal prompt blocks (takes no memory)"),
    "num_gpu_blocks_override": Flag(count, "KV blocks, whatever memory is left"),
    "gpu": Flag(text, "GPU of the catalogue, as h100 or a100-80gb"),
    "engine": Flag(text, "vllm@VERSION, as vllm@0.19 [the newest preset]"),
    "input_len": Flag(count, "your workload: prompt tokens of a request, mean"),
    "output_len": Flag(count, "your workload: output tokens of a request, mean"),
    "rate": Flag(number, "your workload: requests a second, all replicas together"),
    "users": Flag(count, "your workload: requests in flight, in the place of a rate"),
    "gpu_memory_gib": Flag(number, "all memory of a GPU, as a log printed it"),
    "weights_gib": Flag(number, "weights on a GPU, as a log printed them"),
    "activation_gib": Flag(number, "activation, as a log printed it"),
    "runtime_gib": Flag(number, "memory outside PyTorch, as a log printed it"),
    "free_gib": Flag(numbers, "free at the start on each GPU of a replica, as 22.1,23.4"),
    "shape": Flag(mapping, "model as catalogue keys (YAML only)"),
}
SHORT = {flag.short: name for name, flag in FLAGS.items() if flag.short}


class OtherFlags(NamedTuple):
    """Flags of vllm serve that are not modelled. several: values that take many words; memory:
    flags that change a GPU's memory."""

    switches: frozenset[str]
    values: frozenset[str]
    several: frozenset[str]
    memory: frozenset[str]
    short: dict[str, str]


@cache
def other_flags() -> OtherFlags:
    raw = files("kvsim").joinpath("catalog", "serve_flags.yaml").read_text(encoding="utf-8")
    plain = yaml.load(raw, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    memory = {kind: _names(plain["memory"][kind]) for kind in ("switches", "values")}
    return OtherFlags(
        _names(plain["switches"]) | memory["switches"],
        _names(plain["values"]) | memory["values"],
        _names(plain["several"]),
        memory["switches"] | memory["values"],
        {short: name.replace("-", "_") for short, name in plain["short"].items()},
    )


def _names(words: str) -> frozenset[str]:
    return frozenset(word.replace("-", "_") for word in words.split())
