"""The grid of steps, what is measured of it, and the fit."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_backend.entry import prepare
from gpu_backend.profile import (
    LONG_ANSWER,
    NUM_ANSWERS,
    REPEATS,
    SETTLING,
    Limits,
    Measured,
    entries_of,
    fit,
    grid,
    measured_steps,
    moved_block_us,
    slowed,
    spread,
)
from kvsim.config.build import build_latency, build_workload
from kvsim.config.loading import load, read_source
from kvsim.config.models import TableStepTime
from kvsim.errors import UserError
from tests.gpu_model.test_load import CONFIG

LIMITS = Limits(8, 64, 60, 30, 4, shares=False, is_contiguous=False)
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
  lengths: {kind: preset, name: alpaca, scale: 0.01}
"""


@pytest.fixture
def make_executor(tmp_path):
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source = read_source(tmp_path / "x.yaml", [])
    experiment = load(source)
    workload = build_workload(experiment, source.folder)
    return prepare(experiment, workload, {"model": str(tmp_path / "config.json")})


@pytest.mark.parametrize("limits", [LIMITS, LIMITS._replace(num_blocks=3), Limits(
    256, 8192, 4096, 7400, 16, shares=True, is_contiguous=False)])  # fmt: skip
def test_the_grid_stays_within_the_engine(limits):
    points = grid(limits, np.random.default_rng(7))
    last, slots = SETTLING + REPEATS, limits.num_blocks * limits.block_size
    reach = slots * (2 if limits.shares else 1)
    for point in points:
        assert point.num_decodes + len(point.chunks) <= limits.max_num_seqs
        assert point.context + last <= limits.max_model_len or not point.num_decodes
        assert point.num_decodes * (point.context + last) <= max(reach, point.num_decodes * 4)
        num_tokens = point.num_decodes + sum(chunk.num_new for chunk in point.chunks)
        assert num_tokens <= limits.max_num_batched_tokens
        assert all(chunk.start + chunk.num_new <= limits.max_model_len for chunk in point.chunks)
    alone = {point.num_decodes for point in points if not point.chunks}
    most = min(limits.max_num_seqs, limits.num_blocks)
    assert alone >= {*range(1, min(most, 15) + 1), most}


def test_sizes_are_spread_evenly_in_the_logarithm():
    sizes = np.array(entries_of(256))
    assert sizes[:16].tolist() == list(range(1, 17)) and sizes[-1] == 256
    ratios = sizes[1:] / sizes[:-1]
    assert ratios[15:] == pytest.approx(2 ** (1 / 6), rel=0.06)
    assert spread(4, 100, 2) == [4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100]


def test_an_engine_too_short_to_measure_is_refused():
    with pytest.raises(UserError, match="must hold 4 tokens"):
        grid(LIMITS._replace(max_model_len=3), np.random.default_rng(7))


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_a_pass_measures_every_point_at_the_load_that_it_names(make_executor, is_contiguous):
    limits = LIMITS._replace(is_contiguous=is_contiguous)
    executor = make_executor([LONG_ANSWER] * NUM_ANSWERS)
    points = grid(limits, np.random.default_rng(3))
    steps = measured_steps(executor, limits, seed=3)
    one_pass = list(islice(steps, len(points) * (SETTLING + REPEATS)))
    measured = [one for one in one_pass if one is not None]
    assert len(measured) == REPEATS * len(points)
    assert min(one.duration_ns for one in measured) > 0
    wanted = sorted(
        (
            sum(chunk.num_new for chunk in point.chunks),
            point.num_decodes + len(point.chunks),
            # each step before has made a token of every decode
            point.num_decodes * (point.context + SETTLING + repeat),
            len(point.chunks),
            sum(
                position + 1
                for chunk in point.chunks
                for position in range(chunk.start, chunk.start + chunk.num_new)
            ),
        )
        for point in points
        for repeat in range(REPEATS)
    )
    assert sorted(one[:5] for one in measured) == wanted


def test_blocks_moved_are_timed(make_executor):
    moved = moved_block_us(make_executor([]), LIMITS, 30)
    assert moved.keys() == {"copy_block_us", "swap_out_block_us", "swap_in_block_us"}
    assert min(moved.values()) > 0


def test_a_fit_finds_the_model_that_made_the_times():
    wanted = TableStepTime(
        kind="table",
        tokens=[*range(1, 9)],
        ms=[6.0, 11.0, 13.5, 10.0, 11.3, 11.5, 12.6, 12.2],
        prompt_tokens=[1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64],
        prompt_ms=[7.0, 9.0, 9.5, 9.0, 11.0, 13.0, 14.0, 15.0, 18.0, 22.0, 30.0, 41.0],
        per_seq_ms=0.31,
        per_context_token_us=0.4,
        per_chunk_ms=0.6,
        per_pair_us=0.12,
    )
    model, generator, measured = build_latency(wanted), np.random.default_rng(2), []
    for size in [*range(1, 9)] * 20 + [0] * 200:
        context = int(generator.integers(1, 60)) * size
        count = int(generator.integers(1, 5)) if not size or generator.random() < 0.5 else 0
        room = max((64 - size) // max(count, 1), 2)
        chunks = (room ** generator.random(count)).astype(int)
        starts = generator.integers(0, 30, count)
        load = (
            int(chunks.sum()),
            size + count,
            context,
            count,
            int((chunks * starts + chunks * (chunks + 1) // 2).sum()),
        )
        measured.append(Measured(*load, model.step_ns(*load, 0, 1)[0]))
    measured.append(Measured(64, 1, 0, 1, 2080, model.step_ns(64, 1, 0, 1, 2080, 0, 1)[0]))
    found, (slowness,) = fit([measured], LIMITS)
    assert slowness == pytest.approx(1)
    assert (found.tokens, found.prompt_tokens) == (wanted.tokens, wanted.prompt_tokens)
    assert found.ms == pytest.approx(wanted.ms, abs=1e-4)
    assert found.prompt_ms == pytest.approx(wanted.prompt_ms, abs=1e-4)
    for name in ("per_seq_ms", "per_context_token_us", "per_chunk_ms", "per_pair_us"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-4)


def test_a_machine_that_was_slower_in_one_trial_is_told_from_the_steps_that_it_ran():
    generator, trials = np.random.default_rng(6), []
    for slowness in (1.0, 1.2, 0.9):
        sizes, lengths = generator.integers(1, 9, 100), generator.integers(1, 50, 100)
        loads = np.column_stack([sizes, sizes * lengths]).tolist()
        times = [slowness * (5e6 + 1e6 * size + 400 * context) for size, context in loads]
        trials.append([
            Measured(0, *load, 0, 0, round(ns)) for load, ns in zip(loads, times, strict=True)
        ])  # fmt: skip
    step_time, found = fit(trials, LIMITS)
    assert np.array(found) / found[0] == pytest.approx([1, 1.2, 0.9], rel=1e-4)
    for trial, slowness in zip(trials, found, strict=True):
        model = build_latency(slowed(step_time, slowness))
        for *counts, duration_ns in trial:
            assert model.step_ns(*counts, 0, 1)[0] == pytest.approx(duration_ns, rel=1e-4)


def test_no_coefficient_is_below_zero():
    generator = np.random.default_rng(4)
    measured = [
        Measured(0, size, context, 0, 0, 9_000_000 - 10_000 * context)
        for size in range(1, 9)
        for context in generator.integers(1, 500, 20).tolist()
    ]
    found, _ = fit([measured], LIMITS)
    assert found.per_context_token_us == 0 and min(found.ms) > 0
