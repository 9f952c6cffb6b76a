"""A simulation beside a real run: equal decisions, errors by metric, a folder of results."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner

from gpu_backend.__main__ import app
from gpu_backend.compare import Comparison, compare
from gpu_backend.compare_tables import (
    METRICS,
    errors_of,
    figures_of,
    rows_of,
    step_errors,
    summaries_of,
)
from gpu_backend.decisions import Noting, Replay, compared, replayed
from gpu_backend.trials import Steps, Trial, Variant
from kvsim.config.build import build_engine, build_route, build_workload
from kvsim.config.loading import load, read_source
from kvsim.errors import UserError
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.run import Engine, simulate
from kvsim.study.results import new_folder
from kvsim.study.tables import Run, expand
from tests.gpu_model.test_load import CONFIG

EXPERIMENT = """\
seed: 5
engine:
  max_model_len: 48
  max_num_seqs: 8
  max_num_batched_tokens: 48
  step_time: {base_ms: 1, per_seq_ms: 0, per_context_token_us: 0, per_prompt_token_ms: 0}
kv: {num_blocks: 22, block_size: 4, policy: {kind: paged}}
workload:
  kind: synthetic
  num_requests: 24
  arrivals: {kind: poisson, rate_per_s: 200}
  lengths:
    kind: joint
    prompt: {kind: uniform, low: 2, high: 20}
    output: {kind: uniform, low: 2, high: 18}
  prefixes: {prefix_tokens: [8, 8]}
compare:
  contiguous: {kv.policy: {kind: contiguous, reserve: pow2}}
  paged: {kv.policy: {kind: paged}}
  paged + sharing: {kv.policy: {kind: paged_sharing}}
  swap: {kv.policy: {kind: paged_sharing}, engine.rules: vllm-0.2, engine.chunked_prefill: false,
         workload.num_samples: 2}
