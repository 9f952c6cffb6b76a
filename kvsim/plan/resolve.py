"""From what was asked for to shape, GPU, engine and limits; all faults at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.memory.budget import Known
from kvsim.memory.catalog import (
    Gpu,
    engine_names,
    engine_of_version,
    find_engine,
    find_gpu,
    find_model,
    find_quantization,
    gpu_names,
    inline_model,
)
from kvsim.memory.entry import EngineEntry
from kvsim.memory.hf_config import read_hf_config
from kvsim.memory.kv import Limits
from kvsim.memory.shape import ModelShape
from kvsim.memory.weights import Parallel
from kvsim.plan.flags import AS_LONG_AS_FITS, Asked

DTYPES = {
    "auto": None, "half": "fp16", "float16": "fp16", "fp16": "fp16", "bfloat16": "bf16",
    "bf16": "bf16", "float": "fp32", "float32": "fp32", "fp32": "fp32",
}  # fmt: skip
AS_PUBLISHED = ("compressed-tensors", "modelopt", "auto-round", "quark", "None", "none")
FORMATS = {
    "awq": "awq-4bit", "awq_marlin": "awq-4bit", "gptq": "gptq-4bit", "gptq_marlin": "gptq-4bit",
    "bitsandbytes": "bnb-4bit", "fbgemm_fp8": "fp8", "ptpc_fp8": "fp8", "modelopt_fp4": "nvfp4",
    "gguf": "gguf-q4", "experts_int8": "int8",
}  # fmt: skip
KV_DTYPES = {**DTYPES, "auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
             "fp8_inc": "fp8"}  # fmt: skip
DEFAULT_SHARE = 0.9


class Setup(NamedTuple):
    """All that memory.budget takes; engine_label: as it was asked for."""

    shape: ModelShape
    gpu: Gpu
    parallel: Parallel
    engine: EngineEntry
    engine_label: str
    limits: Limits
    known: Known
    notes: tuple[str, ...]


def resolve(asked: Asked) -> Setup:
    """Raises ConfigError with every fault: an unknown model, GPU, engine or format, a missing one.
    max_model_len is the model's where it is not given, or `auto`."""
    faults: list[str] = []

    def tried(find: Callable, *given: Any) -> Any:
        try:
            return find(*given)
        except ConfigError as error:
            faults.extend(error.faults)
            return None

    shape = tried(model_of, asked)
    gpu = tried(gpu_of, asked)
    engine_name, label = tried(engine_of, asked.engine) or (engine_names()[-1], "")
    kv_dtype = tried(_one_of, "kv_cache_dtype", asked.kv_cache_dtype, KV_DTYPES)
    if (asked.input_len is None) != (asked.output_len is None):
        faults.append("--input-len and --output-len go together")
    if (asked.rate or asked.users) and asked.input_len is None:
        faults.append("--rate and --users need --input-len and --output-len")
    if asked.rate and asked.users:
        faults.append("--rate and --users: give one of them")
    longest = _longest(asked, shape, faults)
    if faults:
        raise ConfigError(faults)
    limits = Limits(
        longest,
        gpu_memory_utilization=asked.gpu_memory_utilization or DEFAULT_SHARE,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_num_seqs=asked.max_num_seqs,
        kv_dtype=kv_dtype,
        enforce_eager=asked.enforce_eager,
        block_size=asked.block_size,
    )
    known = Known(asked.weights_gib, asked.activation_gib, asked.runtime_gib, asked.free_gib)
    parallel = Parallel(
        asked.tensor_parallel_size, asked.pipeline_parallel_size, asked.data_parallel_size
    )
    return Setup(
        shape, gpu, parallel, find_engine(engine_name), label, limits, known, _notes(asked, shape)
    )


def _longest(asked: Asked, shape: ModelShape | None, faults: list[str]) -> int | None:
    if asked.max_model_len not in (None, AS_LONG_AS_FITS):
        longest = asked.max_model_len
    elif shape is None:
        return None
    elif shape.max_position is None:
        faults.append(f"--max-model-len: is missing, and {shape.name} states none")
        return None
    else:
        longest = shape.max_position
    tokens = (asked.input_len or 0) + (asked.output_len or 0)
    if tokens > longest:
        text = f"--input-len and --output-len: {tokens:,} tokens are over max_model_len {longest:,}"
        faults.append(text)
    return longest


