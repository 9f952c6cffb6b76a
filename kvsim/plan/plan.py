"""A plan: the memory of a replica, whether it starts, what fits, and what binds."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.memory.budget import STARTS, TOO_LONG, Budget, budget
from kvsim.memory.kv import request_table
from kvsim.memory.remedies import Remedy, remedies
from kvsim.memory.weights import Parallel, parallel_faults
from kvsim.plan.flags import AS_LONG_AS_FITS
from kvsim.plan.reading import Reading
from kvsim.plan.resolve import Setup, resolve
from kvsim.plan.steady import (
    Flow,
    Limit,
    Replica,
    Room,
    State,
    limits_of,
    rate_of_users,
    room,
    state_at,
)
from kvsim.plan.step_time import step_time_of

TENSOR_SIZES = (1, 2, 4, 8, 16, 32)
NEAR = 1e-3  # of a rate found by halving
SHORTEST = 1024  # context of the first row of requests at once


class Load(NamedTuple):
    """The flow's steady state at its rate (None: a limit is passed, or no rate was given); limits:
    the rates at which each binds, lowest first. No figures where step_time says why not."""

    step_time: str
    state: State | None
    limits: list[Limit]


class Plan(NamedTuple):
    """budget, requests_at_once, table and room are one replica's. smallest_tensor: the fewest GPUs
    that start it as it is otherwise asked for, where these do not; 0: none does."""

    reading: Reading
    setup: Setup
    budget: Budget
    requests_at_once: float
    table: list[tuple[int, float]]
    legal_tensor: list[int]
    remedies: list[Remedy]
    smallest_tensor: int | None
    flow: Flow | None
    room: Room | None
    load: Load | None

    @property
    def starts(self) -> bool:
        return self.budget.outcome == STARTS

    @property
    def fits(self) -> bool:
        """It starts, and bears the users or the rate that were asked for."""
        if not self.starts or self.flow is None:
            return self.starts
        if self.flow.users and self.flow.users > self.room.at_once:
            return False
        limits, rate = self.load.limits, self.flow.rate_per_s
        return not (limits and rate and rate > limits[0].rate_per_s)


def make_plan(reading: Reading) -> Plan:
    """Raises ConfigError on what no engine would take."""
    asked, setup = reading.asked, resolve(reading.asked)
    out = _budget(setup, asked.num_gpu_blocks_override)
    if asked.max_model_len == AS_LONG_AS_FITS:
        longest = out.pool.estimated_max_len(setup.limits.max_model_len)
        if longest:
            setup = setup._replace(limits=setup.limits._replace(max_model_len=longest))
            out = _budget(setup, asked.num_gpu_blocks_override)
    shape, limits = setup.shape, setup.limits
    starts = out.outcome == STARTS
    flow = _flow(reading, setup.parallel)
    most = flow and room(flow, out.pool, out.step.seqs)
    return Plan(
        reading=reading,
        setup=setup,
        budget=out,
        requests_at_once=out.pool.requests_at_once(limits.max_model_len),
        table=request_table(out.pool, _contexts(limits.max_model_len)),
        legal_tensor=[n for n in TENSOR_SIZES if not parallel_faults(shape, Parallel(n))],
        remedies=[] if starts else remedies(*_given(setup)),
        smallest_tensor=None if starts else _smallest_tensor(setup),
        flow=flow,
        room=most,
        load=flow and _load(flow, most, setup, out),
    )


def _load(flow: Flow, most: Room, setup: Setup, out: Budget) -> Load:
    step_s, text = step_time_of(setup)
    if step_s is None or not out.pool.num_blocks:
        return Load(text, None, [])
    replica = Replica(out.pool, out.step.seqs, out.step.tokens, step_s)
    limits, rate = limits_of(flow, replica), flow.rate_per_s
    if flow.users:  # those past what fits at once wait
        rate = rate_of_users(flow, replica, min(flow.users, most.at_once))
    is_borne = rate is not None and rate <= limits[0].rate_per_s * (1 + NEAR)
    return Load(text, state_at(flow, replica, rate) if is_borne else None, limits)


def _given(setup: Setup) -> tuple:
    return (
        setup.shape, setup.gpu, setup.parallel, setup.engine, setup.limits, setup.known,
    )  # fmt: skip


def _budget(setup: Setup, num_blocks: int | None) -> Budget:
    """num_blocks goes before what memory is left, as num_gpu_blocks_override does."""
    out = budget(*_given(setup))
    if num_blocks is None:
        return out
    pool = out.pool._replace(kv_bytes=num_blocks * out.pool.layout.block_bytes)
    holds = pool.requests_at_once(setup.limits.max_model_len) >= 1
    return out._replace(pool=pool, outcome=STARTS if holds else TOO_LONG)


def _smallest_tensor(setup: Setup) -> int:
    known = setup.known._replace(weights_gib=None, activation_gib=None, free_gib=())
    for tensor in TENSOR_SIZES:
        wider = setup.parallel._replace(tensor=tensor)
        if tensor <= setup.parallel.tensor or parallel_faults(setup.shape, wider):
            continue
        if _budget(setup._replace(parallel=wider, known=known), None).outcome == STARTS:
            return tensor
    return 0


def _contexts(longest: int) -> list[int]:
    """Powers of two up to the longest request, the last six of them, and itself."""
    powers, context = [], SHORTEST
    while context < longest:
        powers.append(context)
        context *= 2
    return [*powers[-6:], longest]


def _flow(reading: Reading, parallel: Parallel) -> Flow | None:
    asked, replicas = reading.asked, parallel.data
    if asked.input_len is None:
        return None
    return Flow(
        asked.input_len,
        asked.output_len,
        asked.rate and asked.rate / replicas,
        asked.users and asked.users / replicas,
    )
