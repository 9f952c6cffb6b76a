"""The figures of a run: what DEFINITIONS says, computed from its tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvsim.engine.plan import LIMITS
from kvsim.sim.feed import Outcome
from kvsim.study.definitions import SLOT_KINDS
from kvsim.study.tables import Run, Table

PERCENTILES = (90, 95, 99)


class Slo(NamedTuple):
    """Limits that a request must meet; None: not asked for."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


class Window(NamedTuple):
    """The part of a run that its figures are about, in ns."""

    start_ns: int
    end_ns: int


def window_of(run: Run, warmup_s: float, cooldown_s: float) -> Window:
    """From warmup_s after time 0 (by default: from the first arrival) to cooldown_s before the
    end."""
    arrived = run.requests["arrival_ns"][run.requests["arrival_ns"] >= 0]
    first = int(arrived.min()) if len(arrived) else 0
    start = round(warmup_s * 1e9) if warmup_s else first
    return Window(start, max(run.log.end_ns - round(cooldown_s * 1e9), start))


def summarize(run: Run, window: Window, slo: Slo) -> dict[str, object]:
    """The figures of DEFINITIONS, as plain numbers that JSON can hold."""
    requests = run.requests
    seconds = (window.end_ns - window.start_ns) / 1e9
    is_finished = requests["outcome"] <= Outcome.LENGTH
    is_unfinished = requests["outcome"] == Outcome.UNFINISHED
    done = is_finished & _within(requests["finish_ns"], window)
    latency = _latencies(requests, done)
    steps = run.steps
    inside = _within(steps["end_ns"], window)
    output_tokens = int(steps["num_tokens"][inside].sum())
    input_tokens = int(requests["prompt_tokens"][done].sum())
    figures: dict[str, object] = {
        "completed": int(done.sum()),
        "failed": int((requests["outcome"] > Outcome.UNFINISHED).sum()),
        "refused": {
            outcome.name.lower(): int((requests["outcome"] == outcome).sum())
            for outcome in (Outcome.TOO_LONG, Outcome.NEVER_FITS, Outcome.NO_TOKENS)
        },
        "unfinished": int((is_unfinished & (requests["arrival_ns"] >= 0)).sum()),
        "not_arrived": int((is_unfinished & (requests["arrival_ns"] < 0)).sum()),
        "ended_by_length": int((requests["outcome"] == Outcome.LENGTH).sum()),
        "duration": seconds,
        "window_start_s": window.start_ns / 1e9,
        "window_end_s": window.end_ns / 1e9,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _per(int(done.sum()), seconds),
        "output_throughput": _per(output_tokens, seconds),
        "total_token_throughput": _per(output_tokens + input_tokens, seconds),
        "max_output_tokens_per_s": _busiest_second(steps, inside),
        "max_concurrent_requests": _most_at_once(requests),
    }
    for name in ("ttft", "tpot", "e2el", "queue"):
        figures |= _spread(name, latency[name])
    gaps = run.gaps
    counted = _within(gaps["end_ns"], window) & (gaps["count"] > 0)
    figures |= _spread("itl", gaps["itl_ns"][counted] / 1e6, gaps["count"][counted])
    figures["normalized_latency_s"] = _mean(latency["normalized"])
    figures |= _goodput(latency, slo, seconds)
    return figures | _memory(run, window) | _sharing(run, done, inside)


def _latencies(requests: Table, done: np.ndarray) -> Table:
    """Per completed request, in ms; tpot only where there are two tokens or more."""
    arrival, finish = requests["arrival_ns"][done], requests["finish_ns"][done]
    first, answer = requests["first_token_ns"][done], requests["answer_tokens"][done]
    several = answer > 1
    tpot = np.full(len(answer), np.nan)
    tpot[several] = (finish - first)[several] / (answer[several] - 1) / 1e6
    return {
        "ttft": (first - arrival) / 1e6,
        "tpot": tpot[several],
        "tpot_all": tpot,
        "e2el": (finish - arrival) / 1e6,
        "queue": (requests["admitted_ns"][done] - arrival) / 1e6,
        "normalized": (finish - arrival) / 1e9 / np.maximum(answer, 1),
    }


