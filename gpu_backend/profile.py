"""Step times on a designed grid, and the step-time model of kvsim that fits them best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gpu_backend.executor import ModelExecutor
from kvsim.engine.decodes import DecodeSet
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove, StepPlan, Work, load_of
from kvsim.engine.request import Request, Sequence, Span
from kvsim.errors import UserError

REPEATS = 5  # steps at each point; their mean counts
LONG_ANSWER = 1 << 40  # nobody ends while a point is measured
MOVED = 16  # blocks moved at once
NS_PER_MS, NS_PER_US = 1e6, 1e3


class Point(NamedTuple):
    """A step to measure: so many decodes at a context each, and prompts of so many tokens."""

    num_decodes: int
    context: int
    prompts: tuple[int, ...] = ()


class Measured(NamedTuple):
    """What a step computed, as kvsim's step-time models see it, and how long it took."""

    num_prompt_tokens: int
    num_seqs: int
    context: int
    duration_ns: int


class Limits(NamedTuple):
    """The largest step that an engine makes, and its pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int


def grid(limits: Limits) -> list[Point]:
    """Batches and contexts in powers of two (serving spends its time at small and large ones, so
    neither may be rare), each pair that the pool holds; then prompts alone and beside decodes."""
    slots = limits.num_blocks * limits.block_size
    longest = min(limits.max_model_len, slots) - REPEATS - 1
    if longest < 1:
        raise UserError(
            f"engine.max_model_len and the pool must hold {REPEATS + 2} tokens to be measured"
        )
    batches, contexts = [*_doubled(1, limits.max_num_seqs)], [*_doubled(16, longest)]
    points = [Point(s, c) for s in batches for c in contexts if s * c <= slots]
    budget = min(limits.max_num_batched_tokens, longest)
    context = min(64, longest)
    beside = min(8, limits.max_num_seqs, slots // context)
    for tokens in _doubled(8, budget):
        points += [Point(0, 0, (tokens,)), Point(beside, context, (tokens,))]
        if tokens >= 64:
            points.append(Point(0, 0, (tokens // 4,) * 4))
    return points


def measure(
    make_executor: Callable[[list[int]], ModelExecutor], points: list[Point], limits: Limits
) -> list[Measured]:
    """Every point's step, in an order that spreads a drift of the machine over all of them."""
    num_seqs = sum(point.num_decodes + REPEATS * len(point.prompts) for point in points)
    numbers = iter(range(num_seqs))
    order = np.random.default_rng(0).permutation(len(points))
    found: dict[int, Measured] = {}
    executor = make_executor([LONG_ANSWER] * num_seqs)
    for number in order.tolist():
        found[number] = _measured(executor, points[number], limits, numbers)
    return [found[number] for number in range(len(points))]


def _measured(
    executor: ModelExecutor, point: Point, limits: Limits, numbers: Iterator[int]
) -> Measured:
    decodes = DecodeSet(limits.block_size)
    tables = _tables(limits)
    members = [
        _sequence(next(numbers), point.context, next(tables)) for _ in range(point.num_decodes)
    ]
    for seq in members:
        decodes.join(seq, 0)
    durations, load = [], (0, 0, 0)
    for repeat in range(REPEATS):
        plan = StepPlan(decodes, 0)
        if not repeat:
            plan.joined, decodes.joined = decodes.joined, []
        for tokens in point.prompts:
            seq = _sequence(next(numbers), tokens, next(tables))
            plan.work.append(Work(seq, 0, tokens))
        load = load_of(plan)
        durations.append(executor.execute(plan, 1).durations_ns[0])
        decodes.clock += 1
    for seq in members:
        decodes.leave(seq)
    plan = StepPlan(decodes, 0)
    plan.left = decodes.left
    executor.execute(plan, 1)
    executor.answers.clear()
    return Measured(*load, round(np.mean(durations)))


def _sequence(index: int, num_tokens: int, blocks: list[int]) -> Sequence:
    request = Request(index, (Span(index, 0, num_tokens),), num_tokens)
    return Sequence(request, num_tokens=num_tokens, blocks=blocks, order=index)


def _tables(limits: Limits) -> Iterator[list[int]]:
    """Block tables for the longest sequence, scattered and as different as the pool allows: what
    the KV holds is of no matter here."""
    generator = np.random.default_rng(1)
    count = min(-(-limits.max_model_len // limits.block_size), limits.num_blocks)
    scattered = generator.permutation(limits.num_blocks)
    start = 0
    while True:
        yield np.take(scattered, np.arange(start, start + count), mode="wrap").tolist()
        start += count


def moved_block_us(
    executor: ModelExecutor, limits: Limits, num_host_blocks: int
) -> dict[str, float]:
    """Microseconds for each block that a step copies, swaps out or swaps in."""
    found = {}
    for kind, name in ((COPY, "copy"), (SWAP_OUT, "swap_out"), (SWAP_IN, "swap_in")):
        room = limits.num_blocks if kind == COPY else min(limits.num_blocks, num_host_blocks)
        count = min(MOVED, room // 2)
        if not count:
            continue
        durations = []
        for _ in range(REPEATS):
            plan = StepPlan(DecodeSet(limits.block_size), 0)
            plan.moves = [BlockMove(kind, block, count + block) for block in range(count)]
            durations.append(executor.execute(plan, 1).durations_ns[0])
        found[f"{name}_block_us"] = float(np.median(durations)) / count / NS_PER_US
    return found


def fit(measured: list[Measured]) -> dict[str, float]:
    """The step_time of an experiment file whose relative errors, squared and summed, are least, no
    coefficient below 0."""
    rows = np.array(measured, np.float64)
    prompt, seqs, context, times = rows.T
    features = np.column_stack([np.ones(len(rows)), seqs, context, prompt, prompt > 0])
    solved = _non_negative(features / times[:, None], np.ones(len(rows)))
    base, per_seq, per_context, per_prompt, prompt_step = solved.tolist()
    return {
        "base_ms": max(base / NS_PER_MS, 1e-6),
        "per_seq_ms": per_seq / NS_PER_MS,
        "per_context_token_us": per_context / NS_PER_US,
        "per_prompt_token_ms": per_prompt / NS_PER_MS,
        "prompt_step_ms": prompt_step / NS_PER_MS,
    }


def _non_negative(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares, the most negative coefficient left out until none is."""
    kept = list(range(features.shape[1]))
    while True:
        solved = np.linalg.lstsq(features[:, kept], wanted, rcond=None)[0]
        if not len(solved) or solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    found = np.zeros(features.shape[1])
    found[kept] = solved
    return found


def _doubled(first: int, last: int) -> Iterator[int]:
    """first, twice that and so on; and `last`."""
    value = first
    while value < last:
        yield value
        value *= 2
    if last > 0:
        yield last
