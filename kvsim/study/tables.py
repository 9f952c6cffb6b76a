"""The two tables of a run, steps and requests, expanded from its log in vectorized form."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from kvsim.engine.plan import ARRIVALS, MAX_NUM_BATCHED_TOKENS
from kvsim.sim.feed import Outcome
from kvsim.sim.recorder import ReplicaLog
from kvsim.sim.run import RunLog
from kvsim.study.definitions import SLOT_KINDS

Table = dict[str, np.ndarray]
Booking = Literal["paper", "common"]
COUNTED = ("num_generated", "num_preemptions", "num_recomputed", "num_hit", "num_resumed_hit")


class Run(NamedTuple):
    """A run as tables: numpy columns, rows in order of (replica, step) and of request."""

    steps: Table
    requests: Table
    gaps: Table  # inter-token latencies: `itl_ns` with how many tokens `count` had it, at `end_ns`
    idle: Table  # spans without work: replica, start_ns, end_ns and the slots by kind
    log: RunLog


def expand(log: RunLog, booking: Booking) -> Run:
    """Steps and requests of a log, exact to the nanosecond and the slot."""
    steps, gaps, idle = [], [], []
    num_requests = len(log.workload)
    first_token_ns = np.full(num_requests, np.iinfo(np.int64).max)
    for number, replica in enumerate(log.replicas):
        table = _steps(log, number, replica, booking)
        gap = _gaps(replica, table["end_ns"])
        _first_tokens(replica, table["end_ns"], first_token_ns)
        table["num_tokens"] = _emitted(replica, len(table["end_ns"]))
        steps.append(table)
        gaps.append(gap)
        idle.append(_idle(log, number, replica, table, booking))
    requests = _requests(log, first_token_ns)
    return Run(_stack(steps), requests, _stack(gaps), _stack(idle), log)


def _steps(log: RunLog, number: int, replica: ReplicaLog, booking: Booking) -> Table:
    plans, size = replica.plans, log.block_size
    counts = plans["num_steps"]
    num_steps = int(counts.sum())
    first = np.cumsum(counts) - counts  # row of each plan's first step
    repeat = np.arange(num_steps) - np.repeat(first, counts)  # 0 for the first step of a plan
    durations = replica.durations_ns
    end_ns = np.cumsum(durations)
    end_ns += np.repeat(plans["start_ns"] - (end_ns - durations)[first], counts)
    taken = np.cumsum(replica.blocks_taken) * size
    taken -= np.repeat(taken[first], counts)

    def spread(name: str) -> np.ndarray:
        return np.repeat(plans[name], counts)

    def count(name: str) -> np.ndarray:
        return np.repeat(plans[name].astype(np.int32), counts)

    def once(name: str) -> np.ndarray:
        column = np.zeros(num_steps, np.int32)
        column[first] = plans[name]
        return column

    prefills = once("num_prefills")
    making = np.repeat(plans["num_decodes"] + plans["num_prefills"], counts)  # all, in repeats
    logical = spread("computed_tokens") + making * repeat
    token = logical - spread("overlap_slots") + replica.registered_slots
    held, cached = spread("held_slots"), spread("cached_slots")
    unkeyed = log.pool_slots - held - cached
    untouched = spread("untouched_slots")
    if replica.keyless_first:
        untouched = np.minimum(untouched, unkeyed - taken)
    else:
        untouched = untouched - taken
    held = held + taken
    cached = cached - np.maximum(taken - unkeyed, 0)
    admitted, preempted = once("num_admitted"), once("num_preempted")
    start_ns = end_ns - durations
    waiting = _arrived(log, number, start_ns) - np.cumsum(admitted) + np.cumsum(preempted)
    limit = count("limit")
    limit[(waiting == 0) & (limit != MAX_NUM_BATCHED_TOKENS)] = ARRIVALS
    slots = _book(
        booking,
        log,
        token,
        held,
        cached,
        granted=spread("granted_slots"),
        final=spread("final_tokens"),
        largest_free_run=spread("largest_free_run"),
    )
    return {
        "replica": np.full(num_steps, number, np.int32),
        "start_ns": start_ns,
        "end_ns": end_ns,
        "num_running": count("num_running"),
        "num_waiting": waiting.astype(np.int32),
        "num_decodes": (making - prefills).astype(np.int32),
        "num_prefills": prefills,
        "num_prompt_tokens": once("num_prompt_tokens"),
        "num_padding_tokens": once("num_padding_tokens"),
        "num_admitted": admitted,
        "num_preempted": preempted,
        "limit": limit,
        "logical_tokens": logical,
        "held_blocks": (held // size).astype(np.int32),
        "never_used_slots": np.maximum(untouched, 0),
        **slots,
    }


def _book(
    booking: Booking,
    log: RunLog,
    token: np.ndarray,
    held: np.ndarray,
    cached: np.ndarray,
    *,
    granted: np.ndarray,
    final: np.ndarray,
    largest_free_run: np.ndarray,
) -> Table:
    free = log.pool_slots - held - cached
    none = np.zeros_like(token)
    if not log.reserves:
        kinds = (token, none, held - token, none, cached, free)
    elif booking == "paper":
        kinds = (token, final - token, granted - final, free + held - granted, cached, none)
    else:
        external = free - largest_free_run
        kinds = (token, final - token, held - final, external, cached, largest_free_run)
    return {f"{kind}_slots": column for kind, column in zip(SLOT_KINDS, kinds, strict=True)}


def _arrived(log: RunLog, number: int, at_ns: np.ndarray) -> np.ndarray:
    """Sequences that had been submitted to the replica by each of the times, those included."""
    mine = np.flatnonzero(log.replica_of == number)
    times = log.arrived_ns[mine]
    order = np.argsort(times, kind="stable")
    forks = log.replicas[number].can_fork
    weights = np.ones(len(mine), np.int64) if forks else log.workload.num_samples[mine]
    total = np.concatenate([[0], np.cumsum(weights[order])])
    return total[np.searchsorted(times[order], at_ns, side="right")]


def _emitted(replica: ReplicaLog, num_steps: int) -> np.ndarray:
    """Answer tokens that each step made."""
    change = np.zeros(num_steps + 1, np.int64)
    np.add.at(change, replica.runs["first"], 1)
    np.add.at(change, replica.runs["last"] + 1, -1)
    return np.cumsum(change)[:num_steps].astype(np.int32)


def _gaps(replica: ReplicaLog, end_ns: np.ndarray) -> Table:
    """Inter-token latencies with their counts: inside runs one a step, shared by all who run;
    between the runs of an answer one each (a preemption, or a step without token budget)."""
    runs = replica.runs
    order = np.lexsort((runs["first"], runs["sample"], runs["index"]))
    index, sample = runs["index"][order], runs["sample"][order]
    first, last = runs["first"][order], runs["last"][order]
    change = np.zeros(len(end_ns) + 2, np.int64)
    np.add.at(change, first + 1, 1)
    np.add.at(change, last + 1, -1)
    inside = np.cumsum(change)[1 : len(end_ns)]
    same = (index[1:] == index[:-1]) & (sample[1:] == sample[:-1])
    resumed_ns = end_ns[first[1:][same]]
    between_ns = resumed_ns - end_ns[last[:-1][same]]
    return {
        "itl_ns": np.concatenate([np.diff(end_ns), between_ns]),
        "count": np.concatenate([inside, np.ones(len(between_ns), np.int64)]),
        "end_ns": np.concatenate([end_ns[1:], resumed_ns]),
    }


def _first_tokens(replica: ReplicaLog, end_ns: np.ndarray, first_token_ns: np.ndarray) -> None:
    np.minimum.at(first_token_ns, replica.runs["index"], end_ns[replica.runs["first"]])


def _idle(log: RunLog, number: int, replica: ReplicaLog, steps: Table, booking: Booking) -> Table:
    """Spans in which the replica had nothing to do, from 0 to the end of the run."""
    starts = np.concatenate([[0], steps["end_ns"]])
    ends = np.concatenate([steps["start_ns"], [log.end_ns]])
    there, noted = np.flatnonzero(ends > starts), replica.idle
    rows = np.searchsorted(noted["before"], there, side="right") - 1
    cached, none = noted["cached_slots"][rows], np.zeros(len(there), np.int64)
    kept = none + replica.registered_slots
    largest = noted["largest_free_run"][rows]
    slots = _book(
        booking, log, kept, kept, cached, granted=none, final=none, largest_free_run=largest
    )
    return {
        "replica": np.full(len(there), number, np.int64),
        "start_ns": starts[there],
        "end_ns": ends[there],
        "held_blocks": kept // log.block_size,
        "never_used_slots": noted["untouched_slots"][rows],
        **slots,
    }


def _requests(log: RunLog, first_token_ns: np.ndarray) -> Table:
    num_requests = len(log.workload)
    finish_ns = np.full(num_requests, -1, np.int64)
    admitted_ns = np.full(num_requests, np.iinfo(np.int64).max)
    sums = {name: np.zeros(num_requests, np.int64) for name in COUNTED}
    for replica in log.replicas:
        ended = replica.ended
        index = ended["index"]
        np.maximum.at(finish_ns, index, ended["finish_ns"])
        np.minimum.at(admitted_ns, index, ended["admitted_ns"])
        for name, column in sums.items():
            np.add.at(column, index, ended[name])
    is_finished = log.outcome <= Outcome.LENGTH
    none = np.iinfo(np.int64).max
    return {
        "outcome": log.outcome,
        "replica": log.replica_of,
        "arrival_ns": log.arrived_ns,
        "admitted_ns": np.where(admitted_ns == none, -1, admitted_ns),
        "first_token_ns": np.where(first_token_ns == none, -1, first_token_ns),
        "finish_ns": np.where(is_finished, finish_ns, -1),
        "prompt_tokens": log.workload.prompt_tokens,
        "output_tokens": log.workload.output_tokens,
        "answer_tokens": log.answer_tokens,
        "num_samples": log.workload.num_samples,
        "max_tokens": log.workload.max_tokens,
        "priority": log.workload.priority,
        "session": log.workload.session,
        **sums,
    }


def _stack(tables: list[Table]) -> Table:
    if len(tables) == 1:
        return tables[0]
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
