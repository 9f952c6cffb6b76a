"""Registered prefixes: which there are, what they hold, and what they save."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.config.build import build_engine, build_workload
from kvsim.config.loading import load, read_source
from kvsim.engine.groups import GroupScheduler
from kvsim.engine.kv.host import HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.policy import NO_HIT
from kvsim.engine.plan import SWAP_IN, SWAP_OUT
from kvsim.engine.request import answer_stream
from kvsim.errors import ConfigError, UserError
from kvsim.latency.model import Linear
from kvsim.sim.beams import BeamSurvival
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import round_robin
from kvsim.sim.run import simulate
from kvsim.study.metrics import Slo, summarize, window_of
from kvsim.study.tables import SLOT_KINDS, Run, expand
from kvsim.workload.prefixes import shared_prefixes
from kvsim.workload.workload import columns
from tests.walk import asked, submit, walk

LATENCY = Linear(base_ms=1, per_seq_ms=0, per_context_token_us=0, per_prompt_token_ms=0)
SAME = settings(derandomize=True, database=None, deadline=None, max_examples=150)
TRANSLATION = """\
engine:
  preset: opt-13b/a100-40gb
  rules: paper
  chunked_prefill: false
  max_num_batched_tokens: 2560
kv: {policy: {kind: paged_sharing, registered_prefixes: true}}
workload:
  kind: synthetic
  num_requests: 60
  arrivals: {kind: poisson, rate_per_s: 20}
  lengths:
    kind: joint
    prompt: {kind: uniform, low: 1, high: 60}
    output: {kind: fixed, tokens: 30}
  prefixes: {prefix_tokens: [341]}
"""


@pytest.fixture
def run_of(tmp_path):
    def run(*overrides: str) -> Run:
        (tmp_path / "x.yaml").write_text(TRANSLATION)
        source = read_source(tmp_path / "x.yaml", list(overrides))
        experiment = load(source)
        workload = build_workload(experiment, tmp_path)
        engine = build_engine(experiment, workload)
        return expand(simulate(workload, engine, route=round_robin()), "paper")

    return run


@pytest.mark.parametrize(("prefix", "num_blocks"), [(80, 5), (341, 21)])
def test_full_blocks_of_a_prefix_are_held_from_time_0_to_the_end(run_of, prefix, num_blocks):
    """The paper's one-shot and five-shot translation prompts (Kwon et al. 2023, section 6.4)."""
    run = run_of(f"workload.prefixes.prefix_tokens=[{prefix}]")
    assert run.idle["start_ns"][0] == 0 and len(run.idle["start_ns"])
    assert (run.idle["token_slots"] == num_blocks * 16).all()
    assert (run.steps["held_blocks"] >= num_blocks).all()
    for table in (run.idle, run.steps):
        slots = np.array([table[f"{kind}_slots"] for kind in SLOT_KINDS])
        assert (slots >= 0).all() and (slots.sum(axis=0) == run.log.pool_slots).all()
    figures = summarize(run, window_of(run, 0, 0), Slo())
    assert figures["registered_blocks"] == num_blocks
    assert figures["hit_tokens"] == 60 * num_blocks * 16


@pytest.mark.parametrize(("prefix", "whole"), [(80, 80), (341, 336), (15, 0)])
def test_prompts_compute_that_much_less(run_of, prefix, whole):
    sets = f"workload.prefixes.prefix_tokens=[{prefix}]", "kv.num_blocks=4000"
    ours, without = run_of(*sets), run_of(*sets, "kv.policy.registered_prefixes=false")
    computed = [int(run.steps["num_prompt_tokens"].sum()) for run in (ours, without)]
    assert computed[1] - computed[0] == 60 * whole
    assert (ours.steps["num_tokens"].sum()) == without.steps["num_tokens"].sum() == 60 * 30


