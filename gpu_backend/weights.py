"""The parameters of a decoder: their names, sizes and values, stored or drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_backend.checkpoint import Stored, stored_tensors
from gpu_backend.shape import Shape
from kvsim.errors import UserError

Weights = dict[str, Tensor]
POSITION_OFFSET = 2
"""OPT's table of positions begins with two rows that no token uses."""
OPTIONAL = ("lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that a checkpoint may hold and a decoder not need."""


class Parameter(NamedTuple):
    """A tensor of the decoder, `parts` of a checkpoint below each other: one matrix product for
    what reads the same input. Drawn with standard deviation `deviation` around `mean`."""

    name: str
    parts: tuple[tuple[str, int], ...]  # (name in the checkpoint, rows)
    columns: int | None  # None: a vector
    mean: float = 0.0
    deviation: float = 0.0

    @property
    def size(self) -> tuple[int, ...]:
        rows = sum(rows for _, rows in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)


def parameters(shape: Shape) -> list[Parameter]:
    """Every parameter, in the order in which they are drawn."""
    return [*(_opt(shape) if shape.rope is None else _rotary(shape))]


def num_parameters(shape: Shape) -> int:
    return sum(one.num_elements for one in parameters(shape))


def drawn(shape: Shape, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
    """Random weights; the same for a shape and seed whatever the dtype and device (rounded)."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for one in parameters(shape):
        value = torch.full(one.size, one.mean)
        if one.deviation:
            value.normal_(one.mean, one.deviation, generator=generator)
        weights[one.name] = value.to(device, dtype)
    return weights


def checked(shape: Shape, folder: Path) -> dict[str, Stored]:
    """The stored tensors of a checkpoint by the names that `parameters` uses; all there, of the
    sizes that its shape says, and none besides. Raises UserError."""
    found = stored_tensors(folder)
    if not any(name.startswith("model.") for name in found):
        found = {name if name in OPTIONAL else f"model.{name}": one for name, one in found.items()}
    needed = {}
    for parameter in parameters(shape):
        for name, rows in parameter.parts:
            size = (rows,) if parameter.columns is None else (rows, parameter.columns)
            if name not in found:
                raise UserError(f"{folder}: tensor {name} is missing")
            if found[name].shape != size:
                raise UserError(
                    f"{folder}: tensor {name} is {list(found[name].shape)}, and config.json says "
                    f"{list(size)}"
                )
            needed[name] = found[name]
    for name in sorted(found.keys() - needed.keys()):
        if not name.endswith(OPTIONAL):
            raise UserError(f"{folder}: tensor {name} has no place in this architecture")
    return needed


def loaded(
    shape: Shape, found: dict[str, Stored], dtype: torch.dtype, device: torch.device
) -> Weights:
    weights = {}
    for one in parameters(shape):
        value = weights[one.name] = torch.empty(one.size, dtype=dtype, device=device)
        row = 0
        for name, rows in one.parts:
            value[row : row + rows].copy_(found[name].read())
            row += rows
    return weights


def _rotary(shape: Shape) -> Iterator[Parameter]:
    width, ffn, size = shape.hidden_size, shape.ffn_size, shape.head_size
    heads = {"q": shape.num_heads * size, "k": shape.num_kv_heads * size}
    heads["v"] = heads["k"]

    def norm(name: str, stored: str, length: int = width) -> Parameter:
        return Parameter(name, ((f"{stored}.weight", length),), None, mean=1.0)

    yield _matrix("embed", [("model.embed_tokens", shape.vocab_size)], width, 1.0)
    for i in range(shape.num_layers):
        at = f"model.layers.{i}"
        qkv = [(f"{at}.self_attn.{part}_proj", rows) for part, rows in heads.items()]
        yield norm(f"{i}.attention_norm", f"{at}.input_layernorm")
        yield from _linear(f"{i}.qkv", qkv, width, shape.has_qkv_bias)
        if shape.has_qk_norm:
            yield norm(f"{i}.q_norm", f"{at}.self_attn.q_norm", size)
            yield norm(f"{i}.k_norm", f"{at}.self_attn.k_norm", size)
        out = [(f"{at}.self_attn.o_proj", width)]
        yield from _linear(f"{i}.out", out, heads["q"], shape.has_output_bias)
        yield norm(f"{i}.ffn_norm", f"{at}.post_attention_layernorm")
        up = [(f"{at}.mlp.gate_proj", ffn), (f"{at}.mlp.up_proj", ffn)]
        yield from _linear(f"{i}.up", up, width, shape.has_ffn_bias)
        down = [(f"{at}.mlp.down_proj", width)]
        yield from _linear(f"{i}.down", down, ffn, shape.has_ffn_bias)
    yield norm("norm", "model.norm")
    if not shape.ties_embeddings:
        yield _matrix("head", [("lm_head", shape.vocab_size)], width, width**-0.5)


def _opt(shape: Shape) -> Iterator[Parameter]:
    width, ffn, decoder = shape.hidden_size, shape.ffn_size, "model.decoder"

    def norm(name: str, stored: str) -> Iterator[Parameter]:
        yield Parameter(name, ((f"{stored}.weight", width),), None, mean=1.0)
        yield Parameter(f"{name}.bias", ((f"{stored}.bias", width),), None)

    rows = shape.num_positions + POSITION_OFFSET
    embed = shape.embed_size or width
    yield _matrix("embed", [(f"{decoder}.embed_tokens", shape.vocab_size)], embed, 1.0)
    if shape.embed_size:
        yield _matrix("project_in", [(f"{decoder}.project_in", width)], embed, embed**-0.5)
        yield _matrix("project_out", [(f"{decoder}.project_out", embed)], width, width**-0.5)
    yield _matrix("positions", [(f"{decoder}.embed_positions", rows)], width, 0.1)
    for i in range(shape.num_layers):
        at = f"{decoder}.layers.{i}"
        qkv = [(f"{at}.self_attn.{part}_proj", width) for part in "qkv"]
        yield from norm(f"{i}.attention_norm", f"{at}.self_attn_layer_norm")
        yield from _linear(f"{i}.qkv", qkv, width, shape.has_qkv_bias)
        out = [(f"{at}.self_attn.out_proj", width)]
        yield from _linear(f"{i}.out", out, width, shape.has_output_bias)
        yield from norm(f"{i}.ffn_norm", f"{at}.final_layer_norm")
        yield from _linear(f"{i}.up", [(f"{at}.fc1", ffn)], width, shape.has_ffn_bias)
        yield from _linear(f"{i}.down", [(f"{at}.fc2", width)], ffn, shape.has_ffn_bias)
    if not shape.norms_after:
        yield from norm("norm", f"{decoder}.final_layer_norm")
    if not shape.ties_embeddings:
        yield _matrix("head", [("lm_head", shape.vocab_size)], embed, embed**-0.5)


def _matrix(name: str, parts: list[tuple[str, int]], columns: int, deviation: float) -> Parameter:
    stored = tuple((f"{part}.weight", rows) for part, rows in parts)
    return Parameter(name, stored, columns, deviation=deviation)


def _linear(
    name: str, parts: list[tuple[str, int]], columns: int, has_bias: bool
) -> Iterator[Parameter]:
    yield _matrix(name, parts, columns, columns**-0.5)
    if has_bias:
        yield Parameter(f"{name}.bias", tuple((f"{part}.bias", rows) for part, rows in parts), None)
