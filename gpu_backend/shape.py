"""What a decoder is made of: read from a checkpoint's config.json, or the small default."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_backend.rope import Rope, rope_of
from kvsim.errors import UserError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "OPTForCausalLM",
)
ACTIVATIONS = ("silu", "relu", "gelu")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. With `rope` its norms are RMSNorm and its feed-forward layers gated; without,
    positions are learned, norms are LayerNorm, and all linear layers have biases."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    num_positions: int  # the longest sequence
    rope: Rope | None
    activation: str = "silu"
    norm_eps: float = 1e-5
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_ffn_bias: bool = False
    has_qk_norm: bool = False
    ties_embeddings: bool = False
    embed_size: int | None = None  # of a token's embedding, where a matrix leads to hidden_size
    norms_after: bool = False  # norms follow what is added to the stream, and none is at the end

    def kv_elements(self) -> int:
        """Elements of the KV of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


SMALL = Shape(
    vocab_size=8192,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    ffn_size=1376,
    num_positions=131_072,
    rope=rope_of({}, 64, "small"),
)
"""19.5 M parameters of the Llama family: a step takes milliseconds on one CPU core."""


def read_shape(path: Path) -> Shape:
    """The shape that a config.json describes. Raises UserError."""
    config = _read_json(path)
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{path}: architecture {architecture!r} is not one of {known}")
    if config.get("quantization_config"):
        raise UserError(f"{path}: quantized weights are not supported")
    try:
        shape = _opt(config, path) if architecture.startswith("OPT") else _rotary(config, path)
    except KeyError as error:
        raise UserError(f"{path}: key {error} is missing") from None
    _check(shape, path)
    return shape


def _rotary(config: dict[str, Any], path: Path) -> Shape:
    """Llama, Mistral, Qwen2, Qwen3."""
    kind, num_heads = config["architectures"][0], config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // num_heads
    is_qwen2 = kind == "Qwen2ForCausalLM"
    has_bias = bool(config.get("attention_bias", False)) and kind != "MistralForCausalLM"
    num_positions = config["max_position_embeddings"]
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", kind == "MistralForCausalLM"):
        num_positions = min(num_positions, window)  # up to there a window changes nothing
    return Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_size=head_size,
        ffn_size=config["intermediate_size"],
        num_positions=num_positions,
        rope=rope_of(config, head_size, str(path)),
        activation=config["hidden_act"],
        norm_eps=config["rms_norm_eps"],
        has_qkv_bias=is_qwen2 or has_bias,
        has_output_bias=has_bias and not is_qwen2,
        has_ffn_bias=bool(config.get("mlp_bias", False)) and kind == "LlamaForCausalLM",
        has_qk_norm=kind == "Qwen3ForCausalLM",
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _opt(config: dict[str, Any], path: Path) -> Shape:
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    for key, needed in (
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if (value := config.get(key, needed)) != needed:
            raise UserError(f"{path}: {key} {value!r} is not supported: it must be {needed!r}")
    embed_size = config.get("word_embed_proj_dim", hidden_size)
    return Shape(
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        ffn_size=config["ffn_dim"],
        num_positions=config["max_position_embeddings"],
        rope=None,
        activation=config.get("activation_function", "relu"),
        has_qkv_bias=True,
        has_output_bias=True,
        has_ffn_bias=True,
        ties_embeddings=bool(config.get("tie_word_embeddings", True)),
        embed_size=None if embed_size == hidden_size else embed_size,
        norms_after=not config.get("do_layer_norm_before", True),
    )


def _check(shape: Shape, path: Path) -> None:
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
                 "head_size", "ffn_size", "num_positions"):  # fmt: skip
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{path}: {name} is {value!r}, not a whole number above 0")
    if shape.embed_size is not None and (
        not isinstance(shape.embed_size, int) or shape.embed_size < 1
    ):
        raise UserError(
            f"{path}: word_embed_proj_dim is {shape.embed_size!r}, not a whole number above 0"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"{path}: {shape.num_heads} attention heads do not divide into {shape.num_kv_heads} "
            "KV heads"
        )
    if shape.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{path}: activation {shape.activation!r} is not one of {known}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a mapping")
    return value
