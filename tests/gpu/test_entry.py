"""`--executor-set attention=triton`: what it makes, and what it refuses."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu_backend.entry import prepare
from gpu_backend.kernels import layout
from kvsim.config.build import build_engine, build_workload
from kvsim.config.loading import load, read_source
from kvsim.errors import UserError
from kvsim.sim.feed import Outcome, round_robin
from kvsim.sim.run import simulate
from tests.gpu.batches import DEVICE
from tests.gpu_model.test_entry import EXPERIMENT
from tests.gpu_model.test_load import CONFIG

FEW = ["workload.num_requests=2", "engine.max_num_seqs=2", "engine.max_num_batched_tokens=16"]


@pytest.fixture
def prepared(tmp_path):
    """What becomes of an experiment on a small random model."""

    def make(sets=(), head_dim=64, **options):
        (tmp_path / "x.yaml").write_text(EXPERIMENT)
        config = CONFIG | {"head_dim": head_dim, "max_position_embeddings": 512}
        (tmp_path / "config.json").write_text(json.dumps(config))
        source = read_source(tmp_path / "x.yaml", list(sets))
        experiment = load(source)
        workload = build_workload(experiment, source.folder)
        options = {"model": str(tmp_path / "config.json"), "attention": "triton"} | options
        return experiment, workload, prepare(experiment, workload, {"device": DEVICE} | options)

    return make


@pytest.mark.parametrize("policy", ["paged", "contiguous"])
def test_an_experiment_runs_on_the_kernels(prepared, policy):
    extra = ", reserve: oracle" * (policy == "contiguous")
    sets = [*FEW, f"kv.policy={{kind: {policy}{extra}}}"]
    experiment, workload, make = prepared(sets, dtype="float32")
    log = simulate(workload, build_engine(experiment, workload, make), route=round_robin())
    assert (log.outcome <= Outcome.LENGTH).all()


@pytest.mark.parametrize(
    ("sets", "options", "said"),
    [
        ([], {"head_dim": 48}, "attention triton: heads of 48 are not of 64, 80, 96, 128, 256"),
        (
            [],
            {"dtype": "float64"},
            "attention triton: dtype float64 is not one of float32, float16",
        ),
        (["kv.block_size=256"], {}, "attention triton: kv.block_size 256 is more than 128"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(prepared, sets, options, said):
    with pytest.raises(UserError) as caught:
        prepared(sets, **options)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_cpu_without_the_interpreter_is_refused(prepared, monkeypatch):
    monkeypatch.setattr(layout, "INTERPRETED", False)
    with pytest.raises(UserError, match="attention triton needs a GPU: device=cuda, or attention="):
        prepared(device="cpu")
