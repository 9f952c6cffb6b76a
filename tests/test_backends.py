"""Executors of other packages: found by entry point, refused in one line, and heard of in the
summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = """\
engine: {preset: opt-13b/a100-40gb, max_num_batched_tokens: 2560}
kv: {policy: {kind: paged}}
workload:
  kind: synthetic
  num_requests: 5
  arrivals: {kind: poisson, rate_per_s: 2}
  lengths: {kind: preset, name: alpaca}
"""
SLOW = """\
from kvsim.errors import UserError
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor

def prepare(experiment, workload, options):
    if options.keys() - {"base_ms"}:
        raise UserError("slow knows base_ms alone")
    latency = Linear(float(options.get("base_ms", 1000)), 0, 0, 0)
    return lambda output_tokens: SimulatedExecutor(latency, output_tokens)
"""


@pytest.fixture
def kvsim(tmp_path):
    """The command line beside an installed package of two executors, one of them broken."""
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    site = tmp_path / "site"
    info = site / "slowly-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "slowly.py").write_text(SLOW)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slowly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvsim.executors]\nslow = slowly:prepare\nbroken = slowly.absent:prepare\n"
    )

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "kvsim", "run", "x.yaml", "--no-charts", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"},
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def test_an_installed_executor_runs_the_steps(kvsim, tmp_path):
    kvsim("--executor", "slow", "--executor-set", "base_ms=500", "-o", "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["backend"] == "slow"
    assert summary["notes"][-1] == "step times are measured, by executor slow (base_ms=500)"
    assert summary["mean_tpot_ms"] == pytest.approx(500)
    kvsim("--executor", "slow", "--executor-set", "base_ms=250", "-o", "out", "--overwrite")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["mean_tpot_ms"] == pytest.approx(250)


def test_an_executor_is_not_in_the_results_of_a_simulated_run(kvsim, tmp_path):
    kvsim("--executor", "simulated", "-o", "out")
    kvsim("-o", "default")
    for name in ("config.yaml", "summary.json", "steps.parquet", "requests.parquet"):
        left, right = tmp_path / "out" / name, tmp_path / "default" / name
        assert left.read_bytes() == right.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--executor", "fast"), "--executor fast: not one of simulated, broken, slow"),
        (("--executor", "broken"), "--executor broken cannot be loaded: No module named"),
        (("--executor", "slow", "--executor-set", "x=1"), "slow knows base_ms alone"),
        (("--executor", "slow", "--executor-set", "x"), "--executor-set x: give it as KEY=VALUE"),
        (
            ("--executor", "slow", "--executor-set", "base_ms="),
            "--executor-set base_ms=: give it as KEY=VALUE",
        ),
        (
            ("--executor", "slow", "--set", "workload.arrivals={kind: poisson, rate_per_s: 1e-12}"),
            "x.yaml: workload: arrival times reach",
        ),
        (("--executor-set", "x=1"), "--executor-set: the simulated executor has no options"),
        (
            ("--executor", "slow", "--set", "sweep.kv.block_size=[8,16]"),
            "--executor slow runs one experiment at a time",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(kvsim, tmp_path, arguments, said):
    done = kvsim(*arguments, status=1)
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not (tmp_path / "results" / "x").exists()
