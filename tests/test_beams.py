"""Beam search: the survival process, and what it does to block tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.groups import GroupScheduler, PaperEra
from kvsim.engine.kv.host import HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import load_of
from kvsim.engine.request import Sequence
from kvsim.latency.model import Linear
from kvsim.sim.beams import BeamSurvival
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.metrics import Slo, summarize, window_of
from kvsim.study.tables import Run, expand
from kvsim.workload.workload import Workload, columns
from tests.walk import asked, submit, walk

LATENCY = Linear(base_ms=1, per_seq_ms=0, per_context_token_us=0, per_prompt_token_ms=0)
SAME = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def run_of(
    workload: Workload, probability: float, *, num_blocks: int = 400, block_size: int = 4
) -> Run:
    engine = Engine(
        make_kv=lambda: Paged(num_blocks, block_size, can_fork=True),
        make_executor=lambda outputs: SimulatedExecutor(
            LATENCY, outputs, BeamSurvival(7, probability)
        ),
        batching=CONTINUOUS,
        max_model_len=200,
        max_num_seqs=32,
        max_num_batched_tokens=200,
        chunked_prefill=False,
        paper_era=PaperEra(10_000, 0.01, mixes_prompts=False),
    )
    return expand(simulate(workload, engine, route=round_robin()), "paper")


def beams(prompts: list[int], outputs: list[int], width: int) -> Workload:
    n = len(prompts)
    samples = np.full(n, width)
    workload = columns(np.zeros(n), np.array(prompts), np.array(outputs), num_samples=samples)
    return replace(workload, is_beam=True)


def figures_of(run: Run) -> dict:
    return summarize(run, window_of(run, 0, 0), Slo())


def test_beams_that_all_survive_are_parallel_samples():
    workload = beams([5, 8, 13, 20, 1], [30, 7, 1, 18, 2], 4)
    ours = run_of(workload, 0.0, num_blocks=45)
    theirs = run_of(replace(workload, is_beam=False), 0.0, num_blocks=45)
    assert (ours.steps["num_preempted"] > 0).any()
    for name, column in theirs.steps.items():
        assert ours.steps[name].tolist() == column.tolist(), name


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("prompt", [1, 12, 13, 16])
def test_with_one_survivor_a_step_all_but_the_last_blocks_are_shared(block_size, prompt):
    """Each step K beams write a token each behind one common history: its full blocks once, and K
    last blocks, of which K - 1 are copies unless the token begins a block."""
    width, output = 5, 20
    run = run_of(beams([prompt], [output], width), 1.0, block_size=block_size)
    lengths = prompt + np.arange(1, output)  # tokens of a beam, in its decode steps
    blocks = -(-lengths // block_size) - 1 + width
    assert run.steps["held_blocks"].tolist() == [-(-prompt // block_size), *blocks.tolist()]
    assert run.steps["logical_tokens"][1:].tolist() == (width * lengths).tolist()
    whole = (lengths - 1) // block_size * block_size
    tokens = whole + width * (lengths - whole)
    assert run.steps["token_slots"][1:].tolist() == tokens.tolist()
    figures = figures_of(run)
    begins = np.count_nonzero((lengths - 1) % block_size == 0)
    assert figures["copies_made"] == (width - 1) * (output - 1 - begins)
    assert figures["beams_reforked"] == (width - 1) * (output - 2)  # the last step drops none
    at_first = (width - 1) * -(-prompt // block_size)
    assert figures["blocks_shared_at_forks"] == at_first + (width - 1) * (output - 2)


def test_as_many_beams_are_dropped_as_the_process_says():
    """Of K beams K p - p ** K a step in the mean: binomial, but that one is always kept."""
    width, p, output = 4, 0.3, 40
    workload = beams([3] * 60, [output] * 60, width)
    figures = figures_of(run_of(workload, p, num_blocks=4000))
    num_steps = 60 * (output - 2)
    mean = num_steps * (width * p - p**width)
    assert abs(figures["beams_reforked"] - mean) < 4 * (num_steps * width * p * (1 - p)) ** 0.5
    assert figures["beams_reforked"] != round(mean)


def test_what_befalls_a_request_does_not_depend_on_the_others():
    def story(survival: BeamSurvival, index: int, num_steps: int) -> list[list[tuple[int, int]]]:
        seqs = [Sequence(asked(index, 3, 4, is_beam=True), sample) for sample in range(4)]
        steps = [survival.forks(seqs) for _ in range(num_steps)]
        return [[(fork.parent.sample, fork.child.sample) for fork in forks] for forks in steps]

    alone = story(BeamSurvival(1, 0.5), 5, 9)
    shared = BeamSurvival(1, 0.5)
    story(shared, 4, 3)
    first = story(shared, 5, 4)
    story(shared, 4, 3)
    assert first + story(shared, 5, 5) == alone
    assert alone != story(BeamSurvival(1, 0.5), 6, 9)
    assert alone != story(BeamSurvival(2, 0.5), 5, 9)


def test_a_dropped_beam_continues_one_that_is_kept():
    survival = BeamSurvival(3, 0.7)
    seqs = [Sequence(asked(0, 3, 6, is_beam=True), sample) for sample in range(6)]
    for _ in range(200):
        forks = survival.forks(seqs)
        dropped = {fork.child for fork in forks}
        assert len(dropped) == len(forks) < len(seqs)
        assert not dropped & {fork.parent for fork in forks}


def test_more_is_shared_the_more_beams_are_dropped():
    workload = beams([20, 33, 41] * 4, [40, 30, 50] * 4, 4)
    savings = [figures_of(run_of(workload, p))["sharing_saving"] for p in (0, 0.05, 0.2, 0.5, 1)]
    assert savings == sorted(savings) and savings[0] < savings[-1] - 0.1


@SAME
@given(st.data())
def test_the_books_balance_at_every_step_while_beams_are_swapped(data):
    """Tight pools, beams beside parallel answers, swaps: references, free blocks, tokens held and
    host blocks are what the block tables say, and in the end nothing is held."""
    block_size = data.draw(st.sampled_from((1, 2, 4, 8)))
    scheduler = GroupScheduler(
        Paged(data.draw(st.integers(20, 140)) // block_size + 2, block_size, can_fork=True),
        HostPool(10_000),
        max_num_seqs=data.draw(st.integers(4, 12)),
        max_num_batched_tokens=64,
        max_model_len=48,
        watermark_blocks=data.draw(st.integers(0, 2)),
        mixes_prompts=data.draw(st.booleans()),
    )
    lengths = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.booleans())
    rows = data.draw(st.lists(lengths, min_size=1, max_size=8))
    requests = [
        asked(index, prompt, width, is_beam=is_beam)
        for index, (prompt, _, width, is_beam) in enumerate(rows)
    ]
    outputs = [output for _, output, _, _ in rows]
    fit = [r for r in requests if scheduler.fits(r, r.prompt_tokens + outputs[r.index])]
    submit(scheduler, fit)
    probability = data.draw(st.sampled_from((0.1, 0.5, 1.0)))
    executor = SimulatedExecutor(LATENCY, outputs, BeamSurvival(0, probability))
    made = sum(load_of(plan)[1] for plan in walk(scheduler, executor))
    assert made >= sum(outputs[request.index] for request in fit)
    assert scheduler.kv.pool.num_free == scheduler.kv.num_blocks
    assert scheduler.kv.usage().overlap == 0 and not scheduler.kv.pool.shared
    assert scheduler.host.num_used == 0
