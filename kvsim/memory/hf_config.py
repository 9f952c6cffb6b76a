"""A model's shape from its Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvsim.errors import ConfigError
from kvsim.memory.catalog import find_quantization
from kvsim.memory.entry import ModelEntry
from kvsim.memory.shape import ModelShape, Quantization

MAX_FILE_BYTES = 10_000_000
KINDS = {
    "full_attention": "full",
    "attention": "full",
    "chunked_attention": "full",  # vLLM charges Llama 4's chunked layers whole
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
UNGATED = ("opt", "phi", "falcon", "gpt_neox", "gptj", "gpt_bigcode", "starcoder2", "nemotron")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def read_hf_config(path: Path) -> ModelShape:
    """The shape that a config.json, or the one in this folder, states. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError([f"{file}: larger than {MAX_FILE_BYTES:,} bytes: not a config.json"])
        whole = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError):
        raise ConfigError([f"{file}: not JSON"]) from None
    if not isinstance(whole, dict):
        raise ConfigError([f"{file}: must be a mapping of keys"])
    return shape_of(whole, str(file))


def shape_of(whole: dict[str, Any], source: str) -> ModelShape:
    """The shape of a config.json's values; a model of several parts has it under text_config."""
    text = whole.get("text_config") or whole.get("llm_config") or whole
    config = {**whole, **text} if isinstance(text, dict) else whole
    name = str(whole.get("_name_or_path") or whole.get("model_type") or source)
    try:
        entry = ModelEntry.model_validate(_values(config, source))
        return entry.shape(name, _quantization(config, source))
    except KeyError as error:
        raise ConfigError([f"{source}: {error.args[0]} is missing"]) from None
    except ValidationError as error:
        faults = error.errors(include_url=False)
        lines = [f"{source}: {'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults]
        raise ConfigError(lines) from None
    except (TypeError, AttributeError, ValueError):
        raise ConfigError([f"{source}: a value is not of the kind its key has"]) from None


def _values(config: dict[str, Any], source: str) -> dict[str, Any]:
    pattern = _pattern(config)
    model_type = str(config.get("model_type", ""))
    is_opt = model_type == "opt"
    hidden = config["hidden_size"]
    values = {
        "hidden": hidden,
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "vocab": config["vocab_size"],
        "gated": model_type not in UNGATED,
        "tied": bool(config.get("tie_word_embeddings", is_opt or model_type.startswith("gemma"))),
        "dtype": DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16"),
        "pattern": pattern,
        "window": config.get("sliding_window") if "sliding" in pattern else None,
        "full_kv_heads": config.get("num_global_key_value_heads"),
        "full_head_dim": config.get("global_head_dim"),
        "latent": _latent(config),
        "experts": _experts(config),
        "intermediate": _dense_width(config),
        "state_elements": _state_elements(config) if "linear" in pattern else 0,
        "max_position": config.get("max_position_embeddings"),
        "learned_positions": config.get("max_position_embeddings", 0) + 2 if is_opt else 0,
        "source": source,
    }
    return {key: value for key, value in values.items() if value is not None}


def _pattern(config: dict[str, Any]) -> list[str]:
    """Kinds of layers: listed, or by the older keys of the families that have windows."""
    if types := config.get("layer_types"):
        unknown = sorted({str(kind) for kind in types} - KINDS.keys())
        if unknown:
            allowed = ", ".join(KINDS)
            raise ConfigError([f"layer_types: {unknown[0]!r} is not one of {allowed}"])
        kinds = [KINDS[kind] for kind in types]
        return (
            kinds
            if config.get("sliding_window")
            else ["full" if k == "sliding" else k for k in kinds]
        )
    if every := config.get("full_attention_interval"):
        return ["linear"] * (every - 1) + ["full"]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"]
    if every := config.get("sliding_window_pattern"):
        return ["sliding"] * (every - 1) + ["full"]
    if config.get("model_type") in ("gemma2", "gpt_oss"):
        return ["sliding", "full"]
    if str(config.get("model_type")).startswith("gemma3"):
        return ["sliding"] * 5 + ["full"]
    if str(config.get("model_type")).startswith("qwen2"):
        return ["full"]  # only layers past max_window_layers slide, and no published model has any
    return ["sliding"]


def _latent(config: dict[str, Any]) -> dict[str, Any] | None:
    if not config.get("kv_lora_rank"):
        return None
    latent = {
        "kv_rank": config["kv_lora_rank"],
        "rope_dim": config["qk_rope_head_dim"],
        "nope_dim": config["qk_nope_head_dim"],
        "v_dim": config["v_head_dim"],
    }
    return {**latent, "q_rank": config["q_lora_rank"]} if config.get("q_lora_rank") else latent


def _num_experts(config: dict[str, Any]) -> int:
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((config[key] for key in keys if config.get(key)), 0)


def _experts(config: dict[str, Any]) -> dict[str, Any] | None:
    if (count := _num_experts(config)) <= 1:
        return None
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size")
    if shared is None:
        is_llama4 = str(config.get("model_type")).startswith("llama4")
        shared = width * (config.get("n_shared_experts") or (1 if is_llama4 else 0))
    return {
        "count": count,
        "active": config.get("num_experts_per_tok") or config.get("experts_per_token") or 1,
        "intermediate": width,
        "shared_intermediate": shared,
        "first_dense_layers": config.get("first_k_dense_replace") or 0,
        "every": config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1,
    }


def _dense_width(config: dict[str, Any]) -> int:
    """Width of the dense MLPs: of all layers, or of those that have no experts."""
    keys = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "moe_intermediate_size")
    width = next((config[key] for key in keys if config.get(key)), None)
    return width or 4 * config["hidden_size"]


