"""The room that a request must find to enter, and the client's limit of its answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim.config.build import build_engine, build_route, build_workload
from kvsim.config.loading import load, points_of, read_source
from kvsim.engine.rules import RULES, Admission, Rules
from kvsim.errors import ConfigError, TraceError
from kvsim.sim.feed import Outcome
from kvsim.sim.run import simulate
from kvsim.study.tables import Run, expand
from kvsim.workload.traces import read_trace
from kvsim.workload.traces.native_write import write_native
from kvsim.workload.workload import Workload, columns
from tests.random_runs import random_run
from tests.test_laws import (
    assert_all_are_accounted_for,
    assert_answers_are_exact,
    assert_first_come_is_first_served,
    assert_slots_add_up,
)
from tests.test_twin import MS, assert_same_runs, simulated
from tests.twin import MAX_NUM_SEQS, Setup

NUM_CASES = 300  # for each admission
UNTIL_THE_END = Admission.FULL_PROMPT_AND_MAX_OUTPUT


def rules_of(admission: Admission, version: str = "vllm-0.33") -> Rules:
    return RULES[version]._replace(admission=admission)


def equal_requests(count: int, prompt: int, answer: int, limit: int = -1, **rest) -> Workload:
    """All at time 0."""
    lengths = (np.full(count, one, np.int64) for one in (prompt, answer))
    return columns(np.zeros(count), *lengths, max_tokens=np.full(count, limit), **rest)


def run_of(workload: Workload, setup: Setup, admission: Admission) -> Run:
    return simulated(workload, setup, jump=True, rules=rules_of(admission))["paper"]


ROOMY = Setup(num_blocks=16, max_model_len=64, max_num_seqs=64, max_num_batched_tokens=400)


@pytest.mark.parametrize(
    ("admission", "prompt", "limit", "expected"),
    [
        # 16 blocks of 4: the prompt takes ceil(prompt / 4), to the end ceil((prompt + limit) / 4)
        (Admission.FULL_PROMPT, 8, 8, 8),
        (Admission.FULL_PROMPT, 9, 8, 5),
        (UNTIL_THE_END, 8, 8, 4),
        (UNTIL_THE_END, 8, 9, 3),
        (UNTIL_THE_END, 7, 9, 4),
        (UNTIL_THE_END, 8, 40, 1),
        (UNTIL_THE_END, 1, 3, 16),
        (UNTIL_THE_END, 1, 4, 8),
        (UNTIL_THE_END, 8, -1, 1),  # without a limit an answer may fill the model's 64 tokens
    ],
)
def test_as_many_enter_at_once_as_the_pool_has_room_for(admission, prompt, limit, expected):
    workload = equal_requests(20, prompt, 3, limit)
    run = run_of(workload, ROOMY, admission)
    assert run.steps["num_running"][0] == expected
    assert (run.requests["outcome"] == Outcome.STOP).all()


def test_a_first_chunk_enters_where_a_whole_prompt_does_not():
    """Prompts of 12 blocks in a pool of 16, and 40 tokens a step: two first chunks of ten blocks
    and none left over, or one prompt and the rest of the budget unused."""
    setup = replace(ROOMY, max_num_batched_tokens=40)
    workload = columns(np.zeros(2), np.array([30, 48]), np.full(2, 2))
    by_chunk, whole = (
        run_of(workload, setup, one) for one in (Admission.CHUNK, Admission.FULL_PROMPT)
    )
    assert by_chunk.steps["num_running"][0] == 2  # 30 and 10 tokens: 8 + 3 blocks
    assert whole.steps["num_running"][0] == 1  # 8 + 12 blocks
    assert by_chunk.steps["num_prompt_tokens"][0] == 40
    assert whole.steps["num_prompt_tokens"][0] == 30


@pytest.mark.parametrize(("limit", "expected"), [(4, 3), (5, 2), (8, 2), (9, 1)])
def test_answers_that_fork_are_promised_a_block_each_for_the_copy_of_the_prompts_last(
    limit, expected
):
    """Two answers to a prompt of four tokens: twice ceil((4 + limit) / 4) blocks, and two more."""
    workload = equal_requests(6, 4, 3, limit, num_samples=np.full(6, 2))
    setup = replace(ROOMY, num_blocks={4: 18, 5: 16, 8: 16, 9: 19}[limit], can_fork=True)
    run = run_of(workload, setup, UNTIL_THE_END)
    assert run.steps["num_admitted"][0] == expected
    assert (run.requests["outcome"] == Outcome.STOP).all()


def test_who_ends_early_makes_room_for_the_next_at_once():
    """Four blocks are promised to each; the first ends after two tokens, and gives back its two."""
    workload = columns(np.zeros(3), np.full(3, 8), np.array([2, 8, 8]), max_tokens=np.full(3, 8))
    run = run_of(workload, replace(ROOMY, num_blocks=8), UNTIL_THE_END)
    assert run.requests["admitted_ns"].tolist() == [0, 0, 2 * MS]


def test_a_shared_prefix_is_promised_once():
    """A prompt of four blocks and four more to write: eight blocks, of which three are a hit."""
    workload = equal_requests(
        4,
        16,
        3,
        16,
        spans=np.array([(7, 0, 16)] * 4),
        span_offsets=np.arange(5),
    )
    alone, shared = (
        run_of(workload, replace(ROOMY, num_blocks=18, prefix_caching=caching), UNTIL_THE_END)
        for caching in (False, True)
    )
    assert alone.steps["num_running"][0] == 2  # 8 + 8
    assert shared.steps["num_running"][0] == 3  # 8 + 5 + 5


@pytest.mark.parametrize("prompt", [60, 61])
def test_a_request_that_could_not_end_in_the_whole_pool_is_refused(prompt):
    workload = equal_requests(1, prompt, 2, 4)
    setup = replace(ROOMY, max_model_len=100)
    run = run_of(workload, setup, UNTIL_THE_END)
    assert run.requests["outcome"].tolist() == [
        Outcome.STOP if prompt == 60 else Outcome.NEVER_FITS
    ]
    run = run_of(workload, setup, Admission.FULL_PROMPT)
    assert run.requests["outcome"].tolist() == [Outcome.STOP]


@pytest.mark.parametrize("admission", Admission, ids=lambda one: one.value)
def test_whoever_fits_ends_and_jumping_changes_nothing_under_any_admission(admission):
    for seed in range(NUM_CASES):
        workload, setup, threshold = random_run(seed)
        options = {"rules": rules_of(admission), "threshold": threshold}
        jumping, stepping = (
            simulated(workload, setup, jump=jump, **options)["paper"] for jump in (True, False)
        )
        assert_same_runs(jumping, stepping)
        assert_all_are_accounted_for(jumping, workload)
        assert_slots_add_up(jumping)
        assert_answers_are_exact(jumping)
        assert_first_come_is_first_served(jumping)
        assert not (jumping.requests["outcome"] == Outcome.UNFINISHED).any()
        if admission is UNTIL_THE_END:
            assert jumping.steps["num_preempted"].sum() == 0


@pytest.mark.parametrize("can_fork", [False, True])
@pytest.mark.parametrize("version", RULES)
def test_nobody_is_preempted_where_all_that_may_be_written_has_room(version, can_fork):
    for seed in range(NUM_CASES // 2):
        workload, setup, threshold = random_run(seed, can_fork=can_fork)
        rules = rules_of(UNTIL_THE_END, version)
        run = simulated(workload, setup, jump=True, rules=rules, threshold=threshold)["paper"]
        assert run.steps["num_preempted"].sum() == 0
        assert not (run.requests["outcome"] == Outcome.UNFINISHED).any()


def test_more_room_asked_is_less_harm_done():
    """A hundred requests at once on a pool that holds few: the whole load at the first step."""
    generator = np.random.default_rng(1)
    workload = columns(
        np.zeros(100),
        generator.integers(5, 40, 100),
        generator.integers(5, 40, 100),
        max_tokens=np.full(100, 40),
    )
    setup = Setup(num_blocks=30, max_model_len=80, max_num_seqs=32, max_num_batched_tokens=32)
    runs = {admission: run_of(workload, setup, admission) for admission in Admission}
    preempted = [runs[one].requests["num_preemptions"].sum() for one in Admission]
    assert list(Admission) == [Admission.CHUNK, Admission.FULL_PROMPT, UNTIL_THE_END]
    assert preempted[0] > preempted[1] > preempted[2] == 0
    again = [runs[one].requests["num_recomputed"].sum() for one in Admission]
    assert again[0] > again[1] > again[2] == 0
    together = [runs[one].steps["num_running"].mean() for one in Admission]
    assert together[1] > together[2]


def test_the_presets_of_tensorrt_llm_are_their_admissions():
    guaranteed, utilization = (
        RULES[f"trtllm-{name}"] for name in ("guaranteed-no-evict", "max-utilization")
    )
    assert guaranteed.admission is UNTIL_THE_END
    assert utilization.admission is Admission.FULL_PROMPT
    assert guaranteed._replace(admission=utilization.admission) == utilization


def test_an_answer_ends_at_max_tokens():
    wanted, limits = np.array([5, 5, 5, 5, 5]), np.array([4, 5, 6, -1, 1])
    workload = columns(np.zeros(5), np.full(5, 3), wanted, max_tokens=limits)
    run = run_of(workload, ROOMY, Admission.FULL_PROMPT)
    assert run.requests["num_generated"].tolist() == [4, 5, 5, 5, 1]
    assert run.requests["outcome"].tolist() == [
        Outcome.LENGTH,
        Outcome.STOP,
        Outcome.STOP,
        Outcome.STOP,
        Outcome.LENGTH,
    ]


def test_a_limit_lets_in_what_would_have_been_too_long_and_every_answer_of_a_request_ends_there():
    workload = columns(
        np.zeros(3),
        np.full(3, 60),
        np.array([5, 5, 9]),
        max_tokens=np.array([-1, 4, 4]),
        num_samples=np.array([1, 1, 3]),
    )
    run = run_of(workload, replace(ROOMY, num_blocks=60), Admission.FULL_PROMPT)
    assert run.requests["outcome"].tolist() == [Outcome.TOO_LONG, Outcome.LENGTH, Outcome.LENGTH]
    assert run.requests["num_generated"].tolist() == [0, 4, 12]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_limits_and_priorities_are_written_and_read(suffix, tmp_path):
    workload = equal_requests(3, 4, 9)
    workload = replace(workload, max_tokens=np.array([-1, 7, 1]), priority=np.array([0, 10**15, 2]))
    path = tmp_path / f"trace{suffix}"
    write_native(workload, path)
    read = read_trace(path)
    assert read.max_tokens.tolist() == [-1, 7, 1]
    assert read.priority.tolist() == [0, 10**15, 2]
    assert read.answer_tokens().tolist() == [9, 7, 1]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_that_say_nothing_are_not_written(suffix, tmp_path):
    path = tmp_path / f"trace{suffix}"
    write_native(equal_requests(3, 4, 9), path)
    if suffix == ".csv":
        header = path.read_text().splitlines()[0].split(",")
    else:
        header = pq.read_schema(path).names
    assert not {"max_tokens", "priority"} & set(header)
    read = read_trace(path)
    assert (read.max_tokens.tolist(), read.priority.tolist()) == ([-1] * 3, [0] * 3)


def test_blank_cells_are_no_limit_and_the_first_priority(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,max_tokens,priority\n0,4,9,,\n1,4,9,-1,3\n2,4,9,5,\n"
    )
    read = read_trace(path)
    assert read.max_tokens.tolist() == [-1, -1, 5]
    assert read.priority.tolist() == [0, 3, 0]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("-2,0", "max_tokens: '-2' is not a whole number >= -1"),
        ("1.5,0", "max_tokens: '1.5' is not a whole number >= -1"),
        ("5,-1", "priority: '-1' is not a whole number >= 0"),
        ("5,high", "priority: 'high' is not a whole number >= 0"),
    ],
)
def test_a_limit_or_priority_that_is_none_is_an_error_with_its_line(cells, said, tmp_path):
    path = tmp_path / "trace.csv"
    header = "arrival_s,prompt_tokens,output_tokens,max_tokens,priority\n"
    path.write_text(f"{header}0,4,9,3,0\n1,4,9,{cells}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"trace.csv:3: {said}"


EXPERIMENT = """\
engine:
  step_time: {base_ms: 1, per_seq_ms: 0, per_context_token_us: 0, per_prompt_token_ms: 0}
  max_model_len: 200
  max_num_batched_tokens: 300
