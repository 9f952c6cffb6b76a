"""`--executor torch`, from an experiment file to its results folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from gpu_backend.entry import prepare
from gpu_backend.texts import check_quotes
from kvsim.config.build import build_workload
from kvsim.config.loading import load, read_source
from kvsim.errors import UserError
from tests.gpu_model.cases import mixed_workload

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """\
seed: 4
engine:
  max_model_len: 300
  max_num_seqs: 16
  max_num_batched_tokens: 128
  step_time: {base_ms: 1, per_seq_ms: 0, per_context_token_us: 0, per_prompt_token_ms: 0}
kv: {num_blocks: 40, block_size: 16, policy: {kind: paged_sharing}}
workload:
  kind: synthetic
  num_requests: 12
  arrivals: {kind: poisson, rate_per_s: 100}
  lengths:
    kind: joint
    prompt: {kind: uniform, low: 10, high: 90}
    output: {kind: uniform, low: 2, high: 9}
  prefixes: {prefix_tokens: [40], zipf_exponent: 1.0}
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(EXPERIMENT)
    return path


def test_an_experiment_runs_on_the_small_model(experiment, tmp_path):
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "kvsim-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvsim\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in names["kvsim.executors"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvsim.executors]", *lines]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvsim", "run", "x.yaml", "--no-charts", "--executor", "torch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "x"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["backend"] == "torch"
    assert summary["completed"] == 12
    requests = pd.read_parquet(folder / "requests.parquet")
    assert requests["ttft_ms"].between(0.1, 10_000).all()  # 1 ms a step in the file is not used


@pytest.mark.parametrize(
    ("options", "sets", "said"),
    [
        ({"modell": "small"}, [], "--executor-set modell: not one of model, device, dtype"),
        ({"modell": "small"}, [], "nearest is 'model'"),
        ({"dtype": "int4"}, [], "dtype 'int4' is not one of"),
        ({"attention": "flash"}, [], "attention 'flash' is not one of torch, triton"),
        ({}, ["kv.num_blocks=90000000"], "kv.num_blocks: 90,000,000 blocks take"),
        ({}, ["engine.max_model_len=200000"], "engine.max_model_len: 200,000 is more than"),
    ],
)
def test_what_the_model_cannot_run_is_refused(experiment, options, sets, said):
    source = read_source(experiment, sets)
    loaded = load(source)
    with pytest.raises(UserError) as caught:
        prepare(loaded, build_workload(loaded, source.folder), options)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_quote_of_an_answer_that_may_not_be_there_is_refused():
    workload = mixed_workload()
    check_quotes(workload)
    workload.after[2] = -1
    with pytest.raises(UserError, match="request 2 quotes the answer of request 1 without waiting"):
        check_quotes(workload)
