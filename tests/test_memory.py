"""Memory of a serving GPU: worked examples of planners' questions, closed forms, laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvsim.errors import ConfigError
from kvsim.memory import (
    Known,
    Limits,
    Parallel,
    budget,
    find_engine,
    find_gpu,
    find_model,
    inline_model,
    kv_bytes_of,
    remedies,
    request_table,
)
from kvsim.memory.activation import Step, forward_bytes, logits_bytes
from kvsim.memory.budget import NO_BLOCKS, NO_WARM_UP, STARTS, TOO_LONG
from kvsim.memory.kv import layout
from kvsim.memory.printed import Printed, findings
from kvsim.memory.weights import stage_weight_bytes, stages

GIB = 2**30
H100 = find_gpu("h100")
V0, V1, V019, V021 = (find_engine(f"vllm-{n}") for n in ("0.1", "0.8", "0.16", "0.21"))
ONE = Parallel()


def weights_gib(shape, parallel=ONE):
    (stage,) = stages(shape, 1)
    return stage_weight_bytes(shape, stage, parallel) / GIB


# The questions (published worked answers)


def test_five_people_with_128k_each_on_a_70b_model():
    model = find_model("llama-3-70b")
    assert kv_bytes_of(model, 1) == 327_680
    assert kv_bytes_of(model, 131_072) / GIB == 40.0
    assert 5 * kv_bytes_of(model, 131_072, "fp8") / GIB == 100.0
    assert weights_gib(find_model("llama-3-70b", "int8-all")) == pytest.approx(65.7, abs=0.05)
    assert weights_gib(find_model("llama-3-70b", "int6-all")) == pytest.approx(49.3, abs=0.05)


def test_a_405b_model_at_120k():
    model = find_model("llama-3.1-405b")
    assert kv_bytes_of(model, 1) == 516_096
    assert kv_bytes_of(model, 120_000) / GIB == pytest.approx(57.7, abs=0.05)
    # the start error of the question: a pool of 17,840 tokens, asked for 131,072
    found = findings(Printed(tokens=17_840, max_model_len=131_072))
    assert [finding.kind for finding in found] == ["fails"]


def test_a_7b_models_token_is_57_344_bytes_whatever_its_weights():
    for quantization in (None, "gptq-4bit", "fp8"):
        assert kv_bytes_of(find_model("qwen2.5-7b", quantization), 1) == 57_344


# The stories


@pytest.mark.parametrize(("tokens", "printed"), [(20_000, 2.07), (29_000, 2.99)])
def test_activation_grows_with_an_unchunked_profile(tokens, printed):
    model = find_model("llama-3.1-8b")
    out = budget(model, find_gpu("rtx-3090"), ONE, V0, Limits(tokens))
    assert out.activation.gib == pytest.approx(printed, abs=0.03)
    assert "one whole prompt" in out.activation.how


@pytest.mark.parametrize("tokens", [35_000, 45_000])
def test_a_longer_limit_starts_where_a_shorter_one_does_not(tokens):
    model, card = find_model("llama-3.1-8b"), find_gpu("rtx-3090")
    assert budget(model, card, ONE, V0, Limits(29_000)).outcome == TOO_LONG
    chunked = budget(model, card, ONE, V0, Limits(tokens))
    assert chunked.step.tokens == 2048
    assert chunked.activation.gib < 1.3


def test_a_negative_pool_is_negative_and_comes_with_remedies():
    # 8 GB card: 5.60 - 5.20 - 1.42 = -1.05 GiB printed
    given = (
        find_model("qwen2.5-7b", "awq-4bit"),
        find_gpu("rtx-4060-8gb"),
        ONE,
        V0,
        Limits(4096, 0.7),
    )
    out = budget(*given, Known(weights_gib=5.2032))
    assert out.kv.gib == pytest.approx(-1.05, abs=0.1)
    assert (out.pool.num_blocks, out.outcome) == (0, NO_BLOCKS)
    found = remedies(*given, Known(weights_gib=5.2032))
    assert len(found) >= 3
    assert found[0].starts
    assert found[0].change == "gpu_memory_utilization 0.95"
    assert found[0].kv_gib == pytest.approx(out.kv.gib + 0.25 * 8.0)
    assert [one.starts for one in found] == sorted((one.starts for one in found), reverse=True)


def test_logits_of_the_warm_up_are_the_published_786_mib():
    assert logits_bytes(find_model("gpt-oss-20b"), Step(8192, 1024, "")) / 2**20 == 785.5


def test_a_pool_that_leaves_nothing_fails_in_warm_up():
    model = find_model("llama-3.1-8b")
    assert budget(model, H100, ONE, V019, Limits(8192, 1.0)).outcome == NO_WARM_UP
    assert budget(model, H100, ONE, V019, Limits(8192, 0.95)).outcome == STARTS
    eager = Limits(8192, 1.0, enforce_eager=True)
    assert budget(model, H100, ONE, V019, eager).outcome == STARTS


def test_70b_in_fp8_does_not_serve_16k_on_one_80_gb_card():
    model = find_model("llama-3.3-70b", "fp8")
    out = budget(model, H100, ONE, V1, Limits(16_384, 0.95))
    assert out.outcome == TOO_LONG
    # a planner that forgot all but the weights was 3.38 GiB off
    assert out.usable.gib - out.weights.gib - out.kv.gib == pytest.approx(3.38, abs=0.5)


def test_the_smaller_rank_decides_and_the_loss_is_shown():
    model, card = find_model("qwen2.5-14b"), find_gpu("rtx-4090")
    alike = budget(model, card, Parallel(2), V0, Limits(8192, 0.95))
    known = Known(free_gib=(card.memory_gib, card.memory_gib - 1.2))
    out = budget(model, card, Parallel(2), V0, Limits(8192, 0.95), known)
    assert out.rank_loss.gib == pytest.approx(1.2)
    assert out.kv.gib == pytest.approx(alike.kv.gib - 1.2)


def test_an_upgrade_changes_the_printed_tokens_and_not_the_memory():
    model, limits = find_model("gemma-4-31b", "awq-4bit"), Limits(262_144)
    old = budget(model, find_gpu("a100-80gb"), ONE, V019, limits)
    new = old.pool._replace(printed_tokens="requests")
    # vllm#43308: 9.5 times the figure, at a step budget that is not given
    assert new.tokens(262_144) / old.pool.tokens(262_144) == pytest.approx(9.5, rel=0.2)
    assert new.tokens(50_000) < new.tokens(262_144)
    assert new.requests_at_once(50_000) == old.pool.requests_at_once(50_000)


# Closed forms


def test_a_sliding_layer_stops_growing_at_its_window():
    model = find_model("gemma-3-27b")
    growth = kv_bytes_of(model, 100_001) - kv_bytes_of(model, 100_000)
    assert growth == 81_920  # 2 x 10 layers x 16 heads x 128 x 2 B
    fixed = kv_bytes_of(model, 100_000) - 100_000 * growth
    assert fixed == 436_207_616  # 2 x 52 layers x 16 heads x 128 x 1,024 x 2 B


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_a_latent_is_on_every_rank(tensor):
    model = find_model("deepseek-v3")
    cut = layout(model, model.layers, V1, Limits(4096), tensor=tensor)
    assert cut.block_bytes == 16 * 61 * 576 * 2


@pytest.mark.parametrize(("tensor", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_are_split_and_then_repeated(tensor, heads):
    model = find_model("llama-3-70b")
    cut = layout(model, model.layers, V1, Limits(4096), tensor=tensor)
    assert cut.block_bytes == 16 * 80 * 2 * heads * 128 * 2


def test_one_request_of_a_hybrid_model_needs_what_the_engine_prints():
    # gpt-oss-120b at 131,072 in steps of 1,024: 4.5 GiB of full layers and 0.04 of windows
    model = find_model("gpt-oss-120b")
    limits = Limits(131_072, max_num_batched_tokens=1024)
    pool = budget(model, H100, ONE, V1, limits).pool
    assert pool.needed_bytes(131_072) == 18 * 2048 * (131_072 + 73 * 16)
    assert f"{pool.needed_bytes(131_072) / GIB:.2f}" == "4.54"


def test_the_longest_request_fits_and_one_block_more_does_not():
    model, limits = find_model("qwen3-8b"), Limits(32_768)
    pool = budget(model, H100, ONE, V1, limits).pool._replace(kv_bytes=int(3.58 * GIB))
    longest = pool.estimated_max_len(32_768)
    assert longest % 16 == 0
    assert pool.requests_at_once(longest) >= 1 > pool.requests_at_once(longest + 1)


def test_requests_at_once_fall_with_their_length():
    model, limits = find_model("gemma-3-12b"), Limits(131_072)
    table = request_table(budget(model, H100, ONE, V1, limits).pool, [1_000, 10_000, 100_000])
    assert [row[0] for row in table] == [1_000, 10_000, 100_000]
    assert table[0][1] > table[1][1] > table[2][1] > 1


def test_a_state_costs_the_same_at_any_length():
    values = dict(
        hidden=2048, layers=4, heads=16, kv_heads=2, head_dim=256, intermediate=5632, vocab=1000,
        pattern=["linear", "linear", "linear", "full"], state_elements=500_000,
    )  # fmt: skip
    model = inline_model("mine", values)
    assert kv_bytes_of(model, 0) == 3 * 500_000 * 2
    assert kv_bytes_of(model, 1000) - kv_bytes_of(model, 0) == 1000 * 2 * 2 * 256 * 2
    cut = layout(model, model.layers, V1, Limits(4096))
    page = cut.block_bytes
    assert page >= 500_000 * 2  # a page holds a state
    assert cut.blocks_of(1, 2048) == 3 + 1


def test_layers_are_grouped_by_the_rarest_kind():
    model = find_model("gemma-3-27b")  # 52 sliding and 10 full layers
    cut = layout(model, model.layers, V1, Limits(4096))
    assert [group.window for group in cut.groups].count(1024) == 6  # the last of two layers only
    assert len(cut.groups) == 7
    assert cut.block_bytes == 10 * 16 * 2 * 16 * 128 * 2


def test_nearly_equal_kinds_are_padded_to_the_larger():
    # vLLM's example: 12 sliding and 13 full layers are two groups of 13
    model = find_model("gpt-oss-20b")
    cut = layout(model, (*model.layers, model.layers[1]), V1, Limits(4096))
    assert (len(cut.groups), cut.block_bytes) == (2, 13 * 16 * 2 * 8 * 64 * 2)


def test_an_older_engine_charges_windows_as_full_layers():
    model = find_model("gemma-3-27b")
    cut = layout(model, model.layers, V0, Limits(4096))
    assert cut.block_bytes == 62 * 16 * 2 * 16 * 128 * 2
    assert cut.blocks_of(100_000, 2048) == 6250


def test_kv_projections_are_repeated_past_the_number_of_heads():
    model = find_model("llama-3-70b")
    split = 2 * 8192 * 64 * 128 + 3 * 8192 * 28_672  # queries, output, MLP
    own_head = 2 * 8192 * 128
    layer = split / 16 + own_head + 2 * 8192
    rank = 80 * layer + 2 * 128_256 * 8192 / 16
    assert weights_gib(model, Parallel(16)) == pytest.approx(2 * rank / GIB)


def test_projections_to_the_latents_are_whole_on_every_rank():
    model = find_model("deepseek-v2-lite")
    down = 27 * 2048 * (512 + 64)
    plain = 27 * 2 * 2048 + 26 * 64 * 2048  # norms and routers
    whole = (down + plain) * 2 / GIB
    halves = 2 * weights_gib(model, Parallel(2)) - weights_gib(model)
    assert halves == pytest.approx(whole)


def test_experts_take_a_row_for_every_choice():
    model = find_model("qwen3-30b-a3b")
    row = 3 * 2048 + 8 * (3 * 768 + 2048)
    assert forward_bytes(model, model.layers[0], ONE, 100) == 100 * 2 * row


# Laws


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-20b"])
@pytest.mark.parametrize("engine", [V0, V1, V019, V021])
@pytest.mark.parametrize("parallel", [ONE, Parallel(2), Parallel(4, 2), Parallel(2, 3, 2)])
def test_the_terms_add_up(name, engine, parallel):
    out = budget(find_model(name), H100, parallel, engine, Limits(8192))
    terms = (out.weights, out.activation, out.runtime, out.communication, out.graphs, out.occupied)
    assert out.kv.gib + sum(term.gib for term in terms) == pytest.approx(out.usable.gib)
    assert out.pool.num_blocks == max(0, int(out.kv.gib * GIB) // out.pool.layout.block_bytes)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 7, 61])
def test_stages_hold_every_layer_once_and_the_last_never_most(num_stages):
    model = find_model("deepseek-v3")
    found = stages(model, num_stages)
    sizes = [len(stage.layers) for stage in found]
    assert sum(sizes) == 61
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert [stage.is_last for stage in found] == [False] * (num_stages - 1) + [True]


def test_layers_left_over_go_before_the_last_stage():
    # as vLLM cuts 30 layers into 4
    short = replace(find_model("llama-3-8b"), layers=find_model("llama-3-8b").layers[:30])
    assert [len(stage.layers) for stage in stages(short, 4)] == [7, 8, 8, 7]


def test_the_stage_with_fewest_blocks_decides():
    model, split = find_model("llama-3-70b"), Parallel(1, 3)
    weights = [stage_weight_bytes(model, stage, split) / GIB for stage in stages(model, 3)]
    assert [len(stage.layers) for stage in stages(model, 3)] == [27, 27, 26]
    out = budget(model, H100, split, V1, Limits(8192))
    assert out.weights.gib == weights[0]  # as many layers as the second, and the embeddings
    full = H100.memory_gib
    known = Known(free_gib=(full, full - 10, full))
    taken = budget(model, H100, split, V1, Limits(8192), known)
    assert taken.weights.gib == weights[1]
    assert taken.pool.num_blocks < out.pool.num_blocks


def test_data_parallel_ranks_share_experts_and_nothing_else():
    model = find_model("qwen3-30b-a3b")
    one, two = weights_gib(model), weights_gib(model, Parallel(data=2))
    experts = 48 * 128 * 3 * 2048 * 768 * 2 / GIB
    assert one - two == pytest.approx(experts / 2)
    dense = find_model("llama-3-8b")
    assert weights_gib(dense) == weights_gib(dense, Parallel(data=2))


def test_a_shorter_step_or_fewer_sequences_leave_more_for_kv():
    model = find_model("qwen3-8b")
    for engine in (V0, V1, V019, V021):
        pools = [
            budget(model, H100, ONE, engine, Limits(8192, max_num_seqs=seqs)).kv.gib
            for seqs in (16, 256, 1024)
        ]
        assert pools == sorted(pools, reverse=True)


def test_activation_of_a_token_is_the_stated_closed_form():
    model = find_model("llama-3.1-8b")
    assert forward_bytes(model, model.layers[0], ONE, 1) == 2 * 3 * (14_336 + 4_096)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization: 1.2 is not in 0..1"),
        ({"max_model_len": 0}, "max_model_len: 0 is not at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not at least 1"),
    ],
)
def test_impossible_limits_are_refused(change, text):
    limits = Limits(4096)._replace(**change)
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        budget(find_model("llama-3-8b"), H100, ONE, V1, limits)


def test_a_split_that_no_engine_takes_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="5 does not divide the 151936 padded vocabulary"):
        budget(find_model("qwen3-14b"), H100, Parallel(5), V1, Limits(4096))
    with pytest.raises(ConfigError, match="tensor parallel sizes that do: 1, 2"):
        budget(find_model("qwen2.5-7b"), H100, Parallel(8), V1, Limits(4096))
    with pytest.raises(ConfigError, match="4 layers do not fill 5 stages"):
        short = find_model("llama-3-8b")
        short = replace(short, layers=short.layers[:4])
        budget(short, H100, Parallel(1, 5), V1, Limits(4096))
