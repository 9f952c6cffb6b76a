"""kvsim decides what two schedulers written from the rules alone decide.

The oracles are first held against the golden runs, then kvsim against the oracles, on random runs
of every version. What is known to differ stands in tests of its own, each with its smallest run.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from kvsim.config import yaml_text
from kvsim.errors import UserError
from kvsim.golden import Comparison, compare
from tests import oracle_v0, oracle_v1
from tests.oracle_cases import v0_case, v1_case
from tests.oracle_v1 import VERSIONS, write_case
from tests.shared import SHARED, needs_shared

GOLDEN = SHARED / "data" / "golden"
V1_GOLDEN = sorted(path.name for path in GOLDEN.glob("v1_*"))
V0_GOLDEN = ["v0_ignored", "v0_parallel", "v0_recompute", "v0_swap"]
NO_WATERMARK = [name for name, how in VERSIONS.items() if not how.has_watermark]
MAX_STEPS = 150
V1 = {"oracle": "v1", "num_gpu_blocks": 9, "block_size": 4, "max_num_seqs": 4}
V1 |= {"max_num_batched_tokens": 16, "enable_prefix_caching": True}
V0 = {"oracle": "v0.2.0", "num_gpu_blocks": 12, "num_cpu_blocks": 20, "block_size": 4}
V0 |= {"max_num_batched_tokens": 64, "max_model_len": 64}


def trace_of(*requests: tuple, **more: object) -> list[dict]:
    """A trace of (arrival step, prompt tokens, output tokens), named a, b, c."""
    rows = []
    for name, (step, prompt, output) in zip("abcdefgh", requests, strict=False):
        row = {"request_id": name, "arrival_step": step, "prompt_tokens": prompt}
        rows.append(row | {"output_tokens": output} | more)
    return rows


SOME = trace_of((0, 5, 3), (0, 9, 4), (2, 3, 2))


def compared_v1(
    folder: Path, config: dict, trace: list[dict], max_steps: int = MAX_STEPS
) -> Comparison:
    return compare(write_case(folder, config, trace, oracle_v1.replay(config, trace, max_steps)))


def compared_v0(
    folder: Path, config: dict, trace: list[dict], max_steps: int = MAX_STEPS
) -> Comparison:
    return compare(write_case(folder, config, trace, oracle_v0.replay(config, trace, max_steps)[0]))


def assert_equal(comparison: Comparison, seed: int | None = None) -> None:
    if comparison.first is not None:
        told, row = comparison.first
        wrong = [name for name in told.keys() | row.keys() if told.get(name) != row.get(name)]
        sides = {name: (told.get(name), row.get(name)) for name in sorted(wrong)}
        pytest.fail(f"seed {seed}, step {told['step']}, oracle and kvsim: {sides}")


def read_golden(name: str) -> tuple[dict, list[dict], list[dict]]:
    folder = GOLDEN / name
    config, _ = yaml_text.parse((folder / "config.yaml").read_text())
    with (folder / "trace.csv").open(newline="") as file:
        trace = list(csv.DictReader(file))
    return config, trace, [json.loads(line) for line in (folder / "steps.jsonl").open()]


@needs_shared
@pytest.mark.parametrize("name", V1_GOLDEN)
def test_the_v1_oracle_decides_what_vllm_decided(name):
    config, trace, told = read_golden(name)
    rows = oracle_v1.replay(config, trace)
    if "log_tables" not in config:
        for row in rows:
            del row["tables"]
    assert rows == told


@needs_shared
@pytest.mark.parametrize("name", V0_GOLDEN)
def test_the_v0_oracle_decides_what_vllm_decided(name):
    config, trace, told = read_golden(name)
    assert oracle_v0.replay(config, trace) == (told, "")


@pytest.mark.parametrize("first_seed", range(0, 100, 20))
@pytest.mark.parametrize("engine", VERSIONS)
def test_random_runs_of_every_v1_version_are_equal_in_every_value(engine, first_seed, tmp_path):
    for seed in range(first_seed, first_seed + 20):
        config, trace = sidestepped(*v1_case(seed, engine))
        assert_equal(compared_v1(tmp_path, config, trace), seed)


def sidestepped(config: dict, trace: list[dict]) -> tuple[dict, list[dict]]:
    """A run without what the tests below know to differ; each line can go when its test passes."""
    config, num_blocks = dict(config), config["num_gpu_blocks"]
    share = config.get("watermark", 0)
    as_kvsim_counts = int(share * num_blocks / (num_blocks - 1) * (num_blocks - 1))
    if config["engine"] in NO_WATERMARK or as_kvsim_counts != int(share * num_blocks):
        config["watermark"] = 0.0
    longest = max(row["prompt_tokens"] for row in trace)
    if (
        not config.get("enable_chunked_prefill", True)
        and config["max_num_batched_tokens"] < longest
    ):
        config["long_prefill_token_threshold"] = 0
    return config, trace


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_random_v1_runs_reach_what_seldom_happens(engine):
    seen: Counter[str] = Counter()
    for seed in range(100):
        config, trace = v1_case(seed, engine)
        rows = oracle_v1.replay(config, trace, MAX_STEPS)
        seen["stalls"] += not rows[-1]["pre"] and not rows[-1]["dec"]
        seen["stopped by max_model_len"] += "max_model_len" in config and any(
            row["prompt_tokens"] + row["output_tokens"] > config["max_model_len"] for row in trace
        )
        for row in rows:
            seen["preemptions"] += len(row.get("prm", ()))
            seen["two preempted in a step"] += len(row.get("prm", ())) > 1
            seen["evictions"] += row.get("evict", 0)
            seen["hits"] += sum(hit > 0 for _, hit, _ in row.get("adm", ()))
            seen["hits of the resumed"] += sum(
                hit > 0 and how == "resumed" for _, hit, how in row.get("adm", ())
            )
    assert len(seen) == 7 and min(seen.values()) > 0, seen


@pytest.mark.parametrize("first_seed", range(0, 120, 20))
def test_random_runs_of_vllm_0_2_are_equal_in_every_value(first_seed, tmp_path):
    for seed in range(first_seed, first_seed + 20):
        config, trace = v0_case(seed)
        for row in trace:  # see the test of samples that end with their first token
            if row["n"] > 1:
                row["prompt_tokens"] = min(row["prompt_tokens"], config["max_model_len"] - 1)
        assert_equal(compared_v0(tmp_path, config, trace), seed)


def test_the_random_runs_of_vllm_0_2_reach_what_seldom_happens():
    seen: Counter[str] = Counter()
    for seed in range(120):
        rows, death = oracle_v0.replay(*v0_case(seed), MAX_STEPS)
        seen["deaths"] += death != ""
        for row in rows:
            seen["drops"] += len(row.get("ign", ()))
            seen["copies on write"] += row["copies"]
            seen["swaps in"] += len(row.get("swapin", ()))
            for _, how in row.get("prm", ()):
                seen[how] += 1
            seen["forks"] += sum(op[0] == "F" for op in row.get("ops", ()))
    assert len(seen) == 7 and min(seen.values()) > 0, seen


@pytest.mark.parametrize("engine", VERSIONS)
def test_a_prompt_that_never_fits_stalls_or_is_preempted_without_end(engine, tmp_path):
    config = V1 | {"engine": engine, "enable_prefix_caching": False}
    trace = trace_of((0, 5, 3), (0, 60, 4), (1, 3, 2))
    assert_equal(compared_v1(tmp_path, config, trace, 60))
    rows = oracle_v1.replay(config, trace, 60)
    assert any("prm" in row for row in rows[-4:]) == (not VERSIONS[engine].has_gate)


def test_heads_passed_over_go_back_in_reverse_order(tmp_path):
    config = V1 | {"engine": "vllm-0.11", "enable_chunked_prefill": False}
    trace = trace_of((0, 9, 3), (0, 12, 1), (0, 11, 1), (0, 10, 1), (0, 2, 1))
    assert_equal(compared_v1(tmp_path, config, trace))
    admitted = [row.get("adm", []) for row in oracle_v1.replay(config, trace)]
    assert [[name for name, _, _ in names] for names in admitted[:2]] == [["a", "e"], ["d"]]


ODD = {
    "a config of the five keys that have no default": (
        {key: V1[key] for key in V1 if key not in ("oracle", "enable_prefix_caching")},
        SOME,
    ),
    "max_model_len that is missing": (V1 | {"enable_chunked_prefill": True}, SOME),
    "blank segments": (V1, [row | {"segments": ""} for row in SOME]),
    "a segment said twice, and one of no tokens": (
        V1,
        [row | {"segments": "s:2;s:1;t:0"} for row in SOME],
    ),
    "a quoted answer that comes later": (V1, [row | {"segments": "@c:2"} for row in SOME]),
    "a trace that is not in order of arrival": (V1, SOME[::-1]),
    "idle steps between requests": (V1, trace_of((3, 5, 3), (40, 9, 4))),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_but_valid_cases_are_replayed(what, tmp_path):
    config, trace = ODD[what]
    assert_equal(compared_v1(tmp_path, config, trace))


def test_windows_line_ends_change_nothing(tmp_path):
    case = write_case(tmp_path, V1, SOME, oracle_v1.replay(V1, SOME))
    for path in case.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    assert_equal(compare(case))


@pytest.mark.parametrize("change", ["half", "three idle more"])
def test_a_run_may_be_told_in_part_and_beyond_its_end(change, tmp_path):
    rows = oracle_v1.replay(V1, SOME)
    idle = {"pre": [], "dec": [], "run": 0, "wait": 0, "used": 0, "free": 8, "tok": 0, "evict": 0}
    idle |= {"tables": {}, "free_end": 8}
    after = [{"step": rows[-1]["step"] + 1 + n} | idle for n in range(3)]
    told = {"half": rows[:2], "three idle more": rows + after}[change]
    comparison = compare(write_case(tmp_path, V1, SOME, told))
    assert comparison.num_steps == len(told)
    assert_equal(comparison)


@pytest.mark.parametrize("engine", ["vllm-0.34", "sglang", 0.33])
def test_an_engine_that_has_no_rules_is_an_error(engine, tmp_path):
    case = write_case(tmp_path, V1 | {"engine": engine}, SOME, oracle_v1.replay(V1, SOME))
    with pytest.raises(UserError, match=r"config\.yaml: engine"):
        compare(case)


# What has differed once, each with the smallest run that showed it.


@pytest.mark.parametrize("engine", NO_WATERMARK)
def test_a_watermark_means_nothing_before_0_26(engine, tmp_path):
    config = V1 | {"engine": engine, "num_gpu_blocks": 4, "watermark": 0.25}
    assert_equal(compared_v1(tmp_path, config, trace_of((0, 1, 1), (0, 5, 1))))


def test_the_watermark_is_rounded_down_once(tmp_path):
    config = V1 | {"num_gpu_blocks": 50, "block_size": 1, "watermark": 0.02}
    config["max_num_batched_tokens"] = 49
    assert_equal(compared_v1(tmp_path, config, trace_of((0, 1, 1), (0, 48, 1))))


def test_a_prompt_as_long_as_the_model_allows_ends_with_its_first_token(tmp_path):
    assert_equal(compared_v1(tmp_path, V1 | {"max_model_len": 5}, trace_of((0, 5, 3))))


def test_a_lone_prompt_longer_than_a_step_is_not_chunked_by_a_threshold(tmp_path):
    config = V1 | {"enable_chunked_prefill": False, "long_prefill_token_threshold": 1}
    assert_equal(compared_v1(tmp_path, config, trace_of((0, 17, 1)), 3))


def test_samples_that_max_model_len_ends_at_once_never_fork(tmp_path):
    config = V0 | {"max_model_len": 5}
    assert_equal(compared_v0(tmp_path, config, trace_of((0, 5, 2), n=2)))


def test_beams_and_samples_can_share_a_run(tmp_path):
    trace = trace_of((0, 5, 2), n=1, beam=0) + trace_of((0, 5, 2), n=2, beam=1)
    trace[1]["request_id"] = "b"
    common = {"copies": 0, "run": 2, "wait": 0, "swp": 0, "cpu_used": 0}
    row = {"step": 0, "kind": "prompt", "arr": ["a", "b"], "arr_seq": [0, 1]}
    row |= common | {"sched": [["a", 5], ["b", 5]], "batched": 10, "used": 4, "free": 8, "refs": 4}
    row |= {"ops": [["F", 1, 2], ["F", 1, 3], ["X", 1]], "free_end": 8}
    assert_equal(compare(write_case(tmp_path, V0, trace, [row])))


BROKEN = {
    "a pool in quotes": (V1 | {"num_gpu_blocks": "9"}, SOME),
    "a pool of the null block alone": (V1 | {"num_gpu_blocks": 1}, SOME),
    "a block of no tokens": (V1 | {"block_size": 0}, SOME),
    "an engine that is a list": (V1 | {"engine": ["vllm-0.33"]}, SOME),
    "a prompt of no tokens": (V1, trace_of((0, 0, 3))),
    "a host that is too small": (
        V0 | {"num_cpu_blocks": 1},
        trace_of((0, 20, 20), (0, 20, 20), n=2),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_case_is_an_error_in_one_line(what, tmp_path):
    config, trace = BROKEN[what]
    rows = [{"step": number} for number in range(20)]
    with pytest.raises(UserError):
        compare(write_case(tmp_path, config, trace, rows))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps.jsonl", "3\n"),
        ("steps.jsonl", '{"pre": []}\n'),
        ("config.yaml", "- a\n"),
        ("trace.csv", "request_id,arrival_step,prompt_tokens,output_tokens\na,0,3\n"),
    ],
)
def test_a_broken_file_is_an_error_in_one_line(name, text, tmp_path):
    case = write_case(tmp_path, V1, SOME, oracle_v1.replay(V1, SOME))
    (case / name).write_text(text)
    with pytest.raises(UserError):
        compare(case)
