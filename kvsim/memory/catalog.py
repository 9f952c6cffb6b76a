"""The built-in models, GPUs, engines and weight formats by name; the nearest name on a miss."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import yaml
from pydantic import ValidationError

from kvsim.errors import ConfigError
from kvsim.memory.entry import EngineEntry, GpuEntry, ModelEntry, QuantizationEntry
from kvsim.memory.shape import ModelShape, Quantization

# words of a model's name that do not change its shape: what it was tuned for, and when
TUNED = {
    "instruct", "it", "chat", "hf", "base", "thinking", "int4", "4bit", "dynamic", "block",
    "2507", "0324", "0528", "v0.2", "v0.3", "17b", "16e",
}  # fmt: skip
# words that name a weight format; of two (GPTQ-Int8) the later
FORMATS = {
    "fp8": "fp8", "awq": "awq-4bit", "gptq": "gptq-4bit", "bnb": "bnb-4bit", "w8a8": "int8",
    "int8": "int8", "w4a16": "gptq-4bit", "nvfp4": "nvfp4", "fp4": "nvfp4",
    "quantized.w4a16": "gptq-4bit", "quantized.w8a8": "int8", "quantized.w8a16": "int8",
}  # fmt: skip
DISTILLED = {  # from DeepSeek-R1 into the shape of another
    "deepseek-r1-distill-qwen-1.5b": "r1-distill-qwen-1.5b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
}


class Gpu(NamedTuple):
    """memory_gib: all of it, as the driver reports it."""

    name: str
    memory_gib: float
    block_size: int | None = None
    large_step_defaults: bool | None = None
    source: str = "given"


def model_names() -> list[str]:
    return sorted(_file("models"))


def gpu_names() -> list[str]:
    return sorted(_file("gpus"))


def engine_names() -> list[str]:
    return list(_file("engine_memory"))


def find_model(name: str, quantization: str | None = None) -> ModelShape:
    """The catalogue's model, its weights in the named format: else the one that the name has in it
    (Qwen3-32B-FP8), else as published. ConfigError on a miss."""
    entries = _file("models")
    plain, in_name = _plain_name(name.lower().rpartition("/")[2])
    entry = ModelEntry.model_validate(entries[_key(plain, entries, "model")])
    kept = quantization or in_name or entry.quantization
    return entry.shape(name, find_quantization(kept) if kept else None)


def _plain_name(pasted: str) -> tuple[str, str | None]:
    """The name less what does not change a model's shape, and the weight format among that."""
    words = pasted.removeprefix("meta-").split("-")
    kept = [FORMATS[word] for word in words if word in FORMATS]
    plain = "-".join(word for word in words if word not in TUNED and word not in FORMATS)
    return DISTILLED.get(plain, plain), kept[-1] if kept else None


def inline_model(name: str, values: dict, quantization: str | None = None) -> ModelShape:
    """A model from the catalogue's keys as given. ConfigError with a line for each fault."""
    try:
        entry = ModelEntry.model_validate({"source": "given", **values})
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, ('model', *fault['loc'])))}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ]
        raise ConfigError(lines) from None
    kept = quantization or entry.quantization
    return entry.shape(name, find_quantization(kept) if kept else None)


def find_gpu(name: str) -> Gpu:
    entries = _file("gpus")
    entry = GpuEntry.model_validate(entries[_key(name, entries, "gpu")])
    return Gpu(
        name, entry.memory_gib, entry.block_size, entry.large_step_defaults, entry.memory_source
    )


def find_engine(name: str) -> EngineEntry:
    entries = _file("engine_memory")
    return EngineEntry.model_validate(entries[_key(name, entries, "engine")])


def engine_of_version(version: str) -> str:
    """The preset of vLLM's version, as "0.19.0": the latest whose first version is not newer."""
    wanted = _release(version)
    names = [name for name in engine_names() if _release(name.removeprefix("vllm-")) <= wanted]
    return max(names, key=lambda name: _release(name.removeprefix("vllm-")))


def _release(version: str) -> tuple[int, ...]:
    parts = version.lower().removeprefix("v").split(".")[:2]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError([f"engine: {version!r} is not a version, as 0.19.0"])
    return tuple(int(part) for part in parts)


def find_quantization(name: str) -> Quantization:
    entries = _file("quantizations")
    entry = QuantizationEntry.model_validate(entries[_key(name, entries, "quantization")])
    return Quantization(name, entry.bits, entry.covers)


def _key(name: str, entries: Iterable[str], what: str) -> str:
    """The entry of this name, whatever its case and the folder before it."""
    by_plain = {key.lower(): key for key in entries}
    plain = name.lower().rpartition("/")[2]
    if plain in by_plain:
        return by_plain[plain]
    near = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.0)[0]
    text = f"{what}: {name!r} is not in the catalogue; nearest is {by_plain[near]!r}"
    raise ConfigError([text])


@cache
def _file(name: str) -> dict:
    text = files("kvsim").joinpath("catalog", f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
