"""What a model's files get wrong is said in one line, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpu_backend import load
from gpu_backend.load import Pools, load_decoder
from gpu_backend.shape import SMALL
from gpu_backend.weights import num_parameters
from kvsim.errors import UserError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
LLAMA3_NUMBERS = (
    "original_max_position_embeddings",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
)
LAYER = "model.layers.0."
SIZES = {
    "model.embed_tokens.weight": [24, 16],
    "model.norm.weight": [16],
    "lm_head.weight": [24, 16],
    f"{LAYER}input_layernorm.weight": [16],
    f"{LAYER}post_attention_layernorm.weight": [16],
    f"{LAYER}self_attn.q_proj.weight": [16, 16],
    f"{LAYER}self_attn.k_proj.weight": [8, 16],
    f"{LAYER}self_attn.v_proj.weight": [8, 16],
    f"{LAYER}self_attn.o_proj.weight": [16, 16],
    f"{LAYER}mlp.gate_proj.weight": [24, 16],
    f"{LAYER}mlp.up_proj.weight": [24, 16],
    f"{LAYER}mlp.down_proj.weight": [16, 24],
}


def write_safetensors(path: Path, sizes: dict[str, list[int]], dtype: str = "F32") -> None:
    header, start = {}, 0
    for name, size in sizes.items():
        end = start + 4 * torch.Size(size).numel()
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(start))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", SIZES)
    return tmp_path


@pytest.fixture
def nothing_allocated(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("weights were allocated before the fault was found")

    monkeypatch.setattr(load, "drawn", refuse)
    monkeypatch.setattr(load, "loaded", refuse)


def refused(model: Path | str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        load_decoder(str(model), **({"dtype": "float32", "device": "cpu"} | options))
    (line,) = str(caught.value).splitlines()
    return line


def test_a_whole_checkpoint_is_read(folder):
    assert load_decoder(str(folder), dtype="bfloat16", device="cpu").dtype is torch.bfloat16


def test_a_config_alone_has_its_weights_drawn(folder):
    one, same, other = (
        load_decoder(str(folder / "config.json"), dtype="float32", device="cpu", seed=seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.weights["0.qkv"], same.weights["0.qkv"])
    assert not torch.equal(one.weights["0.qkv"], other.weights["0.qkv"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not one of Llama"),
        ({"architectures": None}, "architecture None is not one of"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "2 attention heads do not divide into 3 KV heads"),
        ({"hidden_act": "tanh"}, "activation 'tanh' is not one of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' turns keys by how long"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
        ({"hidden_size": float("nan")}, "hidden_size is nan, not a whole number from 1 to"),
        ({"hidden_size": "16"}, "hidden_size is '16', not a whole number"),
        ({"hidden_size": 17}, "hidden_size 17 does not divide into 2 heads"),
        ({"head_dim": 7}, "heads of 7 have no pairs to turn by position"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number"),
        ({"num_attention_heads": None}, "key 'num_attention_heads' is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a whole number from"),
        ({"vocab_size": 10**400}, "vocab_size is 1000000000000000000000000000000000000000…, not a"),
        ({"vocab_size": True}, "vocab_size is True, not a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number above 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', not a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', neither true nor"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window is 'x', not a whole"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, not a number above 1"),
        ({"rope_theta": 0}, "rope_theta is 0, not a number above 1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not a mapping"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0, not a num"),
        ({"rope_parameters": {"full_attention": {}}}, "ropes that differ by layer are not"),
        ({"rope_scaling": {"type": "llama3"}}, "key 'original_max_position_embeddings' is missing"),
        (
            {"rope_scaling": dict.fromkeys(LLAMA3_NUMBERS, 1) | {"type": "llama3"}},
            "high_freq_factor is 1, not a number above 1",
        ),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"vocab_size": 25}, "embed_tokens.weight is [24, 16], and config.json says [25, 16]"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight is missing"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(folder, nothing_allocated, change, said):
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    assert said in refused(folder)


def test_a_missing_key_is_named(folder, nothing_allocated):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["OPTForCausalLM"]}))
    assert "key 'ffn_dim' is missing" in refused(folder)


def test_files_that_are_not_whole_are_refused(folder, nothing_allocated):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "truncated: tensor" in refused(folder) and "lacks its last 10 bytes" in refused(folder)
    path.write_bytes(whole + bytes(3))
    assert "3 bytes behind its last tensor" in refused(folder)
    path.write_bytes(whole[:5])
    assert "truncated, or not a safetensors file" in refused(folder)
    path.write_bytes(whole[:100])
    assert "truncated, or not a safetensors file" in refused(folder)
    path.write_bytes((20).to_bytes(8, "little") + b"x" * 400)
    assert "not a safetensors file" in refused(folder)
    write_safetensors(path, SIZES, dtype="I32")
    assert "is I32, not one of F64" in refused(folder)
    write_safetensors(path, SIZES | {f"{LAYER}self_attn.sinks": [2]})
    assert "sinks has no place in this architecture" in refused(folder)
    path.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "not JSON: maximum recursion depth" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "not JSON" in refused(folder)
    (folder / "config.json").unlink()
    assert "cannot be read" in refused(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_offsets": [0]}, "tensor lm_head.weight has no shape or place"),
        ({"data_offsets": [0.0, 1536.0]}, "tensor lm_head.weight has no shape or place"),
        ({"data_offsets": [-1536, 0]}, "tensor lm_head.weight has no shape or place"),
        ({"data_offsets": [0, 1536]}, "does not begin where the one before it ends"),
        ({"data_offsets": [1536, 0]}, "lm_head.weight has -1,536 bytes, not 1,536"),
        ({"shape": ["24", 16]}, "tensor lm_head.weight has no shape or place"),
        ({"shape": [-24, -16]}, "tensor lm_head.weight has no shape or place"),
        ({"shape": [10**30, 16]}, "has 1,536 bytes, not 64,000,"),
        ({"shape": [16, 24]}, "lm_head.weight is [16, 24], and config.json says [24, 16]"),
        ({"dtype": ["F32"]}, "is ['F32'], not one of F64"),
        ({"dtype": None}, "is None, not one of F64"),
    ],
)
def test_a_header_that_is_not_one_is_refused(folder, nothing_allocated, change, said):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    num_header = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + num_header])
    header["lm_head.weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + num_header :])
    assert said in refused(folder)


def test_a_missing_shard_is_named(folder, nothing_allocated):
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    places = dict.fromkeys(SIZES, "part-1.safetensors")
    index.write_text(json.dumps({"weight_map": places | {"lm_head.weight": "part-2.safetensors"}}))
    assert "part-2.safetensors: missing, and model.safetensors.index.json" in refused(folder)
    index.write_text(json.dumps({"weight_map": places | {"more": "part-1.safetensors"}}))
    assert "tensor more is in none of its files" in refused(folder)
    for text in ("[]", "[" * 100_000, json.dumps({"weight_map": {"more": "../part-1"}})):
        index.write_text(text)
        assert "not an index" in refused(folder)
    index.write_text(json.dumps({"weight_map": places | {"lm_head.weight": "x" * 300}}))
    assert "xxx: missing, and model.safetensors.index.json" in refused(folder)
    index.write_text(json.dumps({"weight_map": places}))
    write_safetensors(folder / "part-1.safetensors", SIZES)
    with pytest.raises(AssertionError, match="allocated"):
        refused(folder)


def test_devices_and_dtypes_that_are_not_there_are_refused(nothing_allocated, monkeypatch):
    assert "dtype 'int8' is not one of float32" in refused("small", dtype="int8")
    assert "device 'abacus' is not one of" in refused("small", device="abacus")
    assert "device 'cuda:99' is not there" in refused("small", device="cuda:99")
    assert "device 'cpu:1' is not one of cpu, cuda" in refused("small", device="cpu:1")
    assert "neither `small` nor a folder" in refused("no-such-model")
    assert "neither `small` nor a folder" in refused("x" * 5000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "bfloat16 is not on device 'cuda'" in refused("small", device="cuda", dtype="bfloat16")


def test_what_memory_does_not_hold_is_refused(nothing_allocated, monkeypatch):
    weights, block = num_parameters(SMALL) * 4, SMALL.kv_elements() * 16 * 4
    for room, pools, said in (
        (0, Pools(8, 16), "leave no room for one block"),
        (7, Pools(8, 16), "8 blocks take 0.50 MiB, and cpu has room for 7 beside 74.27 MiB"),
        (12, Pools(8, 16, 5), "8 blocks take 0.50 MiB, and cpu has room for 7 beside"),
        (12, Pools(8, 16, 13), "kv.num_host_blocks: 13 blocks take 0.81 MiB, and the host has"),
    ):
        monkeypatch.setattr(load, "free_bytes", lambda device, n=room: weights + n * block)
        assert said in refused("small", pools=pools)


def test_a_model_that_ends_before_the_longest_request_is_refused(folder, nothing_allocated):
    assert "65 is more than the 64 positions" in refused(folder, max_model_len=65)


def test_the_small_model_is_between_10_and_50_million():
    assert 10e6 < num_parameters(SMALL) < 50e6
