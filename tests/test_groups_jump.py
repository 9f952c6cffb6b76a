"""The paper-era scheduler advances steady decodes at once, and nothing tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.groups import GroupScheduler, PaperEra
from kvsim.engine.kv.paged import Paged
from kvsim.latency.model import Linear
from kvsim.sim.beams import BeamSurvival
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.tables import Run, expand
from kvsim.workload.workload import Workload, columns

MS = 1_000_000
COUNTERS = (
    "num_copies",
    "num_forked_blocks",
    "num_reforks",
    "num_swapped_out",
    "num_swapped_in",
)
SAME = settings(derandomize=True, database=None, deadline=None, max_examples=400)
TIMED = Linear(
    2, 0.1, 12.5, 0.25, 1.0, swap_in_block_us=300, swap_out_block_us=200, copy_block_us=100
)


def few(*values: object) -> st.SearchStrategy:
    return st.sampled_from(values)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to 12 requests, some behind others, of up to four answers or beams; many begin alike."""
    num_requests = draw(few(1, 4, 8, 12))
    times = np.cumsum([draw(few(0, 0, 1, 2, 20)) for _ in range(num_requests)])
    after = [draw(few(-1, -1, -1, -1, n - 1)) for n in range(num_requests)]
    spans, prompts = [], []
    for number in range(num_requests):
        shared, own = draw(few(0, 0, 5, 16)), draw(few(1, 3, 8))
        spans.append([(1000, 0, shared)] * (shared > 0) + [(number, 0, own)])
        prompts.append(shared + own)
    workload = columns(
        times * MS,
        np.array(prompts),
        np.array([draw(few(1, 2, 13, 20, 30)) for _ in range(num_requests)]),
        num_samples=np.array([draw(few(1, 1, 2, 3)) for _ in range(num_requests)]),
        after=np.array(after),
        think_ns=np.array([draw(few(0, 2)) for _ in range(num_requests)]) * MS,
        spans=np.array([span for row in spans for span in row]),
        span_offsets=np.cumsum([0, *map(len, spans)]),
    )
    return replace(workload, is_beam=draw(few(False, False, True)))


@st.composite
def engines(draw: st.DrawFn) -> tuple[Engine, int, int | None]:
    block_size, can_fork = draw(few(1, 2, 4, 8)), draw(few(True, True, True, False))
    num_blocks = draw(few(45, 60, 80, 120)) // block_size + 4
    registered = {1000: 16 // block_size} if draw(few(False, False, True)) else {}
    latency = draw(few(TIMED, Linear(1, 0, 0, 0)))
    seed, probability = draw(st.integers(0, 9)), draw(few(0.0, 0.3, 1.0))
    engine = Engine(
        make_kv=partial(Paged, num_blocks, block_size, can_fork=can_fork, registered=registered),
        make_executor=lambda outputs: SimulatedExecutor(
            latency, outputs, BeamSurvival(seed, probability)
        ),
        batching=CONTINUOUS,
        max_model_len=64,
        max_num_seqs=draw(few(3, 6, 12)),
        max_num_batched_tokens=draw(few(20, 64, 100)),
        chunked_prefill=False,
        paper_era=PaperEra(10_000, draw(few(0.0, 0.01, 0.1)), draw(st.booleans())),
    )
    return engine, draw(few(1, 1, 2)), draw(few(None, None, 17 * MS, 40 * MS))


def run_of(workload: Workload, engine: Engine, num_replicas: int, stop_ns: int | None) -> Run:
    log = simulate(
        workload, engine, num_replicas=num_replicas, route=round_robin(), stop_ns=stop_ns
    )
    return expand(log, "paper")


def assert_same_runs(left: Run, right: Run) -> None:
    for name in ("steps", "requests", "gaps", "idle"):
        ours, theirs = getattr(left, name), getattr(right, name)
        for column in theirs:
            assert ours[column].tolist() == theirs[column].tolist(), f"{name}.{column}"
    for ours, theirs in zip(left.log.replicas, right.log.replicas, strict=True):
        for name in COUNTERS:
            assert getattr(ours, name) == getattr(theirs, name), name


def test_jumping_stepping_and_walking_tell_the_same():
    """Walking asks for every group in turn whether it finds its free blocks, in every step."""
    seen: Counter[str] = Counter()

    @SAME
    @given(workloads(), engines())
    def compare(workload: Workload, setting: tuple[Engine, int, int | None]) -> None:
        engine, *rest = setting
        if not engine.make_kv().can_fork:
            workload = replace(workload, is_beam=False)
        jumping = run_of(workload, engine, *rest)
        one_by_one = replace(engine, jump=False)
        assert_same_runs(jumping, run_of(workload, one_by_one, *rest))
        with patch.object(GroupScheduler, "_grant_all", lambda self: False):
            assert_same_runs(jumping, run_of(workload, one_by_one, *rest))
        for ours in jumping.log.replicas:
            seen["jumps"] += bool((ours.plans["num_steps"] > 1).any())
            seen["swaps"] += ours.num_swapped_out > 0
            seen["reforks"] += ours.num_reforks > 0
            seen["copies"] += ours.num_copies > 0
        recomputed = jumping.requests["num_recomputed"] > 0
        seen["recomputes"] += bool(recomputed.any())
        seen["limits"] += len(set(jumping.steps["limit"].tolist())) > 2

    compare()
    for event in ("jumps", "swaps", "reforks", "copies", "recomputes", "limits"):
        assert seen[event] >= 20, (event, seen)
