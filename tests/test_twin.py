"""kvsim with jumps, kvsim step by step, and the plain twin tell one story, in every column."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvsim.engine.batching import CONTINUOUS, STATIC
from kvsim.engine.kv.contiguous import Contiguous, reserve_max, reserve_oracle, reserve_pow2
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.placement import Buddy, Fit, best_fit, first_fit
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.engine.request import answer_stream
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import Outcome, round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.tables import SLOT_KINDS, Run, expand
from kvsim.workload.workload import Workload, columns
from tests.twin import Setup, Story, tell

MS = 1_000_000
SAME_CASES_EVERY_TIME = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def simulated(workload: Workload, setup: Setup, *, jump: bool) -> dict[str, Run]:
    """kvsim's run of a setup, under both bookings."""
    latency = Linear(
        setup.base_ms,
        setup.per_seq_ms,
        setup.per_context_token_us,
        setup.per_prompt_token_ms,
        setup.prompt_step_ms,
    )
    engine = Engine(
        make_kv=partial(policy_of, setup, workload.output_tokens.tolist()),
        make_executor=partial(SimulatedExecutor, latency),
        batching=STATIC if setup.is_static else CONTINUOUS,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        chunked_prefill=setup.chunked_prefill,
        jump=jump,
    )
    log = simulate(
        workload,
        engine,
        num_replicas=setup.num_replicas,
        route=round_robin(),
        stop_ns=setup.stop_ns,
    )
    return {"paper": expand(log, "paper"), "common": expand(log, "common")}


def policy_of(setup: Setup, output_tokens: list[int]) -> KVCachePolicy:
    num_blocks, size = setup.num_blocks, setup.block_size
    if setup.memory == "paged":
        return Paged(
            num_blocks,
            size,
            can_fork=setup.can_fork,
            prefix_caching=setup.prefix_caching,
            watermark=setup.watermark,
        )
    limit = setup.reserve_tokens if setup.reserve == "fixed" else setup.max_model_len
    placement = {
        "buddy": lambda: Buddy(num_blocks, -(-limit // size)),
        "first_fit": lambda: Fit(num_blocks, first_fit),
        "best_fit": lambda: Fit(num_blocks, best_fit),
    }[setup.placement]()
    reserve = {
        "max": reserve_max(setup.max_model_len),
        "pow2": reserve_pow2(output_tokens),
        "oracle": reserve_oracle(output_tokens),
        "fixed": None,
    }[setup.reserve]
    return Contiguous(num_blocks, size, placement, reserve=reserve, limit=limit)


def assert_same_runs(left: Run, right: Run) -> None:
    for name in ("steps", "requests", "gaps", "idle"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert list(ours) == list(theirs)
        for column in ours:
            assert ours[column].tolist() == theirs[column].tolist(), f"{name}.{column}"


def assert_tells(runs: dict[str, Run], story: Story, skipped: set[str]) -> None:
    """Every column of the tables is the twin's."""
    for booking, run in runs.items():
        for place, kind in enumerate(SLOT_KINDS):
            told = [row["slots"][booking][place] for row in story.steps]
            assert run.steps[f"{kind}_slots"].tolist() == told, (booking, kind)
    run = runs["paper"]
    for name in set(run.steps) - {f"{kind}_slots" for kind in SLOT_KINDS} - skipped:
        assert run.steps[name].tolist() == [row[name] for row in story.steps], f"steps.{name}"
    is_finished = run.requests["outcome"] <= Outcome.LENGTH
    for name in story.requests[0] if story.requests else ():
        told = np.array([request[name] for request in story.requests])
        seen = run.requests[name]
        if name not in ("outcome", "replica", "arrival_ns", "first_token_ns"):
            seen, told = seen[is_finished], told[is_finished]  # the others are not over
        assert seen.tolist() == told.tolist(), f"requests.{name}"
    gaps = run.gaps
    counted = gaps["count"] > 0
    pairs = np.column_stack([gaps["end_ns"], gaps["itl_ns"]])[counted]
    listed = np.repeat(pairs, gaps["count"][counted], axis=0).tolist()
    told = [[b, b - a] for ns in story.token_ns.values() for a, b in zip(ns, ns[1:], strict=False)]
    assert sorted(listed) == sorted(told)
    assert run.log.end_ns == story.end_ns


def assert_idle_and_copies(run: Run, story: Story) -> None:
    """What a run to its end adds; a run that is stopped leaves a step in flight."""
    idle = run.idle
    spans = zip(*(idle[c].tolist() for c in ("replica", "start_ns", "end_ns", "cached_slots")))
    assert sorted(spans) == story.idle
    assert sum(one.num_copies for one in run.log.replicas) == story.num_copies
    assert sum(one.num_forked_blocks for one in run.log.replicas) == story.num_forked_blocks


def check(workload: Workload, setup: Setup) -> None:
    jumping = simulated(workload, setup, jump=True)
    stepping = simulated(workload, setup, jump=False)
    for booking in jumping:
        assert_same_runs(jumping[booking], stepping[booking])
    story = tell(workload, setup)
    assert_tells(jumping, story, {'limit'} if setup.is_static else set())
    if setup.stop_ns is None:
        assert_idle_and_copies(jumping["paper"], story)
