"""Configs: what is right loads and runs again as it is, what is wrong is named, all of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.config.build import build_engine, build_workload
from kvsim.config.loading import load, points_of, read_source, resolved_text
from kvsim.engine.kv.paged import Paged
from kvsim.errors import ConfigError
from kvsim.study.runs import run_point

VALID = """\
engine: {preset: opt-13b/a100-40gb, max_num_batched_tokens: 2560, chunked_prefill: false}
kv:
  policy: {kind: paged}
workload:
  kind: synthetic
  num_requests: 20
  arrivals: {kind: poisson, rate_per_s: 4}
  lengths: {kind: preset, name: sharegpt}
"""


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> Path:
        path = tmp_path / "experiment.yaml"
        path.write_text(text)
        return path

    return written


def faults_of(path: Path, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        points_of(read_source(path, overrides or []))
    return caught.value.faults


def test_a_preset_gives_the_papers_pool(write):
    experiment = load(read_source(write(VALID)))
    assert experiment.kv.num_blocks == 983  # Kwon et al. 2023, Table 1: 15.7K slots
    assert experiment.engine.max_model_len == 2048


def test_a_presets_pool_is_kept_in_tokens_when_the_block_size_changes(write):
    experiment = load(read_source(write(VALID), ["kv.block_size=64"]))
    assert experiment.kv.num_blocks == 983 * 16 // 64


def test_a_resolved_config_resolves_to_itself(write):
    text = resolved_text(load(read_source(write(VALID))), Path(), Path())
    assert resolved_text(load(read_source(write(text))), Path(), Path()) == text


def test_every_fault_is_reported_at_once_with_line_value_and_nearest_key(write):
    path = write(
        VALID.replace("max_num_batched_tokens", "max_num_batch_tokens")
        .replace("kind: paged", "kind: pagd")
        .replace("num_requests: 20", "num_requests: none")
        .replace("rate_per_s: 4", "rate_per_s: -4")
        .replace("sharegpt", "sharegtp")
    )
    assert faults_of(path) == [
        f"{path}:1: engine.max_num_batch_tokens: 'max_num_batch_tokens' is not a key here (value "
        "2560); allowed are preset, step_time, max_model_len, max_num_seqs, "
        "max_num_batched_tokens, chunked_prefill, long_prefill_token_threshold, rules, admission, "
        "scheduling_policy, batching, "
        "jump; nearest is "
        "'max_num_batched_tokens'",
        f"{path}:3: kv.policy.kind: 'pagd' is not one of contiguous, paged, paged_sharing; "
        "nearest is 'paged'",
        f"{path}:6: workload.num_requests: 'none': should be a valid integer",
        f"{path}:7: workload.arrivals.rate_per_s: -4: should be greater than 0",
        f"{path}:8: workload.lengths.name: 'sharegtp' is not one of alpaca, azure-code, "
        "azure-conv, mooncake-conversation, sharegpt; nearest is 'sharegpt'",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("max_num_batched_tokens: 2560", "max_num_batched_tokens: 100"), "at least max_num_seqs"),
        (("max_num_batched_tokens: 2560", "max_num_batched_tokens: 2000"), "max_model_len (2048)"),
        (("preset: opt-13b/a100-40gb", "max_num_seqs: 8"), "engine.step_time: is missing"),
        (("chunked_prefill: false", "batching: static"), "static needs kv.policy.kind contiguous"),
        (("kind: paged", "kind: contiguous, reserve: fixed"), "reserve_tokens goes with"),
        (("num_requests: 20", "{}"), "num_requests or duration_s"),
    ],
)
def test_values_that_do_not_agree_are_named(write, change, said):
    text = (
        VALID.replace(*change) if change[1] != "{}" else VALID.replace("  num_requests: 20\n", "")
    )
    assert any(said in fault for fault in faults_of(write(text)))


PAPER = ["engine.rules=paper", "engine.max_num_seqs=64", "kv.policy={kind: paged_sharing}"]
BEAM = "workload.beam={width: 4, refork_probability: 0.2}"


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        (
            [BEAM],
            [
                "engine.rules: 'vllm-0.33' is not one of vllm-0.2, paper, which workload.beam "
                "needs; nearest is 'vllm-0.2'",
                "kv.policy.kind: 'paged' is not one of paged_sharing, which workload.beam needs; "
                "nearest is 'paged_sharing'",
            ],
        ),
        (
            [*PAPER, BEAM, "kv.policy={kind: contiguous, reserve: max}"],
            [
                "kv.policy.kind: 'contiguous' is not one of paged_sharing, which workload.beam "
                "needs; nearest is 'paged_sharing'"
            ],
        ),
        (
            [*PAPER, BEAM, "workload.num_samples=2"],
            [
                "workload.num_samples: 2 is not 1, which workload.beam needs: it gives the width",
            ],
        ),
        (
            [*PAPER, "workload.beam={width: 4, refork_probability: 2.0}"],
            ["workload.beam.refork_probability: 2.0: should be less than or equal to 1"],
        ),
    ],
)
def test_beams_go_with_the_papers_rules_and_blocks_that_fork(write, overrides, faults):
    said = faults_of(write(VALID), overrides)
    assert [fault.split(": ", 1)[1] for fault in said] == faults


def test_beams_come_from_the_file_to_the_requests_and_their_survival(write, tmp_path):
    source = read_source(write(VALID), [*PAPER, BEAM])
    summary = run_point(source, tmp_path / "out")
    assert summary["completed"] == 20 and summary["beams_reforked"] > 0
    assert summary["batch_size_peak"] > 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("kv.block_size", "must be key.path=value"),
        ("kv.policy.kind.er=1", "leads through"),
        ("kv.blok_size=4", "nearest is 'block_size'"),
        ("kv.policy.watermark=.nan", "finite"),
        ("seed=-1", "greater than or equal to 0"),
        ("workload=", "workload"),
    ],
)
def test_a_wrong_override_is_named(write, override, said):
    assert any(said in fault for fault in faults_of(write(VALID), [override]))


def test_an_override_replaces_a_value_deep_inside(write):
    source = read_source(write(VALID), ["workload.arrivals.rate_per_s=1e1", "kv.block_size=8"])
    experiment = load(source)
    assert experiment.workload.arrivals.rate_per_s == 10.0
    assert experiment.kv.block_size == 8


def test_sweeps_and_variants_make_a_grid_and_their_faults_name_the_point(write):
    sweep = "compare: {a: {}, b: {kv.block_size: 8}}\nsweep: {seed: [1, 2], kv.num_blocks: [9]}\n"
    points = points_of(read_source(write(VALID + sweep)))
    assert [(variant, at) for variant, at, _ in points] == [
        (name, {"seed": seed, "kv.num_blocks": 9}) for name in "ab" for seed in (1, 2)
    ]
    wrong = VALID + "compare: {a: {kv.blok: 8}}\nsweep: {seed: [x]}\n"
    said = "\n".join(faults_of(write(wrong)))
    assert "kv.blok" in said and "(in compare a: kv.blok=8, seed='x')" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("[1, 2]", "must be a mapping"),
        ("a: b: c", "not YAML"),
        ("kv: {}\nkv: {}", "'kv' stands here twice"),
        ("seed: !!python/object/apply:os.system ['touch hacked']", "tag"),
        ("!!python/name:os.system x", "tag"),
        ("seed: !!binary aGk=", "tag"),
        ("a: &a [*a]", "nested too deep"),
        ("a: " + "[" * 5000, "not YAML"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
            + "\n".join(
                f"{chr(99 + n)}: &{chr(99 + n)} [{','.join([f'*{chr(98 + n)}'] * 9)}]"
                for n in range(8)
            ),
            "too many values",
        ),
        ("\x00", "not YAML"),
        ("? [a]\n: b", "a key must be a word"),
    ],
)
def test_hostile_yaml_is_refused_in_one_line(write, tmp_path, text, said):
    os.chdir(tmp_path)
    faults = faults_of(write(text))
    assert len(faults) == 1 and said in faults[0] and "\n" not in faults[0]
    assert not (tmp_path / "hacked").exists()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00seed")
    assert "not UTF-8" in faults_of(path)[0]
    assert "cannot be read" in faults_of(tmp_path / "absent.yaml")[0]
    assert "cannot be read" in faults_of(tmp_path)[0]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.just("kind"), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = (
    "seed", "engine", "kv", "workload", "replicas", "measure", "slo", "compare", "sweep",
    "engine.preset", "engine.step_time", "engine.max_model_len", "engine.batching",
    "kv.policy", "kv.policy.kind", "kv.policy.watermark", "kv.num_blocks", "kv.block_size",
    "workload.kind", "workload.arrivals", "workload.arrivals.kind", "workload.lengths",
    "workload.lengths.kind", "workload.lengths.name", "workload.sessions", "workload.prefixes",
    "workload.num_samples", "workload.beam", "workload.beam.width", "measure.stop_s",
    "slo.ttft_ms", "compare.x", "sweep.seed",
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_at_any_key_loads_or_is_a_config_error(tmp_path_factory, key, value):
    plain = yaml.safe_load(VALID)
    *way, last = key.split(".")
    here = plain
    for name in way:
        here = here.setdefault(name, {})
    here[last] = value
    path = tmp_path_factory.mktemp("fuzz") / "x.yaml"
    path.write_text(yaml.safe_dump(plain, allow_unicode=True), encoding="utf-8")
    try:
        points_of(read_source(path))
    except ConfigError as error:
        assert all(str(path) in fault for fault in error.faults)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80), st.integers(0, len(VALID)))
def test_bytes_put_into_a_config_load_or_are_a_config_error(tmp_path_factory, data, place):
    path = tmp_path_factory.mktemp("fuzz") / "x.yaml"
    path.write_bytes(VALID[:place].encode() + data + VALID[place:].encode())
    try:
        points_of(read_source(path))
    except ConfigError as error:
        assert error.faults


RADIX = "kind: paged_sharing, prefix_index: radix"


def test_a_radix_tree_is_chosen_in_yaml_and_hash_chains_unless_it_is(write):
    text = VALID.replace("chunked_prefill: false", "chunked_prefill: true")
    policy = load(read_source(write(text.replace("kind: paged", "kind: paged_sharing")))).kv.policy
    assert (policy.prefix_caching, policy.prefix_index) == (True, "hash_chain")
    experiment = load(read_source(write(text.replace("kind: paged", RADIX))))
    kv = build_engine(experiment, build_workload(experiment, Path())).make_kv()
    assert isinstance(kv, Paged)
    assert kv.publishes_computed


def test_a_radix_tree_without_prefix_caching_is_an_error_beside_all_others(write):
    path = write(VALID.replace("kind: paged", f"{RADIX}, prefix_caching: false"))
    assert faults_of(path, ["engine.max_num_batched_tokens=2000"]) == [
        f"{path}:3: kv.policy.prefix_index: radix needs prefix_caching: true",
        f"{path} with --set: engine.max_num_batched_tokens: 2000 must be at least max_model_len "
        "(2048) with chunked_prefill: false, or a longer prompt could never be scheduled",
    ]
    path = write(VALID.replace("kind: paged", f"{RADIX}, prefix_caching: true"))
    for rules in ("vllm-0.2", "paper"):
        assert faults_of(path, [f"engine.rules={rules}"]) == [
            f"{path}:3: kv.policy.prefix_index: must be hash_chain: {rules} has no prefix caching",
            f"{path}:3: kv.policy.prefix_caching: must be false: {rules} has none",
        ]
    text = VALID.replace("kind: paged", RADIX.replace("radix", "radx"))
    assert faults_of(write(text)) == [
        f"{path}:3: kv.policy.prefix_index: 'radx' is not one of hash_chain, radix; nearest is "
        "'radix'"
    ]


TABLE = (
    "{kind: table, tokens: %s, ms: %s, prompt_tokens: [1, 2], prompt_ms: [1, 2], per_seq_ms: 0, "
    "per_context_token_us: 0, per_chunk_ms: 0}"
)
LINEAR_KEYS = (
    "kind, base_ms, per_seq_ms, per_context_token_us, per_prompt_token_ms, prompt_step_ms, "
    "swap_in_block_us, swap_out_block_us, copy_block_us"
)


@pytest.mark.parametrize(
    ("step_time", "said"),
    [
        (TABLE % ("[1, 2]", "[1.0, 2.0]"), "engine.step_time.per_pair_us: is missing"),
        (TABLE.replace("}", ", per_pair_us: 0}") % ("[2, 4]", "[1, 2]"), "must begin with 1"),
        (
            TABLE.replace("}", ", per_pair_us: 0}") % ("[1, 4, 4]", "[1, 2, 3]"),
            "must rise: 4 comes after 4",
        ),
        (TABLE.replace("}", ", per_pair_us: 0}") % ("[1, 4]", "[1, 2, 3]"), "2 tokens and 3 ms"),
        (
            TABLE.replace("[1, 2], prompt_ms", "[1, 1], prompt_ms").replace(
                "}", ", per_pair_us: 0}"
            )
            % ("[1, 4]", "[1, 2]"),
            "prompt_tokens must rise: 1 comes after 1",
        ),
        ("{kind: tabel}", "step_time.kind: 'tabel' is not one of linear, table"),
        ("{base_ms: 1}", f"step_time.per_seq_ms: is missing; the keys here are {LINEAR_KEYS}"),
        ("7", "engine.step_time: a mapping with a `kind` is needed, not 7"),
    ],
)
def test_a_step_time_is_linear_or_a_table_and_its_faults_are_named(write, step_time, said):
    faults = faults_of(write(VALID), [f"engine.step_time={step_time}"])
    assert any(said in fault for fault in faults)
