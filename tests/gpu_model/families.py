"""The families of checkpoints, as small models that transformers builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROTARY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
OPT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "ffn_dim": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ("Llama", ROTARY),
    "llama, 3 query heads a KV head, tied": (
        "Llama",
        ROTARY | {"hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True},
    ),
    "llama, biases": ("Llama", ROTARY | {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": (
        "Llama",
        ROTARY | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama, llama3": ("Llama", ROTARY | {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", ROTARY | {"rope_parameters": YARN}),
    "mistral": ("Mistral", ROTARY | {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", ROTARY | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", ROTARY | {"head_dim": 32}),
    "opt": ("OPT", OPT),
    "opt, norms after, narrow embeddings": (
        "OPT",
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 48},
    ),
}


def drawn_by_transformers(family: str, folder: Path) -> torch.nn.Module:
    """A model of transformers with every parameter drawn, saved in the folder."""
    transformers = pytest.importorskip("transformers")
    kind, config = FAMILIES[family]
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**config)
    ).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_(0.0, 0.3)  # they begin as zeros, and norms as ones
            elif "norm" in name:
                value.normal_(1.0, 0.2)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model
