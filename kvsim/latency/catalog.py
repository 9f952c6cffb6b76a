"""The built-in constants of step times, by GPU and engine: kvsim/catalog/step_time.yaml."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from kvsim.errors import ConfigError
from kvsim.latency.roofline import Device, EngineCosts, Kernels

KERNEL_NAMES = tuple(field.name for field in fields(Kernels))
ENGINE_NAMES = tuple(field.name for field in fields(EngineCosts))
FACTORS = (
    "gemm_compute", "gemm_memory", "attention_memory", "attention_compute", "link_share",
    "fp8_compute", "fp8_memory", "fp8_attention_memory", "slowdown",
)  # fmt: skip
LEAST_FACTOR = 1e-6  # times are divided by shares of the data sheet, and all multiplied by slowdown


def find_device(gpu: str) -> Device:
    """ConfigError on a miss, as from the others here."""
    return device_of(_entry("gpus", gpu, "gpu")["device"])


def device_of(entry: dict[str, float]) -> Device:
    return Device(
        entry["tflops"] * 1e12,
        entry["memory_gb_s"] * 1e9,
        entry["link_gb_s"] * 1e9,
        entry["fp8_speedup"],
    )


def find_kernels(gpu: str) -> Kernels:
    entry = _entry("gpus", gpu, "gpu")
    if "kernels" not in entry:
        text = f"gpu: no step times of {gpu!r} are known; fit some with kvsim fit"
        raise ConfigError([text])
    return Kernels(**entry["kernels"])


def find_engine_costs(name: str) -> EngineCosts:
    return EngineCosts(**_entry("engines", name, "engine")["costs"])


def with_constants(
    kernels: Kernels, engine: EngineCosts, constants: dict[str, float]
) -> tuple[Kernels, EngineCosts]:
    """Both with the named constants in the place of theirs. ConfigError on an unknown name, and on
    a factor that is next to nothing."""
    known = (*KERNEL_NAMES, *ENGINE_NAMES)
    if unknown := [name for name in constants if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
        raise ConfigError([f"constants: {unknown[0]!r} is none; nearest is {near!r}"])
    if low := [name for name in FACTORS if constants.get(name, 1.0) < LEAST_FACTOR]:
        raise ConfigError(
            [f"constants.{n}: {constants[n]:g} must be at least {LEAST_FACTOR:g}" for n in low]
        )
    kept = {name: value for name, value in constants.items() if name in KERNEL_NAMES}
    rest = {name: value for name, value in constants.items() if name in ENGINE_NAMES}
    return replace(kernels, **kept), replace(engine, **rest)


def gpu_names() -> list[str]:
    return list(_file()["gpus"])


def engine_names() -> list[str]:
    return list(_file()["engines"])


def plain(name: str) -> str:
    """Spellings of one name alike: "RTX-PRO-6000" and "RTXPRO6000"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


ALIASES = {"a100": "a10080gb"}


def _entry(kind: str, name: str, what: str) -> dict[str, Any]:
    entries = _file()[kind]
    by_plain = {plain(key): key for key in entries}
    wanted = ALIASES.get(plain(name), plain(name))
    if wanted in by_plain:
        return entries[by_plain[wanted]]
    near = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=0.0)[0]
    raise ConfigError([f"{what}: {name!r} is not known; nearest is {by_plain[near]!r}"])


@cache
def _file() -> dict[str, Any]:
    text = files("kvsim").joinpath("catalog", "step_time.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
