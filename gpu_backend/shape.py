"""What a decoder is made of: read from a checkpoint's config.json, or the small default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_backend.config_json import Config, read_config
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
MOST_LAYERS = 10_000


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
    config = read_config(path)
    names = config.values.get("architectures") or [None]
    if not isinstance(names, list):
        raise config.fault("architectures", "not a list of names")
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{path}: architecture {names[0]!r} is not one of {known}")
    if config.values.get("quantization_config"):
        raise UserError(f"{path}: quantized weights are not supported")
    return _opt(config) if names[0].startswith("OPT") else _rotary(config, names[0])


def _rotary(config: Config, kind: str) -> Shape:
    """Llama, Mistral, Qwen2, Qwen3."""
    hidden_size, num_heads, num_kv_heads = _widths(config)
    head_size = config.whole("head_dim", hidden_size // num_heads)
    if config.values.get("head_dim") is None:
        _check_head_size(config, hidden_size, num_heads)
    if head_size % 2:
        raise UserError(f"{config.where}: heads of {head_size} have no pairs to turn by position")
    is_qwen2 = kind == "Qwen2ForCausalLM"
    has_bias = config.flag("attention_bias", False) and kind != "MistralForCausalLM"
    num_positions = config.whole("max_position_embeddings")
    if config.values.get("sliding_window") and config.flag(
        "use_sliding_window", kind == "MistralForCausalLM"
    ):  # up to there a window changes nothing
        num_positions = min(num_positions, config.whole("sliding_window"))
    return Shape(
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        ffn_size=config.whole("intermediate_size"),
        num_positions=num_positions,
        rope=rope_of(config.values, head_size, config.where),
        activation=_activation(config, "hidden_act"),
        norm_eps=config.number("rms_norm_eps"),
        has_qkv_bias=is_qwen2 or has_bias,
        has_output_bias=has_bias and not is_qwen2,
        has_ffn_bias=config.flag("mlp_bias", False) and kind == "LlamaForCausalLM",
        has_qk_norm=kind == "Qwen3ForCausalLM",
        ties_embeddings=config.flag("tie_word_embeddings", False),
    )


def _opt(config: Config) -> Shape:
    hidden_size, num_heads, _ = _widths(config)
    _check_head_size(config, hidden_size, num_heads)
    for key, needed in (
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if config.values.get(key, needed) != needed:
            raise config.fault(key, f"which is not supported: it must be {needed!r}")
    embed_size = config.whole("word_embed_proj_dim", hidden_size)
    return Shape(
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        ffn_size=config.whole("ffn_dim"),
        num_positions=config.whole("max_position_embeddings"),
        rope=None,
        activation=_activation(config, "activation_function", "relu"),
        has_qkv_bias=True,
        has_output_bias=True,
        has_ffn_bias=True,
        ties_embeddings=config.flag("tie_word_embeddings", True),
        embed_size=None if embed_size == hidden_size else embed_size,
        norms_after=not config.flag("do_layer_norm_before", True),
    )


def _widths(config: Config) -> tuple[int, int, int]:
    """Hidden size, query heads, KV heads."""
    num_heads = config.whole("num_attention_heads")
    num_kv_heads = config.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UserError(
            f"{config.where}: {num_heads} attention heads do not divide into {num_kv_heads} "
            "KV heads"
        )
    return config.whole("hidden_size"), num_heads, num_kv_heads


def _check_head_size(config: Config, hidden_size: int, num_heads: int) -> None:
    if hidden_size % num_heads:
        raise UserError(
            f"{config.where}: hidden_size {hidden_size:,} does not divide into {num_heads} heads"
        )


def _activation(config: Config, key: str, default: str | None = None) -> str:
    value = config.values.get(key, default)
    if value not in ACTIVATIONS:
        raise UserError(
            f"{config.where}: activation {value!r} is not one of {', '.join(ACTIVATIONS)}"
        )
    return value