"""
VARIANTS = ("contiguous", "paged", "paged + sharing", "swap")


@pytest.fixture
def tiny(tmp_path):
    """An experiment file, and the model option: some thousand parameters."""
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "x.yaml", f"model={tmp_path / 'config.json'}"


def test_every_policy_is_compared_and_every_replay_is_equal(tiny):
    file, model = tiny
    source = read_source(file, [])
    said: list[str] = []
    found = compare(source, {"model": model[6:]}, [1.2], 2, said.append)
    assert tuple(variant.name for variant in found.variants) == VARIANTS
    for variant in found.variants:
        assert [(t.load, t.seed) for t in variant.trials] == [(None, 5), (1.2, 5), (1.2, 6)]
        for trial in variant.trials:
            assert trial.replay.differences == []
            assert trial.replay.num_steps == len(trial.steps.measured_ns) > 10
            assert trial.replay.num_values > 30 * trial.replay.num_steps
            assert trial.measured["completed"] == trial.simulated["completed"] >= 20
            if trial.load is not None:
                assert trial.rate_per_s == pytest.approx(trial.load * variant.capacity_per_s)
        preemptions = sum(trial.measured["preemptions"] for trial in variant.trials)
        assert (preemptions > 0) == (variant.name != "contiguous")
    assert len(said) == 4 * (3 + 1)


def ran(file, variant: str, durations_ns: list[int]) -> tuple[Engine, Noting, Run, list]:
    """A run of a variant whose steps take these times, over and over."""
    changes = read_source(file, []).plain["compare"][variant]
    sets = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    source = read_source(file, sets)
    experiment = load(source)
    workload = build_workload(experiment, source.folder)
    noted: list[Noting] = []

    class Turns:
        def __init__(self) -> None:
            self.count = 0

        def step_ns(self, *_load: object) -> list[int]:
            self.count += 1
            return [durations_ns[self.count % len(durations_ns)]]

    def make(output_tokens: list[int]) -> Noting:
        noted.append(Noting(SimulatedExecutor(Turns(), output_tokens)))
        return noted[-1]

    def run(engine: Engine) -> Run:
        return expand(simulate(workload, engine, route=build_route(experiment.replicas)), "paper")

    engine = build_engine(experiment, workload, make)
    made = run(engine)
    return engine, noted[0], made, run


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_replay_with_other_times_takes_another_course_and_says_where(tiny, variant):
    times = [3_000_000, 11_000_000, 5_000_000]
    engine, noted, run, again = ran(tiny[0], variant, times)
    same = compared((noted, run), replayed(engine, noted.durations_ns, again))
    assert same.differences == [] and same.num_steps == len(noted.decisions)
    slower = [2 * duration_ns for duration_ns in noted.durations_ns]
    other = compared((noted, run), replayed(engine, slower, again))
    assert any("column" in text for text in other.differences) or len(other.differences) == 10
    assert all("simulated" in text or "differs" in text for text in other.differences)


def test_one_value_that_differs_is_found(tiny):
    engine, noted, run, again = ran(tiny[0], "paged", [4_000_000])
    simulated, simulated_run = replayed(engine, noted.durations_ns, again)
    decision = simulated.decisions[7]
    block = decision.tables[0][0]
    tables = ((block + 1, *decision.tables[0][1:]), *decision.tables[1:])
    simulated.decisions[7] = decision._replace(tables=tables)
    simulated_run.steps["held_blocks"][3] += 1
    found = compared((noted, run), (simulated, simulated_run))
    assert [text.split(":")[0] for text in found.differences] == ["step 7", "steps"]
    assert "held_blocks" in found.differences[1]


def figures(throughput: float, e2el_ms: float, preemptions: int) -> dict:
    found = Counter({name: 1.0 for name in METRICS})
    return dict(found) | {
        "request_throughput": throughput,
        "mean_e2el_ms": e2el_ms,
        "preemptions": preemptions,
        "kv_blocks": {"referenced": 0.5},
        "p99_tpot_ms": None,
    }


def trial(seed: int, simulated: dict, measured: dict, steps: Steps) -> Trial:
    return Trial("a", 0.5, 4.0, seed, simulated, measured, steps, Replay(3, 9, []), None)


def test_errors_are_of_pairs_and_their_median_and_range_are_told():
    steps = Steps(np.zeros((2, 5), np.int64), np.array([100, 300]), np.array([110, 270]))
    trials = [
        trial(1, figures(11.0, 900, 2), figures(10.0, 1000, 2), steps),
        trial(2, figures(19.0, 840, 0), figures(20.0, 800, 0), steps),
        trial(3, figures(30.0, 500, 3), figures(30.0, 400, 0), steps),
    ]
    comparison = Comparison({}, [Variant("a", None, 8.0, trials, None, 10)])
    errors = {(row.seed, row.metric): row.error for row in rows_of(comparison)}
    assert errors[1, "request_throughput"] == pytest.approx(0.1)
    assert errors[2, "request_throughput"] == pytest.approx(-0.05)
    assert errors[1, "preemptions"] == 0 and errors[3, "preemptions"] is None
    assert errors[1, "p99_tpot_ms"] is None
    found = {one.metric: one for one in summaries_of(comparison)}
    assert found["request_throughput"].measured == (20.0, 10.0, 30.0)
    assert found["request_throughput"].error == pytest.approx((0.0, -0.05, 0.1))
    assert found["mean_e2el_ms"].error == pytest.approx((0.05, -0.1, 0.25))
    assert found["p99_tpot_ms"].error is None
    # of single steps +10 % and -10 %, of the sums 380 for 400
    assert step_errors(trials) == pytest.approx((0.1, -0.05))
    (line,) = figures_of(comparison)
    assert line == (
        "a", "0.5", "4.00", "20.00 [10.00, 30.00]", "19.00 [11.00, 30.00]", "800 [400, 1,000]",
        "840 [500, 900]", "0 [0, 2]", "2 [0, 3]",
    )  # fmt: skip
    (line,) = errors_of(comparison)
    assert line[2] == "+0.0 [-5.0, +10.0]" and line[-2:] == ("10.0", "-5.0")


def test_a_folder_is_written_whole_and_another_run_of_it_gives_the_same_simulation(tiny):
    file, model = tiny
    out = file.parent / "out"
    name = 'compare={"paged | a\\nb": {kv.policy: {kind: paged}}}'
    sets = ["--set", name, "--executor-set", model]
    command = ["compare", str(file), *sets, "--rates", "0.8", "--repeats", "1", "-o", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "0 differences" in result.output
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names == {
        "compare.csv", "compare.json", "compare.md", "config.yaml", "step_time.yaml", "steps.csv",
        "charts/measured.png", "charts/measured.svg", "charts/step_time.png",
        "charts/step_time.svg",
    }  # fmt: skip
    page = (out / "compare.md").read_text()
    assert r"| paged \| a b | 0.8 |" in page and "paged | a" not in page
    told = json.loads((out / "compare.json").read_text())
    assert {"cpu", "cores", "clock", "torch", "triton", "kvsim"} <= told["environment"].keys()
    (variant,) = told["variants"]
    last = variant["trials"][-1]
    with (out / "compare.csv").open() as rows:
        errors = [row for row in csv.DictReader(rows) if row["metric"] == "request_throughput"]
    assert float(errors[-1]["simulated"]) == last["simulated"]["request_throughput"]
    again = read_source(
        out / "config.yaml",
        [
            f"engine.step_time={json.dumps(last['step_time'])}",
            f"workload.arrivals.rate_per_s={last['rate_per_s']!r}",
            f"seed={last['seed']}",
        ],
    )
    experiment = load(again)
    workload = build_workload(experiment, again.folder)
    log = simulate(
        workload, build_engine(experiment, workload), route=build_route(experiment.replicas)
    )
    run = expand(log, "paper")
    seconds = (log.end_ns - int(run.requests["arrival_ns"].min())) / 1e9
    assert 24 / seconds == last["simulated"]["request_throughput"]

    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError) and "already exists" in str(result.exception)
    with new_folder(out, overwrite=True) as folder:  # may be replaced: all of it is ours
        (folder / "compare.json").write_text("{}")
    with pytest.raises(UserError, match="not a results folder"), new_folder(out, overwrite=True):
        pass


@pytest.mark.parametrize(
    ("change", "rates", "said"),
    [
        ("workload.arrivals={kind: all_at_once}", "1", "must be poisson or gamma"),
        ("replicas.count=2", "1", "replicas.count: 2: must be 1"),
        ("sweep={seed: [1, 2]}", "1", "sweep: rates are given by --rates"),
        (
            "workload={kind: synthetic, duration_s: 3, arrivals: {kind: poisson, rate_per_s: 9}, "
            "lengths: {kind: preset, name: alpaca, scale: 0.01}}",
            "1",
            "all_at_once need num_requests",
        ),
        ("seed=1", "0.5,x", "--rates 0.5,x: must be numbers from 0.001 to 100"),
        ("seed=1", "-1", "--rates -1: must be numbers from"),
        ("compare={'': {seed: 1}}", "1", "compare.''.[key]: '': String should have at least 1"),
        ("seed=9223372036854775807", "1", "seed: 9223372036854775809: should be less than"),
        ("kv.num_blocks=1", "1", "none of its 24 requests is finished"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tiny, change, rates, said):
    command = ["compare", str(tiny[0]), "--set", change, "--rates", rates]
    result = CliRunner().invoke(app, [*command, "-o", str(tiny[0].parent / "out")])
    assert isinstance(result.exception, UserError) and said in str(result.exception)
    assert not (tiny[0].parent / "out").exists()


def test_a_comparison_that_is_ended_leaves_nothing(tiny):
    file, model = tiny
    command = [sys.executable, "-m", "gpu_backend", "compare", str(file), "--executor-set", model]
    out = file.parent / "results"
    running = subprocess.Popen(
        [*command, "--repeats", "100", "-o", str(out / "x")], stderr=subprocess.PIPE, text=True
    )
    while not (out.exists() and any(out.iterdir())):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.05)
    running.terminate()
    _, said = running.communicate(timeout=60)
    assert running.returncode not in (0, -signal.SIGTERM) and "Traceback" not in said
    assert not list(out.iterdir())


def test_an_option_without_a_value_is_refused(tiny):
    command = ["compare", str(tiny[0]), "--executor-set", "model"]
    result = CliRunner().invoke(app, [*command, "-o", str(tiny[0].parent / "out")])
    assert str(result.exception) == "--executor-set model: give it as KEY=VALUE"