def _goodput(latency: Table, slo: Slo, seconds: float) -> dict[str, object]:
    if slo == Slo():
        return {"request_goodput": None, "slo_share": None}
    met = np.ones(len(latency["ttft"]), bool)
    for limit, name in ((slo.ttft_ms, "ttft"), (slo.tpot_ms, "tpot_all"), (slo.e2el_ms, "e2el")):
        if limit is not None:
            met &= ~(latency[name] > limit)  # a single token has no tpot, and meets it
    return {
        "request_goodput": _per(int(met.sum()), seconds),
        "slo_share": float(met.mean()) if len(met) else None,
    }


def _memory(run: Run, window: Window) -> dict[str, object]:
    """Time-weighted means over the window, time without work included."""
    steps, idle, pool = run.steps, run.idle, run.log.pool_slots
    busy_ns = _overlap(steps["start_ns"], steps["end_ns"], window)
    idle_ns = _overlap(idle["start_ns"], idle["end_ns"], window)
    total = int(busy_ns.sum() + idle_ns.sum())
    waste = {
        kind: _per(
            _sum_of(steps[f"{kind}_slots"], busy_ns) + _sum_of(idle[f"{kind}_slots"], idle_ns),
            float(pool) * total,
        )
        for kind in SLOT_KINDS
    }
    token, logical = (_sum_of(steps[name], busy_ns) for name in ("token_slots", "logical_tokens"))
    busy = busy_ns > 0
    most_held = int(steps["held_blocks"][busy].max(initial=0))
    shares = {
        name: _per(int(busy_ns[steps["limit"] == code].sum()), total)
        for code, name in enumerate(LIMITS)
    }
    shares["arrivals"] = _per(int(busy_ns[steps["limit"] == 0].sum() + idle_ns.sum()), total)
    named = {name: share for name, share in shares.items() if share is not None}
    return {
        "waste": waste,
        "kv_blocks": _blocks(run, busy_ns, idle_ns),
        "kv_used_peak": _per(most_held * run.log.block_size, pool),
        "batch_size_mean": _per(_sum_of(steps["num_running"], busy_ns), int(busy_ns.sum())),
        "batch_size_peak": int(steps["num_running"][busy].max(initial=0)),
        "num_waiting_mean": _per(_sum_of(steps["num_waiting"], busy_ns), total),
        "num_waiting_peak": int(steps["num_waiting"][busy].max(initial=0)),
        "sharing_saving": 1 - token / logical if logical else None,
        "limit_shares": shares,
        "binding_limit": max(named, key=named.__getitem__) if named else None,
        "num_steps": int(busy.sum()),
        "preemptions": int(steps["num_preempted"][busy].sum()),
    }


def _blocks(run: Run, busy_ns: np.ndarray, idle_ns: np.ndarray) -> dict[str, float | None]:
    """Mean shares of the pool's blocks: referenced, cached, free again, never used until then."""
    size, num_blocks = run.log.block_size, run.log.pool_slots // run.log.block_size
    tables = ((run.steps, busy_ns), (run.idle, idle_ns))
    whole = float(num_blocks) * int(busy_ns.sum() + idle_ns.sum())

    def share(column: str, unit: int) -> float | None:
        return _per(sum(_sum_of(table[column], ns) for table, ns in tables) / unit, whole)

    shares = {
        "referenced": share("held_blocks", 1),
        "cached": share("cached_slots", size),
        "never_used": share("never_used_slots", size),
    }
    if None in shares.values():
        return shares | {"free_again": None}
    return shares | {"free_again": max(1 - sum(shares.values()), 0.0)}


def _worst_preempted(run: Run, done: np.ndarray) -> dict[str, object] | None:
    requests = run.requests
    rows = np.flatnonzero(done & (requests["num_preemptions"] > 0))
    if not len(rows):
        return None
    times, tokens = requests["num_preemptions"][rows], requests["num_recomputed"][rows]
    worst = rows[np.lexsort((-rows, tokens, times))[-1]]
    return {
        "request_id": run.log.workload.request_id(int(worst)),
        "preemptions": int(requests["num_preemptions"][worst]),
        "recomputed_tokens": int(requests["num_recomputed"][worst]),
    }