def _notes(asked: Asked, shape: ModelShape) -> tuple[str, ...]:
    longest, most = asked.max_model_len, shape.max_position
    if longest is None or most is None or longest <= most:
        return ()
    return (f"max_model_len {longest:,} is over the model's {most:,}: vLLM refuses it by default",)


def model_of(asked: Asked) -> ModelShape:
    """By inline keys, by the path of a config.json or its folder, or by catalogue name."""
    name = asked.model
    if asked.shape is not None:
        shape = inline_model(name or "inline", asked.shape)
    elif name is None:
        raise ConfigError(["model: is missing: a catalogue name, or the path of a config.json"])
    elif _is_path(name):
        shape = read_hf_config(Path(name))
    else:
        try:
            shape = find_model(name)
        except ConfigError as error:
            text = "; or give the path of its config.json"
            raise ConfigError([fault + text for fault in error.faults]) from None
    return _quantized(_typed(shape, asked.dtype), asked.quantization)


def _is_path(name: str) -> bool:
    try:
        is_there = Path(name).exists()
    except (OSError, ValueError):  # a name too long, a null byte
        is_there = False
    return is_there or name.endswith(".json") or name.startswith((".", "/", "~"))


def _typed(shape: ModelShape, dtype: str) -> ModelShape:
    """auto: as published, but 16 bits where that is 32, as vLLM has it."""
    asked = _one_of("dtype", dtype, DTYPES)
    return replace(shape, dtype=asked or ("fp16" if shape.dtype == "fp32" else shape.dtype))


def _quantized(shape: ModelShape, method: str | None) -> ModelShape:
    if method is None or method in AS_PUBLISHED:
        return shape
    name = FORMATS.get(method, method)
    if shape.quantization and name.partition("-")[0] == shape.quantization.name.partition("-")[0]:
        return shape  # the checkpoint's own figures, of the same method
    return replace(shape, quantization=find_quantization(name))


def gpu_of(asked: Asked) -> Gpu:
    """The catalogue's GPU, by any spelling of its name that is one GPU's; a figure from a log goes
    before its memory, and is enough without a name."""
    name, given = asked.gpu, asked.gpu_memory_gib
    if name is None and given is None:
        raise ConfigError([f"--gpu: is missing; one of {', '.join(gpu_names())}"])
    if name is None:
        return Gpu(f"GPU of {given:g} GiB", given)
    gpu = find_gpu(_gpu_name(name))
    return gpu if given is None else gpu._replace(memory_gib=given, source="given")


def _gpu_name(name: str) -> str:
    wanted = re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", ""))
    by_plain = {key.replace("-", ""): key for key in gpu_names()}
    if wanted in by_plain:
        return by_plain[wanted]
    holding = [key for plain, key in by_plain.items() if wanted and wanted in plain]
    if len(holding) > 1:
        raise ConfigError([f"gpu: {name!r} may be {', '.join(holding)}: give one of them"])
    within = [plain for plain in by_plain if plain in wanted]
    if holding or within:
        return holding[0] if holding else by_plain[max(within, key=len)]
    return name


def engine_of(name: str | None) -> tuple[str, str]:
    """The preset's name, and the label to print, of vllm@VERSION; None: the newest preset."""
    if name is None:
        newest = engine_names()[-1]
        return newest, f"{newest.replace('-', '@')} or later"
    kind, _, version = name.partition("@")
    if kind != "vllm" or not version:
        raise ConfigError([f"engine: {name!r} is not vllm@VERSION, as vllm@0.19"])
    return engine_of_version(version), name


def _one_of(key: str, value: str, allowed: dict[str, Any]) -> Any:
    if value in allowed:
        return allowed[value]
    near = difflib.get_close_matches(value, allowed, n=1, cutoff=0.0)[0]
    text = f"{key}: {value!r} is not one of {', '.join(allowed)}; nearest is {near!r}"
    raise ConfigError([text])
