"""The command line as a user types it: output, files, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = """\
engine: {preset: opt-13b/a100-40gb, max_num_batched_tokens: 2560, chunked_prefill: false}
kv: {policy: {kind: paged}}
workload:
  kind: synthetic
  num_requests: 30
  arrivals: {kind: poisson, rate_per_s: 2}
  lengths: {kind: preset, name: sharegpt}
"""


@pytest.fixture
def kvsim(tmp_path):
    (tmp_path / "x.yaml").write_text(EXPERIMENT)

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "kvsim", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def test_a_run_leaves_its_config_summary_and_tables(kvsim, tmp_path):
    done = kvsim("run", "x.yaml", "--no-charts")
    folder = tmp_path / "results" / "x"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "idle.parquet",
        "requests.parquet",
        "steps.parquet",
        "summary.json",
    ]
    assert "Successful requests" in done.stdout
    summary = json.loads((folder / "summary.json").read_text())
    requests = pq.read_table(folder / "requests.parquet").to_pandas()
    assert summary["completed"] == len(requests) == 30
    assert summary["mean_ttft_ms"] == pytest.approx(requests["ttft_ms"].mean())
    assert summary["total_output_tokens"] == requests["output_tokens"].sum()


def test_the_resolved_config_runs_again_to_the_same_bytes(kvsim, tmp_path):
    kvsim("run", "x.yaml", "--no-charts", "-o", "a")
    kvsim("run", "a/config.yaml", "--no-charts", "-o", "b")
    for name in ("summary.json", "requests.parquet", "steps.parquet", "config.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_config_of_a_trace_run_and_of_a_comparison_run_again_from_their_folders(
    kvsim, tmp_path
):
    kvsim("trace", "generate", "x.yaml", "t.csv")
    (tmp_path / "configs").mkdir()
    text = EXPERIMENT.split("workload:")[0] + "workload: {kind: trace, path: ../t.csv}\n"
    (tmp_path / "configs" / "t.yaml").write_text(text)
    quiet = ("--no-charts", "-q")
    kvsim("run", "configs/t.yaml", *quiet, "-o", "a")
    kvsim("run", "a/config.yaml", *quiet, "-o", "b/deep/er")
    assert (tmp_path / "a/summary.json").read_bytes() == (
        tmp_path / "b/deep/er/summary.json"
    ).read_bytes()
    kvsim("compare", "configs/t.yaml", *quiet, "-o", "c")
    kvsim("run", "c/config.yaml", *quiet, "-o", "d")
    assert (tmp_path / "c/points.json").read_bytes() == (tmp_path / "d/points.json").read_bytes()


def test_json_is_all_that_stands_on_stdout(kvsim):
    summary = json.loads(kvsim("run", "x.yaml", "--no-charts", "--json").stdout)
    # the keys of a result of `vllm bench serve`, less the lists that --save-detailed adds
    wanted = {
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
        "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
        "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests",
    }  # fmt: skip
    for name in ("ttft", "tpot", "itl", "e2el"):
        wanted |= {f"{mark}_{name}_ms" for mark in ("mean", "median", "std", "p90", "p95", "p99")}
    assert wanted <= set(summary)


def test_compare_sets_the_five_policies_side_by_side_over_a_sweep(kvsim, tmp_path):
    sweep = ["--set", "sweep={workload.arrivals.rate_per_s: [1, 2]}"]
    done = kvsim("compare", "x.yaml", *sweep, "-o", "c", "-j", "2")
    points = json.loads((tmp_path / "c" / "points.json").read_text())
    assert len(points) == 10
    assert {point["variant"] for point in points} == {
        "contiguous max", "contiguous pow2", "contiguous oracle", "paged", "paged + sharing",
    }  # fmt: skip
    assert "contiguous pow2" in done.stdout
    assert (tmp_path / "c" / "charts" / "waste.svg").is_file()
    assert (tmp_path / "c" / points[0]["folder"] / "steps.parquet").is_file()
    again = kvsim("plot", "c").stdout.split()
    assert sorted(again) == sorted(set(again)) and "c/charts/rate.png" in again


def test_an_existing_folder_is_kept_unless_told_otherwise(kvsim, tmp_path):
    kvsim("run", "x.yaml", "--no-charts", "-q")
    before = (tmp_path / "results/x/summary.json").read_bytes()
    refused = kvsim("run", "x.yaml", "--no-charts", "--set", "seed=1", status=1)
    assert "already exists" in refused.stderr and refused.stdout == ""
    assert (tmp_path / "results/x/summary.json").read_bytes() == before
    kvsim("run", "x.yaml", "--no-charts", "--set", "seed=1", "--overwrite", "-q")
    assert (tmp_path / "results/x/summary.json").read_bytes() != before


def test_a_foreign_folder_is_never_overwritten(kvsim, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused = kvsim("run", "x.yaml", "-o", "mine", "--overwrite", "--no-charts", status=1)
    assert "'thesis.txt', not kvsim's" in refused.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_failed_run_leaves_nothing_behind(kvsim, tmp_path):
    text = EXPERIMENT.replace("num_requests: 30", "num_requests: 0")
    (tmp_path / "bad.yaml").write_text(text)
    failed = kvsim("run", "bad.yaml", "-o", "out", status=1)
    assert "bad.yaml:5: workload.num_requests: 0" in failed.stderr
    trace = ["--set", "workload={kind: trace, path: absent.csv}"]
    assert "absent.csv" in kvsim("run", "x.yaml", *trace, "-o", "out", status=1).stderr
    assert "absent.csv" in kvsim("compare", "x.yaml", *trace, "-o", "out", status=1).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "x.yaml"]


def test_a_pool_too_small_for_anyone_refuses_everyone_and_says_so(kvsim):
    done = kvsim("compare", "x.yaml", "--set", "kv.num_blocks=1", "-o", "tiny")
    assert "requests refused, too large for the pool" in done.stdout


def test_validate_prints_the_resolved_file_or_every_fault(kvsim, tmp_path):
    assert "num_blocks: 983" in kvsim("validate", "x.yaml").stdout
    (tmp_path / "bad.yaml").write_text(EXPERIMENT.replace("kv:", "kw:") + "sed: 1\n")
    failed = kvsim("validate", "bad.yaml", status=1)
    assert failed.stderr.count("error: bad.yaml") == 3 and failed.stdout == ""


def test_init_writes_a_file_that_is_valid(kvsim, tmp_path):
    kvsim("init", "mine.yaml")
    kvsim("validate", "mine.yaml")
    assert "already exists" in kvsim("init", "mine.yaml", status=1).stderr


def test_the_schema_is_json_and_names_the_policies(kvsim):
    schema = json.loads(kvsim("schema").stdout)
    assert {"Contiguous", "Paged", "PagedSharing"} <= set(schema["$defs"])


def test_help_prints_every_definition(kvsim):
    printed = kvsim("run", "--help").stdout
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "copies_avoided", "external"):
        assert name in printed


def test_beams_and_registered_prefixes_run_again_from_their_results(kvsim, tmp_path):
    sets = (
        "engine={preset: opt-13b/a100-40gb, rules: paper, chunked_prefill: false}",
        "kv.policy={kind: paged_sharing, registered_prefixes: true}",
        "workload.prefixes={prefix_tokens: [80]}",
        "workload.beam={width: 3, refork_probability: 0.2}",
    )
    options = [part for one in sets for part in ("--set", one)]
    kvsim("run", "x.yaml", *options, "--no-charts", "-o", "a")
    kvsim("run", "a/config.yaml", "--no-charts", "-o", "b")
    for name in ("summary.json", "requests.parquet", "steps.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    refused = kvsim("trace", "generate", "x.yaml", "t.csv", *options, status=1)
    assert "workload.beam: a trace holds no beams" in refused.stderr


def test_a_generated_trace_is_read_back_and_converted(kvsim, tmp_path):
    kvsim("trace", "generate", "x.yaml", "t.csv")
    inspected = json.loads(kvsim("trace", "inspect", "t.csv", "--json").stdout)
    assert inspected["requests"] == 30
    kvsim("trace", "convert", "t.csv", "t.parquet")
    assert "already exists" in kvsim("trace", "convert", "t.csv", "t.parquet", status=1).stderr
    same = ["--set", "workload={kind: trace, path: t.parquet}"]
    kvsim("run", "x.yaml", "--no-charts", "-q", "-o", "a")
    kvsim("run", "x.yaml", *same, "--no-charts", "-q", "-o", "b")
    for name in ("requests.parquet", "steps.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_embedded_trace_is_what_its_command_writes(kvsim, tmp_path):
    config = ROOT / "experiments" / "quickstart_trace.yaml"
    kvsim("trace", "generate", str(config), "again.csv")
    shipped = (ROOT / "traces" / "quickstart.csv").read_bytes()
    assert (tmp_path / "again.csv").read_bytes() == shipped


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").rglob("*.yaml")), ids=lambda p: p.name
)
def test_every_experiment_in_the_repository_is_valid(kvsim, path):
    plain = yaml.safe_load(path.read_text())["workload"]
    is_here = "path" not in plain or (path.parent / plain["path"]).exists()
    trace = ROOT / "traces" / "quickstart.csv"  # for one that its user brings
    kvsim("validate", str(path), *([] if is_here else ["--set", f"workload.path={trace}"]))


def test_help_loads_nothing_heavy():
    code = "import sys, kvsim.cli; print([m for m in sys.modules if m in sys.argv])"
    heavy = ["numpy", "pandas", "pydantic", "matplotlib", "simpy", "pyarrow", "rich", "torch"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_with_the_users_own_files_is_never_replaced(kvsim, tmp_path):
    kvsim("run", "x.yaml", "--no-charts", "-q", "-o", "out")
    (tmp_path / "out" / "notes.md").write_text("mine")
    refused = kvsim("run", "x.yaml", "--no-charts", "-o", "out", "--overwrite", status=1)
    assert "'notes.md'" in refused.stderr
    kvsim("trace", "generate", "x.yaml", "in/t.csv", status=1)
    (tmp_path / "in").mkdir()
    kvsim("trace", "generate", "x.yaml", "in/trace.csv")
    text = EXPERIMENT.split("workload:")[0] + "workload: {kind: trace, path: trace.csv}\n"
    (tmp_path / "in" / "config.yaml").write_text(text)
    kvsim("run", "in/config.yaml", "-o", "in", "--overwrite", "-q", status=1)
    assert (tmp_path / "in" / "trace.csv").is_file()


def test_the_current_folder_is_no_results_folder(kvsim, tmp_path):
    refused = kvsim("run", "x.yaml", "-o", ".", "--overwrite", status=1)
    assert "is the current folder" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_a_variants_name_may_hold_what_looks_like_markup(kvsim):
    variants = 'compare={"paged [/16]": {seed: 1}, "[b]": {seed: 2}, "../$$": {seed: 3}}'
    done = kvsim("run", "x.yaml", "--set", variants, "-o", "m", "-j", "1")
    assert "paged [/16]" in done.stdout and "[b]" in done.stdout


def test_a_terminated_run_leaves_no_temporary_folder(kvsim, tmp_path):
    many = ["--set", "workload.num_requests=300000"]
    command = [sys.executable, "-m", "kvsim", "run", "x.yaml", *many, "-o", "out"]
    child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    while not any(path.name.startswith(".out.") for path in tmp_path.iterdir()):
        assert child.poll() is None
        time.sleep(0.05)
    child.terminate()
    assert child.wait(timeout=60) != 0
    child.stderr.close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


@pytest.mark.parametrize(
    "override",
    [
        "workload.arrivals.rate_per_s=1e-12",
        "workload={kind: synthetic, duration_s: 1e12, arrivals: {kind: poisson, rate_per_s: 1}, "
        "lengths: {kind: preset, name: alpaca}}",
        "workload.arrivals={kind: markov_modulated, states: [{rate_per_s: 1, "
        "mean_dwell_s: 1e-12}]}",
        "workload.arrivals={kind: closed_loop, num_users: 1, think: {kind: fixed, think_s: 1e9}}",
    ],
)
def test_times_beyond_the_clock_and_draws_without_end_are_refused(kvsim, override):
    assert "workload" in (done := kvsim("run", "x.yaml", "--set", override, status=1).stderr) or (
        "clock" in done
    )


def test_a_damaged_results_folder_is_said_to_be_damaged(kvsim, tmp_path):
    kvsim("run", "x.yaml", "--no-charts", "-q", "-o", "out")
    for name, text in (("steps.parquet", "junk"), ("summary.json", "{}"), ("summary.json", "[]")):
        (tmp_path / "out" / name).write_text(text)
        assert "damaged" in kvsim("plot", "out", status=1).stderr


def test_no_space_left_is_said_in_one_line(kvsim):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvsim", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["charts/mine.txt", "runs/mine.txt", "runs/000_x/keep"])
def test_a_users_file_deep_in_a_results_folder_is_never_deleted(kvsim, tmp_path, name):
    kvsim("run", "x.yaml", "-q", "--no-charts", "--set", "sweep.seed=[1, 2]", "-o", "out")
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    refused = kvsim("run", "x.yaml", "-q", "--no-charts", "-o", "out", "--overwrite", status=1)
    assert f"{name!r}, not kvsim's" in refused.stderr and mine.read_text() == "mine"


def test_a_folder_with_a_foreign_summary_is_never_replaced(kvsim, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("{}")
    kvsim("run", "x.yaml", "-q", "--no-charts", "-o", "out", "--overwrite", status=1)
    assert (tmp_path / "out" / "summary.json").read_text() == "{}"


def test_an_empty_window_is_compared_and_said_to_be_empty(kvsim):
    done = kvsim("compare", "x.yaml", "--set", "measure.warmup_s=1e6", "-o", "w", "-j", "1")
    assert "no request finished in the window" in done.stdout


def test_a_pool_that_is_busy_up_to_the_stop_is_accounted_for(kvsim):
    stop = ["--set", "measure.stop_s=0.5", "--set", "workload.arrivals={kind: all_at_once}"]
    summary = json.loads(kvsim("run", "x.yaml", *stop, "--no-charts", "--json").stdout)
    assert sum(summary["waste"].values()) == pytest.approx(1)
    assert summary["waste"]["token"] > 0.1


def test_the_command_works_without_standard_output(kvsim, tmp_path):
    command = f"{sys.executable} -m kvsim run x.yaml -q --no-charts -o out >&-"
    assert subprocess.run(command, shell=True, cwd=tmp_path).returncode == 0
