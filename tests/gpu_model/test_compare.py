"""The grid, the fit and the comparison of a simulation with a real run."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_backend.compare import METRICS, compare
from gpu_backend.entry import prepare
from gpu_backend.profile import (
    Limits,
    Measured,
    Point,
    fit,
    grid,
    measure,
    moved_block_us,
)
from kvsim.config.build import build_workload
from kvsim.config.loading import load, read_source
from kvsim.latency.model import Linear
from tests.gpu_model.test_load import CONFIG

LIMITS = Limits(8, 64, 60, 30, 4)
EXPERIMENT = """\
engine:
  max_model_len: 60
  max_num_seqs: 8
  max_num_batched_tokens: 64
  chunked_prefill: false
  rules: paper
  step_time: {base_ms: 1, per_seq_ms: 0, per_context_token_us: 0, per_prompt_token_ms: 0}
kv: {num_blocks: 30, block_size: 4, policy: {kind: paged_sharing}}
workload:
  kind: synthetic
  num_requests: 10
  arrivals: {kind: poisson, rate_per_s: 200}
  lengths:
    kind: joint
    prompt: {kind: uniform, low: 4, high: 30}
    output: {kind: uniform, low: 2, high: 9}
"""


@pytest.fixture
def tiny(tmp_path):
    """An experiment file, and options that name a model of a few thousand parameters."""
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "x.yaml", {"model": str(tmp_path / "config.json")}


def test_the_grid_stays_within_the_engine():
    points = grid(LIMITS)
    assert {point.num_decodes for point in points} == {
        0,
        1,
        2,
        4,
    }  # 8 of 16 tokens are more than the pool
    for point in points:
        assert point.num_decodes * point.context <= 120
        assert sum(point.prompts) <= 64
    assert len(set(points)) == len(points)


def test_a_point_measures_the_load_that_it_names(tiny):
    source = read_source(tiny[0], [])
    experiment = load(source)
    make = prepare(experiment, build_workload(experiment, source.folder), tiny[1])
    points = [Point(3, 16), Point(0, 0, (5, 7)), Point(2, 8, (6,))]
    loads = [one[:3] for one in measure(make, points, LIMITS)]
    # the last of five steps, in each of which every decode has made a token
    assert loads == [(0, 3, 3 * 20), (12, 2, 0), (6, 3, 2 * 12)]
    moved = moved_block_us(make([]), LIMITS, 30)
    assert moved.keys() == {"copy_block_us", "swap_out_block_us", "swap_in_block_us"}
    assert min(moved.values()) > 0


def test_a_fit_finds_the_model_that_made_the_times():
    wanted = {
        "base_ms": 3.0,
        "per_seq_ms": 0.2,
        "per_context_token_us": 1.5,
        "per_prompt_token_ms": 0.25,
        "prompt_step_ms": 0.0,
    }
    generator, measured = np.random.default_rng(2), []
    for _ in range(40):
        prompt, seqs, context = (int(n) for n in generator.integers(0, 100, 3))
        prompt *= int(generator.integers(0, 2))
        duration_ns = Linear(**wanted).step_ns(prompt, seqs, context, 0, 1)[0]
        measured.append(Measured(prompt, seqs, context, duration_ns))
    assert fit(measured) == pytest.approx(wanted, abs=1e-5)
    without_context = [one._replace(duration_ns=9_000_000 - 10 * one.context) for one in measured]
    assert min(fit(without_context).values()) >= 0


def test_both_runs_are_set_side_by_side(tiny):
    found = compare(read_source(tiny[0], []), tiny[1])
    assert [row.metric for row in found.rows] == list(METRICS)
    assert all(np.isfinite([row.simulated, row.measured]).all() for row in found.rows)
    assert found.num_steps > 5
    assert found.step_error < 2  # of steps of a fifth of a millisecond
