"""The roofline of a step: closed forms by hand, and the bytes that the memory model counts."""

import random

import pytest

from kvsim.config.build import build_latency
from kvsim.config.models import RooflineStepTime
from kvsim.latency.demand import Gemm, Load, operators
from kvsim.latency.roofline import Device, EngineCosts, Kernels, Machine, Roofline, step_s
from kvsim.memory.catalog import find_model
from kvsim.memory.shape import embedding_params, head_params, plain_params
from kvsim.memory.weights import Parallel, bytes_a_weight, stage_weight_bytes, stages

DEVICE = Device(1e15, 1e12, 1e11)
PLAIN = Kernels(1, 1, 1, 1, 0, 0, 0, 0, 1)
NO_LOAD = Load(0, 0, 0, 0, 0)


def seconds(name, load, *, tensor=1, kernels=PLAIN, engine=None, device=DEVICE, **options):
    ops = operators(find_model(name, options.pop("quantization", None)), tensor, **options)
    return step_s(Machine(ops, device, kernels, engine or EngineCosts()), load)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize(
    "name", ["llama-3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "opt-13b", "gpt-oss-20b"]
)
def test_a_large_step_reads_every_weight_that_memory_counts(name, tensor):
    shape = find_model(name)
    (stage,) = stages(shape, 1)
    total = stage_weight_bytes(shape, stage, Parallel(tensor))
    plain = bytes_a_weight(shape, "plain")
    ends = embedding_params(shape) + (0 if shape.is_tied else head_params(shape))
    layers = total - ends * plain / tensor - 2 * shape.other_params / tensor
    layers -= plain * sum(plain_params(shape, layer) for layer in shape.layers)
    many = Load(1e7, 1e7, 0, 0, 0)
    gemms = operators(shape, tensor, has_head=False).gemms
    activations = [2 * 1e7 * g.active * (g.n + g.k) * g.count for g in gemms]
    read = sum(gemm.flops_and_bytes(many)[1] for gemm in gemms) - sum(activations)
    assert read == pytest.approx(layers, rel=1e-6)


def test_a_lone_decode_of_llama_3_8b_reads_its_weights_and_its_context():
    # 32 layers of 218,103,808 weights and a head of 128256 x 4096, 2 bytes each; activations of one
    # token; 131072 bytes of KV a token; over 1 TB/s. Compute is 1/1000 of that: its cube vanishes.
    widths = 32 * ((6144 + 4096) + 2 * 4096 + (28672 + 4096) + (4096 + 14336)) + 128256 + 4096
    moved = 2 * (32 * 218_103_808 + 128256 * 4096) + 2 * widths
    wanted = (moved + 1000 * 131_072) / 1e12
    assert seconds("llama-3-8b", Load(1, 1, 1000, 0, 0)) == pytest.approx(wanted, rel=1e-6)


def test_a_long_prompt_pays_for_its_pairs():
    load = Load(512, 0, 0, 1, 512 * (4096 + 256))
    without = load._replace(pairs=0)
    wanted = 4 * 512 * 4352 * 32 * 128 * 32 / 1e15  # 32 heads of 128, 32 layers
    assert seconds("llama-3-8b", load) - seconds("llama-3-8b", without) == pytest.approx(wanted)


def test_two_gpus_halve_the_work_and_reduce_twice_a_layer():
    load = Load(1000, 1000, 10**6, 0, 0)
    one, two = (seconds("llama-3-8b", load, tensor=n) for n in (1, 2))
    costly = Kernels(1, 1, 1, 1, 0, 0, 0, reduce_us=7, link_share=0.5)
    more = seconds("llama-3-8b", load, tensor=2, kernels=costly) - two
    link = 64 * 2 * 1 / 2 * 1000 * 4096 * 2 / 1e11  # 64 all-reduces of 1000 x 4096, halves twice
    assert more == pytest.approx(64 * 7e-6 + link)
    assert two - link < one < 2 * two  # activations are not halved


def test_the_fixed_costs_are_of_layers_steps_and_sequences():
    load = Load(107, 7, 0, 2, 0)
    kernels = Kernels(1, 1, 1, 1, 10, 20, 100)
    engine = EngineCosts(1.0, step_ms=2, seq_us=30, prompt_layer_us=5)
    more = seconds("llama-3-8b", load, kernels=kernels, engine=engine) - seconds("llama-3-8b", load)
    assert more == pytest.approx(32 * (10 + 20 + 5 + 0.7) * 1e-6 + 2e-3 + 9 * 30e-6)


def test_launches_bound_a_short_step_only():
    engine = EngineCosts(cpu_layer_us=1000)
    assert seconds("llama-3-8b", Load(1, 1, 9, 0, 0), engine=engine) == pytest.approx(0.032)
    long = Load(1, 1, 10**6, 0, 0)
    assert seconds("llama-3-8b", long, engine=engine) == seconds("llama-3-8b", long)


def test_8_bit_weights_and_kv_are_read_as_bytes():
    load = Load(1, 1, 10**5, 0, 0)
    eight = Kernels(1, 1, 1, 1, 0, 0, 0, fp8_memory=0.5, fp8_attention_memory=0.25)
    slow = Kernels(1, 0.25, 0.125, 1, 0, 0, 0)
    layers = {"has_head": False, "quantization": "fp8", "kv_bytes": 1}
    both = seconds("llama-3-8b", load, kernels=eight, **layers)
    plain = seconds("llama-3-8b", load, kernels=slow, has_head=False)
    assert plain == pytest.approx(4 * both, rel=2e-3)  # half the bytes, twice the bandwidth


def test_experts_read_are_those_that_some_token_takes():
    rng, experts, active, tokens = random.Random(0), 64, 6, 9
    drawn = [
        len({e for _ in range(tokens) for e in rng.sample(range(experts), active)})
        for _ in range(4000)
    ]
    gemm = Gemm(1, 1, 1, 1.0, "tokens", experts, active)
    _, moved = gemm.flops_and_bytes(NO_LOAD._replace(tokens=tokens))
    assert moved - 2 * tokens * active * 2 == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_latent_attention_is_bound_by_the_heads_that_share_the_latent():
    # DeepSeek-V3: 61 layers, 576 numbers a token; 128 heads of 576 + 512 multiply-adds
    base, load = Load(1, 1, 0, 0, 0), Load(1, 1, 10**5, 0, 0)
    fast = Device(1e18, 1e12, 1e11)
    for device, each in ((fast, 576 * 2 / 1e12), (DEVICE, 576 * 2 / 1e12)):
        grown = [seconds("deepseek-v3", one, device=device) for one in (base, load)]
        assert grown[1] - grown[0] == pytest.approx(61 * 10**5 * each)
    slow = Device(1e14, 1e12, 1e11)
    grown = [seconds("deepseek-v3", one, device=slow) for one in (base, load)]
    assert grown[1] - grown[0] == pytest.approx(61 * 10**5 * 2 * 128 * (576 + 512) / 1e14)


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-12b", "deepseek-v3"])
@pytest.mark.parametrize("cpu_layer_us", [0.0, 400.0])
def test_a_jump_takes_what_its_steps_take(name, cpu_layer_us):
    kernels = Kernels(0.8, 0.8, 0.9, 0.5, 30, 10, 80)
    engine = EngineCosts(1.03, 0.7, 11, 40, cpu_layer_us)
    ops = operators(find_model(name))
    machine = Machine(ops, Device(989e12, 3.35e12, 450e9), kernels, engine)
    model, seqs, context = Roofline(machine), 7, 6800
    singly = [model.step_ns(0, seqs, context + n * seqs, 0, 0, seqs, 1)[0] for n in range(400)]
    assert model.step_ns(0, seqs, context, 0, 0, seqs, 400) == singly
    wanted = step_s(machine, Load(seqs, seqs, context, 0, 0))
    assert singly[0] == pytest.approx(wanted * 1e9, rel=1e-6)


def test_a_mixed_step_is_the_formula_in_nanoseconds():
    config = RooflineStepTime(
        kind="roofline", model="Llama-3.1-8B", gpu="RTX-4090", constants={"step_ms": 3.0}
    )
    load = Load(520, 8, 9000, 1, 512 * 300)
    wanted = step_s(config.machine(), load)
    ns = build_latency(config).step_ns(512, 9, 9000, 1, 512 * 300, 0, 1)
    assert ns[0] == pytest.approx(wanted * 1e9, rel=1e-6)
    assert wanted > 0.003


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"gpu": "H1000"}, "nearest is 'h100'"),
        ({"model": "llama-9b"}, "not in the catalogue"),
        ({"constants": {"layer": 1.0}}, "nearest is 'layer_us'"),
        ({"engine": "vllm"}, "is not known"),
        ({"tensor_parallel_size": 3}, "does not divide .*; tensor parallel 3 does not go with"),
        ({"constants": {"gemm_compute": 0.0}}, "constants.gemm_compute: 0 must be at least 1e-06"),
        ({"constants": {"attention_memory": 1e-320}}, "constants.attention_memory"),
        ({"constants": {"slowdown": 0.0}}, "constants.slowdown: 0 must be at least"),
    ],
)
def test_a_name_that_is_not_known_or_a_share_of_nothing_is_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        RooflineStepTime(**{"kind": "roofline", "model": "llama-3-8b", "gpu": "h100", **wrong})