def _state_elements(config: dict[str, Any]) -> int:
    """Recurrent and convolution state of a gated delta-net layer, elements a request."""
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    convolution = (config["linear_conv_kernel_dim"] - 1) * (2 * keys * key_dim + values * value_dim)
    return values * key_dim * value_dim + convolution


def _quantization(config: dict[str, Any], source: str) -> Quantization | None:
    """The weight format that quantization_config states, and what it leaves out."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return None
    method = str(stated.get("quant_method") or stated.get("quant_algo") or "").lower()
    if method in ("gptq", "awq", "gptq_marlin", "awq_marlin", "auto-round", "auto_awq"):
        bits, group = stated.get("bits") or stated.get("w_bit") or 4, stated.get("group_size", 128)
        # one 16-bit scale and one zero point of `bits` a group; -1: a group is a whole row
        overhead = (16 + bits) / group if group > 0 else 0.0
        return Quantization(f"{method}-{bits}", bits + overhead, _covers(stated))
    if method in ("bitsandbytes", "bnb"):
        name = "bnb-4bit" if stated.get("load_in_4bit") else "int8"
    elif method in ("fp8", "fbgemm_fp8", "mxfp4", "gguf"):
        name = {"fbgemm_fp8": "fp8", "gguf": "gguf-q8"}.get(method, method)
    elif method in ("compressed-tensors", "modelopt"):
        name = _compressed(stated)
    else:
        text = f"quantization_config: {method!r} is not known: fp8, gptq, awq, bitsandbytes, mxfp4"
        raise ConfigError([f"{source}: {text} and compressed-tensors are"])
    known = find_quantization(name)
    covers = known.covers if known.covers != "linear" else _covers(stated)
    return Quantization(known.name, known.bits, covers)


def _compressed(stated: dict[str, Any]) -> str:
    """The format of the weights in compressed-tensors' (or ModelOpt's) first group."""
    groups = stated.get("config_groups") or {}
    weights = next((g.get("weights") or {} for g in groups.values()), {})
    text = str(stated.get("format", "")) + str(stated.get("quant_algo", "")).lower()
    if "nvfp4" in text:
        return "nvfp4"
    if weights.get("num_bits") == 4:
        return "nvfp4" if weights.get("type") == "float" else "gptq-4bit"
    return "int8" if weights.get("type") == "int" else "fp8"


def _covers(stated: dict[str, Any]) -> str:
    """linear, or mlp where the modules left out name the attention projections."""
    keys = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    left_out = [str(module) for key in keys for module in stated.get(key) or []]
    return "mlp" if any("self_attn" in name for name in left_out) else "linear"
