"""Shapes of models: the catalogue, config.json files, inline values."""

from __future__ import annotations

import json

import pytest

from kvsim.errors import ConfigError
from kvsim.memory import find_model, inline_model, kv_bytes_of, read_hf_config
from kvsim.memory.catalog import (
    engine_names,
    engine_of_version,
    find_engine,
    find_gpu,
    find_quantization,
    gpu_names,
    model_names,
)
from kvsim.memory.hf_config import shape_of
from kvsim.memory.shape import counted_params


@pytest.mark.parametrize("name", model_names())
def test_parameters_by_arithmetic_are_the_published_ones(name):
    shape = find_model(name)
    assert counted_params(shape) == pytest.approx(shape.published_params, rel=0.01)
    assert shape.source


def test_every_gpu_and_engine_of_the_catalogue_is_read():
    for name in gpu_names():
        assert find_gpu(name).source
    for name in engine_names():
        assert find_engine(name).source


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.6.3", "vllm-0.1"),
        ("0.8.5", "vllm-0.8"),
        ("v0.11.0", "vllm-0.8"),
        ("0.19.0", "vllm-0.16"),
        ("0.33", "vllm-0.21"),
    ],
)
def test_a_version_has_the_preset_of_its_time(version, name):
    assert engine_of_version(version) == name


def test_names_are_found_as_people_paste_them():
    pasted = find_model("meta-llama/Meta-Llama-3-8B-Instruct")
    assert pasted.layers == find_model("llama-3-8b").layers
    assert find_model("Qwen/Qwen3-32B-FP8").quantization == find_quantization("fp8")
    assert find_model("Qwen/Qwen2.5-7B-Instruct-AWQ").quantization.bits == 4.15625
    assert find_model("openai/gpt-oss-20b").quantization.name == "mxfp4"


@pytest.mark.parametrize(
    ("find", "name", "near"),
    [
        (find_model, "qwen3-9b", "qwen3-8b"),
        (find_gpu, "h1000", "h100"),
        (find_engine, "vllm-0.9", "vllm-0.8"),
        (find_quantization, "mxfp5", "mxfp4"),
    ],
)
def test_a_miss_names_the_nearest(find, name, near):
    with pytest.raises(ConfigError, match=f"'{name}' is not in the catalogue; nearest is '{near}'"):
        find(name)


def test_inline_values_are_checked_key_by_key():
    values = dict(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocab=128256)
    model = inline_model("mine", values)
    assert counted_params(model) == counted_params(find_model("llama-3-8b"))
    with pytest.raises(ConfigError) as caught:
        inline_model("mine", {**values, "layers": "32", "headz": 1})
    assert sorted(fault.split(":")[0] for fault in caught.value.faults) == [
        "model.headz",
        "model.layers",
    ]
    with pytest.raises(ConfigError, match="window goes with sliding layers"):
        inline_model("mine", {**values, "window": 128})


# config.json files, facts of the published ones

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 25600, "vocab_size": 151936, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "vocab_size": 151936,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    },
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "intermediate_size": 21504, "vocab_size": 262144, "sliding_window": 1024,
    },
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
    "ffn_dim": 20480, "vocab_size": 50272, "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "params_b", "kv_bytes"),
    [
        (LLAMA, 8.03, 131_072),
        (QWEN3, 32.76, 262_144),
        (QWEN3_MOE, 30.53, 98_304),
        (GPT_OSS, 20.9, 49_152),
        (GEMMA3, 27.01, 507_904),  # of 27.43, 0.42 are the vision tower's
        (DEEPSEEK, 671.0, 70_272),
        (OPT, 12.85, 819_200),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_a_config_json_gives_parameters_and_bytes_a_token(config, params_b, kv_bytes):
    shape = shape_of(config, "config.json")
    assert counted_params(shape) == pytest.approx(params_b * 1e9, rel=0.01)
    assert kv_bytes_of(shape, 1) == kv_bytes


def test_windows_come_from_layer_types_or_from_the_family():
    windows = [layer.attention.window for layer in shape_of(GPT_OSS, "").layers]
    assert windows == [128, None] * 12
    gemma = [layer.attention.window for layer in shape_of(GEMMA3, "").layers]
    assert gemma.count(1024) == 52
    assert gemma[5::6] == [None] * 10
    idle = {**QWEN3, "sliding_window": 4096}
    assert {layer.attention.window for layer in shape_of(idle, "").layers} == {None}


def test_a_hybrid_of_linear_attention_has_a_state():
    linear = {
        **QWEN3, "full_attention_interval": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    shape = shape_of(linear, "")
    states = [layer.attention.state_elements for layer in shape.layers]
    assert states[:4] == [32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)] * 3 + [0]
    assert kv_bytes_of(shape, 101) - kv_bytes_of(shape, 100) == 16 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("stated", "bits", "covers"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.15625, "linear"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4.3125, "linear"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, "linear"),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["layers.0.self_attn.q_proj"]},
         8, "mlp"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.127, "linear"),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"],
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
         8, "linear"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}},
         4.15625, "linear"),
    ],
)  # fmt: skip
def test_a_weight_format_is_read_with_its_scales_and_what_it_leaves_out(stated, bits, covers):
    kept = shape_of({**LLAMA, "quantization_config": stated}, "").quantization
    assert (kept.bits, kept.covers) == (pytest.approx(bits), covers)


def test_a_config_json_is_read_from_its_folder_and_faults_are_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_hf_config(tmp_path).layers == find_model("llama-3-8b").layers
    cases = {
        "{": "not JSON",
        "[]": "must be a mapping",
        json.dumps({**LLAMA, "hidden_size": "4096"}): "hidden: ",
        json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}): "vocab_size is missing",
        json.dumps({**LLAMA, "quantization_config": {"quant_method": "new"}}): "'new' is not known",
        json.dumps({**LLAMA, "layer_types": ["mamba"]}): "'mamba' is not one of",
    }
    for text, fault in cases.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=fault) as caught:
            read_hf_config(tmp_path)
        assert len(caught.value.faults) == 1
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hf_config(tmp_path / "nowhere.json")