def _sharing(run: Run, done: np.ndarray, inside: np.ndarray) -> dict[str, object]:
    requests, steps, log = run.requests, run.steps, run.log
    recomputed = int(requests["num_recomputed"][done].sum())
    hits = int(requests["num_hit"][done].sum())
    computed = steps["num_prompt_tokens"] + steps["num_decodes"]
    prompts = 1 if log.replicas[0].can_fork else requests["num_samples"]
    asked = int((requests["prompt_tokens"] * prompts)[done].sum())
    shared = sum(replica.num_forked_blocks for replica in log.replicas)
    copies = sum(replica.num_copies for replica in log.replicas)
    hit_copies = sum(replica.num_hit_copies for replica in log.replicas)
    return {
        "preempted_requests": int((requests["num_preemptions"][done] > 0).sum()),
        "worst_preempted": _worst_preempted(run, done),
        "recomputed_tokens": recomputed,
        "recomputed_share": _per(recomputed, int(computed[inside].sum())),
        "hit_tokens": hits,
        "hit_share": _per(hits, asked),
        "resumed_hit_tokens": int(requests["num_resumed_hit"][done].sum()),
        "registered_blocks": sum(r.registered_slots for r in log.replicas) // log.block_size,
        "beams_reforked": sum(replica.num_reforks for replica in log.replicas),
        "blocks_shared_at_forks": shared,
        "copies_made": copies,
        "copies_avoided": shared - (copies - hit_copies),
        "swapped_out_blocks": sum(replica.num_swapped_out for replica in log.replicas),
        "swapped_in_blocks": sum(replica.num_swapped_in for replica in log.replicas),
    }


def _spread(name: str, values: np.ndarray, counts: np.ndarray | None = None) -> dict[str, object]:
    """Mean, median, std and percentiles, by `vllm bench serve`'s keys; None without values."""
    keys = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES)]
    if not len(values):
        return {f"{key}_{name}_ms": None for key in keys}
    if counts is None:
        counts = np.ones(len(values), np.int64)
    total = counts.sum()
    mean = _sum_of(values, counts) / total
    std = float(np.sqrt(_sum_of((values - mean) ** 2, counts) / total))
    order = np.argsort(values)
    values, ends = values[order], np.cumsum(counts[order])
    marks = [_percentile(values, ends, p) for p in (50, *PERCENTILES)]
    return {
        f"{key}_{name}_ms": figure
        for key, figure in zip(keys, (mean, marks[0], std, *marks[1:]), strict=True)
    }


def _percentile(values: np.ndarray, ends: np.ndarray, percent: float) -> float:
    """numpy's linear percentile of sorted values, of which the first n make up ends[n - 1]."""
    place = percent / 100 * (ends[-1] - 1)
    low, high = np.floor(place), np.ceil(place)
    below, above = values[np.searchsorted(ends, [low, high], side="right")]
    return float(below + (above - below) * (place - low))


def _sum_of(values: np.ndarray, weights: np.ndarray) -> float:
    """The weighted sum in float64 (slots times ns pass int64 within hours), by numpy's own pairwise
    summation: that of `@` depends on the number of threads."""
    return float(np.sum(values.astype(np.float64) * weights))


def _within(times_ns: np.ndarray, window: Window) -> np.ndarray:
    """Whether what ends at these times ends in the window."""
    return (times_ns > window.start_ns) & (times_ns <= window.end_ns)


def _overlap(start_ns: np.ndarray, end_ns: np.ndarray, window: Window) -> np.ndarray:
    low, high = np.maximum(start_ns, window.start_ns), np.minimum(end_ns, window.end_ns)
    return np.maximum(high - low, 0)


def _busiest_second(steps: Table, inside: np.ndarray) -> float:
    if not inside.any():
        return 0.0
    second = steps["end_ns"][inside] // 1_000_000_000
    second -= second.min()
    if second.max() > 10 * len(second):  # mostly seconds without a step: number those with one
        _, second = np.unique(second, return_inverse=True)
    return float(np.bincount(second, weights=steps["num_tokens"][inside]).max())


def _most_at_once(requests: Table) -> int:
    there = (requests["arrival_ns"] >= 0) & (requests["outcome"] <= Outcome.UNFINISHED)
    starts = np.sort(requests["arrival_ns"][there])
    finish = requests["finish_ns"][there]
    ends = np.sort(finish[finish >= 0])
    if not len(starts):
        return 0
    return int((np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, "right")).max())


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _per(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None
