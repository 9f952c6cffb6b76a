"""Rotary positions: the frequencies of every variant a checkpoint may ask for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_backend.config_json import Config
from kvsim.errors import UserError

KINDS = ("default", "linear", "llama3", "yarn")
CHANGING = ("dynamic", "longrope")


class Rope(NamedTuple):
    """Dimension pair i of a head turns by `inverse[i]` a position; cosines and sines are scaled
    by `attention_factor` (1 but for yarn)."""

    inverse: tuple[float, ...]  # [D / 2]
    attention_factor: float = 1.0


class Turn:
    """A rope on a device, in a dtype: what it needs is there before the first step."""

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse = torch.tensor(rope.inverse, dtype=torch.float32, device=device)
        self._factor = rope.attention_factor
        self._dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D / 2] of positions int64 [T], computed in float32 at least."""
        wide = torch.promote_types(self._dtype, torch.float32)
        angles = (positions.to(torch.float32)[:, None] * self._inverse)[:, None].to(wide)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return cos.to(self._dtype), sin.to(self._dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] turned in pairs (d, d + D / 2), as checkpoints of all families here lay them."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rope_of(config: dict[str, Any], head_size: int, where: str) -> Rope:
    """The rope of a config.json, in the spelling of transformers 5 (`rope_parameters`) or before
    (`rope_theta`, `rope_scaling`). Raises UserError."""
    whole = Config(config, where)
    given = whole.mapping("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if any(isinstance(value, dict) for value in given.values.values()):
        raise UserError(f"{given.where}: ropes that differ by layer are not supported")
    kind = given.values.get("rope_type", given.values.get("type", "default"))
    theta = (given if "rope_theta" in given.values else whole).number(
        "rope_theta", 10_000.0, above=1.0
    )
    if kind in CHANGING:
        raise UserError(
            f"{where}: rope type {kind!r} turns keys by how long their sequence has become, so "
            "cached and shared keys would change answers; supported are " + ", ".join(KINDS)
        )
    if kind not in KINDS:
        raise UserError(f"{where}: rope type {kind!r} is not one of {', '.join(KINDS)}")
    if config.get("partial_rotary_factor", given.values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor below 1 is not supported")
    plain = [theta ** (-pair / head_size) for pair in range(0, head_size, 2)]
    if kind == "linear":
        factor = given.number("factor")
        return Rope(tuple(one / factor for one in plain))
    if kind == "llama3":
        return _llama3(plain, given)
    if kind == "yarn":
        return _yarn(plain, theta, given, whole.whole("max_position_embeddings"))
    return Rope(tuple(plain))


def _llama3(plain: list[float], given: Config) -> Rope:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a ramp between."""
    original, factor = given.whole("original_max_position_embeddings"), given.number("factor")
    low = given.number("low_freq_factor")
    high = given.number("high_freq_factor", above=low)

    def stretched(frequency: float) -> float:
        waves = original * frequency / (2 * math.pi)
        share = min(max((waves - low) / (high - low), 0.0), 1.0)  # of the frequency as it is
        return frequency * (share + (1 - share) / factor)

    return Rope(tuple(map(stretched, plain)))


def _yarn(plain: list[float], theta: float, given: Config, longest: int) -> Rope:
    """Peng et al. 2023 (YaRN), section 3.2: interpolation of the dimensions that turn less than
    beta_slow times in the original context, none of those that turn more than beta_fast times;
    attention temperature by section 3.4."""
    factor, size = given.number("factor"), 2 * len(plain)
    original = given.whole("original_max_position_embeddings", longest)

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        dimension(given.number(key, default))
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if given.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    ramp = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(len(plain))]
    inverse = tuple(one * (1 - at + at / factor) for one, at in zip(plain, ramp, strict=True))

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.values.get("attention_factor") is not None:
        return Rope(inverse, given.number("attention_factor"))
    if given.values.get("mscale") and given.values.get("mscale_all_dim"):
        scales = [temperature(given.number(key)) for key in ("mscale", "mscale_all_dim")]
        return Rope(inverse, scales[0] / scales[1])
    return Rope(inverse, temperature(1.0))