def test_requests_hold_the_prefix_once_and_the_rest_each(run_of):
    """N requests of 341 + 20 tokens at once: 21 blocks, and ceil(length / 16) - 21 each."""
    run = run_of(
        "workload.arrivals={kind: all_at_once}",
        "workload.num_requests=6",
        "workload.lengths.prompt={kind: fixed, tokens: 20}",
    )
    lengths = 361 + np.arange(30)
    blocks = 21 + 6 * (-(-lengths // 16) - 21)
    assert run.steps["held_blocks"].tolist() == blocks.tolist()
    assert run.steps["logical_tokens"].tolist() == (6 * lengths).tolist()
    assert run.steps["token_slots"].tolist() == (336 + 6 * (lengths - 336)).tolist()


def test_a_prompt_that_is_its_prefix_computes_its_last_token():
    kv = Paged(20, 4, can_fork=True, registered={1000: 5})
    for prompt, count in ((1, 0), (4, 0), (5, 1), (20, 4), (21, 5), (40, 5)):
        assert len(kv.registered(asked(0, prompt, 1, shared=prompt)).blocks) == count
    assert kv.registered(asked(0, 30, 1, shared=9)).num_tokens == 8
    assert kv.registered(asked(0, 30, 1)) == NO_HIT


def test_a_prefix_is_what_the_prompts_of_two_sessions_begin_with():
    prompts = [
        [(7, 0, 30), (100, 0, 5)],
        [(7, 0, 16), (7, 16, 4), (101, 0, 5)],
        [(7, 0, 10)],
        [(8, 0, 50)],  # nobody else's
        [(9, 0, 12)],  # only the turns of one session
        [(9, 0, 12), (answer_stream(4), 0, 3)],
        [(answer_stream(0), 0, 5)],
        [(answer_stream(0), 0, 5)],
        [(6, 3, 9)],  # not from the start of its stream
        [(6, 3, 9)],
    ]
    n = len(prompts)
    workload = columns(
        np.zeros(n),
        np.array([sum(length for *_, length in spans) for spans in prompts]),
        np.ones(n),
        session=np.array([-1, -1, -1, -1, 3, 3, -1, -1, -1, -1]),
        spans=np.array([span for spans in prompts for span in spans]),
        span_offsets=np.cumsum([0, *(len(spans) for spans in prompts)]),
    )
    assert shared_prefixes(workload) == {7: 20}
    assert shared_prefixes(columns(np.zeros(2), np.ones(2), np.ones(2))) == {}


def test_prefixes_that_cannot_be_registered_are_named(run_of):
    with pytest.raises(
        ConfigError, match=r"engine.rules: 'vllm-0.33' is not one of vllm-0.2, pape"
    ):
        run_of("engine.rules=vllm-0.33")
    with pytest.raises(
        ConfigError, match=r"workload.prefixes: is missing, and kv.policy.registered"
    ):
        run_of("workload.prefixes=")
    with pytest.raises(UserError, match=r"the 21 blocks of the prefixes .* do not fit"):
        run_of("kv.num_blocks=20")


@SAME
@given(st.data())
def test_the_books_balance_at_every_step_with_prefixes_that_stay(data):
    """Tight pools, recompute and swap, answers and beams: a registered prefix is never moved."""
    block_size, shared = data.draw(st.sampled_from((1, 2, 4, 8))), data.draw(st.integers(0, 12))
    num_blocks = data.draw(st.integers(30, 140)) // block_size + 2
    scheduler = GroupScheduler(
        Paged(num_blocks, block_size, can_fork=True, registered={1000: shared // block_size}),
        HostPool(10_000),
        max_num_seqs=data.draw(st.integers(4, 12)),
        max_num_batched_tokens=64,
        max_model_len=48,
        watermark_blocks=data.draw(st.integers(0, 2)),
        always_swaps=data.draw(st.booleans()),
        mixes_prompts=data.draw(st.booleans()),
    )
    lengths = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.booleans())
    rows = data.draw(st.lists(lengths, min_size=1, max_size=8))
    requests = [
        asked(
            index,
            prompt,
            width,
            is_beam=is_beam,
            shared=min(prompt, data.draw(st.sampled_from((0, shared, shared)))),
        )
        for index, (prompt, _, width, is_beam) in enumerate(rows)
    ]
    outputs = [output for _, output, _, _ in rows]
    fit = [r for r in requests if scheduler.fits(r, r.prompt_tokens + outputs[r.index])]
    submit(scheduler, fit)
    executor = SimulatedExecutor(LATENCY, outputs, BeamSurvival(0, 0.4))
    kv = scheduler.kv
    for plan in walk(scheduler, executor):
        left = {move.source for move in plan.moves if move.kind != SWAP_IN}
        written = {move.target for move in plan.moves if move.kind != SWAP_OUT}
        assert not kv.registered_blocks & (left | written)
    assert kv.num_blocks - kv.pool.num_free == len(kv.registered_blocks) == shared // block_size
    assert not kv.pool.shared and kv.usage().overlap == 0 and scheduler.host.num_used == 0