kv:
  policy: {kind: paged}
  num_blocks: 10
  block_size: 4
workload:
  kind: synthetic
  num_requests: 200
  arrivals: {kind: all_at_once}
  lengths:
    kind: joint
    prompt: {kind: fixed, tokens: 4}
    output: {kind: fixed, tokens: 100}
"""
CLASSES = "workload.priorities=[{priority: 2, share: 3}, {priority: 7, share: 1}]"


def source_of(folder: Path, *overrides: str):
    path = folder / "experiment.yaml"
    path.write_text(EXPERIMENT)
    return read_source(path, list(overrides))


def experiment_run(folder: Path, *overrides: str) -> Run:
    experiment = load(source_of(folder, *overrides))
    workload = build_workload(experiment, folder)
    engine, route = build_engine(experiment, workload), build_route(experiment.replicas)
    return expand(simulate(workload, engine, route=route), "paper")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["engine.admission=full"],
            "engine.admission: 'full' is not one of chunk, full_prompt, full_prompt+max_output; "
            "nearest is 'full_prompt'",
        ),
        (
            ["engine.scheduling_policy=prio"],
            "engine.scheduling_policy: 'prio' is not one of fcfs, priority; nearest is 'priority'",
        ),
        (["workload.max_tokens=0"], "workload.max_tokens: 0: should be greater than or equal to 1"),
        (["workload.max_tokens=1.5"], "workload.max_tokens: 1.5: should be a valid integer"),
        (["workload.priorities=3"], "workload.priorities: 3: should be a valid list"),
        (
            ["workload.priorities=[{priority: -1, share: 1}]"],
            "workload.priorities.0.priority: -1: should be greater than or equal to 0",
        ),
        (
            ["workload.priorities=[{priority: 1, share: 1}, {priority: 2, share: 0}]"],
            "workload.priorities.1.share: 0: should be greater than 0",
        ),
        (
            ["workload.priorities=[{priority: 1}]"],
            "workload.priorities.0.share: is missing; the keys here are priority, share",
        ),
        (
            ["engine.rules=trtllm-guaranteed-no-evict", "kv.policy.watermark=0.1"],
            "kv.policy.watermark: trtllm-guaranteed-no-evict has none: it must be 0",
        ),
        (
            ["engine.rules=paper", "engine.chunked_prefill=false", "engine.admission=chunk"],
            "engine.admission: 'chunk' has no meaning under paper: leave it out",
        ),
        (
            [
                "engine.rules=vllm-0.2",
                "engine.chunked_prefill=false",
                "engine.scheduling_policy=priority",
            ],
            "engine.scheduling_policy: 'priority' has no meaning under vllm-0.2: leave it out",
        ),
    ],
)
def test_a_wrong_choice_is_an_error_in_one_line(overrides, fault, tmp_path):
    with pytest.raises(ConfigError) as caught:
        points_of(source_of(tmp_path, *overrides))
    (line,) = caught.value.faults
    assert line.endswith(fault)


def test_a_class_list_without_a_class_is_an_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        points_of(source_of(tmp_path, "workload.priorities=[]"))
    (line,) = caught.value.faults
    assert "workload.priorities: []" in line


@pytest.mark.parametrize("admission", Admission, ids=lambda one: one.value)
def test_an_admission_in_yaml_goes_before_that_of_the_rules(admission, tmp_path):
    """Ten blocks of four; a prompt of one block, and with 20 tokens to write six."""
    overrides = [f"engine.admission={admission.value}", "engine.rules=trtllm-guaranteed-no-evict"]
    run = experiment_run(tmp_path, *overrides, "workload.max_tokens=20")
    assert run.steps["num_running"][0] == (1 if admission is UNTIL_THE_END else 10)
    assert (run.requests["num_preemptions"].sum() > 0) == (admission is not UNTIL_THE_END)
    assert (run.requests["outcome"] == Outcome.LENGTH).all()
    assert (run.requests["num_generated"] == 20).all()


def test_priorities_are_drawn_by_their_shares_and_move_no_other_draw(tmp_path):
    plain = build_workload(load(source_of(tmp_path)), tmp_path)
    drawn = build_workload(load(source_of(tmp_path, CLASSES)), tmp_path)
    assert set(plain.priority) == {0}
    assert set(drawn.priority) == {2, 7}
    assert 100 < (drawn.priority == 2).sum() < 190  # of 200, 150 expected
    assert (plain.arrival_ns == drawn.arrival_ns).all()
    assert (plain.prompt_tokens == drawn.prompt_tokens).all()


def test_classes_go_one_after_the_other_under_the_policy_and_mixed_without_it(tmp_path):
    limits = [CLASSES, "workload.max_tokens=4", "engine.max_num_seqs=4"]
    priority = build_workload(load(source_of(tmp_path, *limits)), tmp_path).priority
    by_priority = experiment_run(tmp_path, *limits, "engine.scheduling_policy=priority")
    in_order = experiment_run(tmp_path, *limits)
    admitted = by_priority.requests["admitted_ns"]
    assert admitted[priority == 2].max() <= admitted[priority == 7].min()
    assert (np.diff(in_order.requests["admitted_ns"]) >= 0).all()
    assert MAX_NUM_SEQS in in_order.steps["limit"]


def test_a_limit_in_yaml_goes_before_those_of_a_trace(tmp_path):
    write_native(equal_requests(2, 4, 50, 7), tmp_path / "trace.csv")
    trace = "workload={kind: trace, path: trace.csv}"
    own = build_workload(load(source_of(tmp_path, trace)), tmp_path)
    assert own.max_tokens.tolist() == [7, 7]
    limited = ["workload={kind: trace, path: trace.csv, max_tokens: 9}"]
    assert build_workload(load(source_of(tmp_path, *limited)), tmp_path).max_tokens[0] == 9


@pytest.mark.parametrize("reserve", ["oracle", "pow2"])
def test_an_oracle_reserves_no_more_than_a_limit_leaves(reserve, tmp_path):
    """Four tokens of prompt and four of answer: two blocks a request, so five at once."""
    policy = f"kv.policy={{kind: contiguous, reserve: {reserve}, placement: first_fit}}"
    run = experiment_run(tmp_path, policy, "workload.max_tokens=4")
    assert (run.requests["outcome"] == Outcome.LENGTH).all()
    assert run.steps["num_running"][0] == 5
