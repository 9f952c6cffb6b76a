"""Step times on a designed grid, and the step-time model of kvsim that fits them best."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpu_backend.executor import ModelExecutor
from kvsim.config.models import TableStepTime
from kvsim.engine.decodes import DecodeSet
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove, StepPlan, Work, load_of
from kvsim.engine.request import Request, Sequence, Span
from kvsim.errors import UserError

SETTLING, REPEATS = (
    1,
    2,
)  # steps at each point: one in which its decodes join, then those that count
LONG_ANSWER = 1 << 40  # nobody ends while the grid is measured
NUM_ANSWERS = 1 << 15  # more than the sequences of a point
EVERY_SIZE = 16  # up to here each batch size is measured, and has an entry of its own
PER_OCTAVE = 6  # and from there on so many: even in the logarithm, odd and even sizes alike
REWEIGHTED = 4  # by what the fit before says: weights of its own would draw it to lucky steps
MOVED, MOVES = 16, 5  # blocks moved at once, how often
NS_PER_MS, NS_PER_US = 1e6, 1e3


class Chunk(NamedTuple):
    """`num_new` tokens of a prompt, behind `start` that are in the cache."""

    start: int
    num_new: int


class Point(NamedTuple):
    """A step to measure: so many decodes at a context each, and chunks of prompts."""

    num_decodes: int
    context: int
    chunks: tuple[Chunk, ...] = ()


class Measured(NamedTuple):
    """What a step computed, as kvsim's step-time models see it (plan.load_of), and how long it
    took."""

    num_prompt_tokens: int
    num_seqs: int
    context: int
    num_chunks: int
    num_pairs: int
    duration_ns: int


class Limits(NamedTuple):
    """The largest step that an engine makes, and its pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    shares: bool  # a block may stand in many tables
    is_contiguous: bool  # tables are runs of ids


def grid(limits: Limits, generator: np.random.Generator) -> list[Point]:
    """Points of one pass, drawn within the limits: decodes at batch sizes spread evenly in the
    logarithm, short and long; prompts alone, in one, in several, and late in their context; and
    beside decodes. Sizes are drawn from strata of equal width: kernels like some numbers better
    (even ones, powers of two), and serving comes upon all of them. Raises UserError."""
    last = SETTLING + REPEATS
    slots = limits.num_blocks * limits.block_size
    longest = min(limits.max_model_len, slots) - last
    if longest < 1:
        raise UserError(
            f"engine.max_model_len and the pool must hold {last + 1} tokens to be measured"
        )
    reach = 2 * slots if limits.shares else slots  # of all contexts together
    most_seqs = min(limits.max_num_seqs, limits.num_blocks)
    points = []
    for size in _drawn(entries_of(most_seqs), generator):
        most = max(min(longest, reach // size - last), 1)
        for low, high in ((1 / 16, 1 / 4), (1 / 2, 1)):
            points.append(Point(size, max(int(generator.uniform(low, high) * most), 1)))
    budget = limits.max_num_batched_tokens
    edges = spread(1, budget, 2)

    def chunks_of(num_tokens: int) -> list[tuple[Chunk, ...]]:
        """In as few prompts as may be; if one, also late; from 32 on, in four times as many."""
        count = -(-num_tokens // longest)
        found = [(Chunk(0, num_tokens // count),) * count]
        if count == 1:
            found.append((Chunk(int(generator.integers(longest - num_tokens + 1)), num_tokens),))
        if num_tokens >= 32:
            found.append((Chunk(0, num_tokens // (4 * count)),) * (4 * count))
        return found

    points += [Point(0, 0, chunks) for n in _drawn(edges, generator) for chunks in chunks_of(n)]
    for size in _drawn(spread(2, most_seqs // 2, 1), generator):
        context = max(int(generator.uniform(0, 0.7) * min(longest, slots // size)), 1)
        for n in _drawn(edges[::2], generator):
            points += [Point(size, context, chunks) for chunks in chunks_of(n)[:2]]
    return [
        point
        for point in points
        if point.num_decodes + len(point.chunks) <= limits.max_num_seqs
        and point.num_decodes + sum(chunk.num_new for chunk in point.chunks) <= budget
    ]


def spread(first: int, last: int, per_octave: int) -> list[int]:
    """first, so many numbers an octave, evenly in the logarithm, and `last`."""
    if last < first:
        return []
    steps = np.arange(int(np.log2(last / first) * per_octave) + 1)
    return sorted({*np.rint(first * 2 ** (steps / per_octave)).astype(int).tolist(), last})


def entries_of(most_seqs: int) -> list[int]:
    """The batch sizes that have an entry of their own in the table."""
    every = range(1, min(EVERY_SIZE, most_seqs) + 1)
    return sorted({*every, *spread(1, most_seqs, PER_OCTAVE)})


def _drawn(edges: list[int], generator: np.random.Generator) -> list[int]:
    """A number from each edge up to the next one, and the last edge."""
    return [int(generator.integers(a, b)) for a, b in pairwise(edges)] + edges[-1:]


def measured_steps(executor: ModelExecutor, limits: Limits, seed: int) -> Iterator[Measured | None]:
    """Run the grid's steps, one for each item that is asked for, in a random order, pass after pass
    without end; None for a step in which a point settles. The executor stands for LONG_ANSWER
    tokens of NUM_ANSWERS requests."""
    generator = np.random.default_rng(seed)
    decodes, tables = DecodeSet(limits.block_size), _tables(limits)
    number = 0

    def sequence(num_tokens: int) -> Sequence:
        nonlocal number
        number += 1
        index = number % NUM_ANSWERS
        request = Request(index, (Span(index, 0, num_tokens),), num_tokens)
        return Sequence(request, num_tokens=num_tokens, blocks=next(tables), order=number)

    members: list[Sequence] = []
    while True:
        points = grid(limits, generator)
        for place in generator.permutation(len(points)).tolist():
            point = points[place]
            for seq in members:
                decodes.leave(seq)
            members = [sequence(point.context) for _ in range(point.num_decodes)]
            for seq in members:
                decodes.join(seq, decodes.clock)
            for repeat in range(SETTLING + REPEATS):
                plan = StepPlan(decodes, 0)
                plan.joined, decodes.joined = decodes.joined, []
                plan.left, decodes.left = decodes.left, []
                for start, num_new in point.chunks:
                    plan.work.append(Work(sequence(start + num_new), start, num_new))
                load = load_of(plan)
                (duration_ns,) = executor.execute(plan, 1).durations_ns
                decodes.clock += 1
                yield None if repeat < SETTLING else Measured(*load, duration_ns)
            executor.texts.forget()


def _tables(limits: Limits) -> Iterator[list[int]]:
    """Block tables for the longest sequence, as different as the pool allows, scattered where they
    may be: what the KV holds is of no matter here."""
    generator = np.random.default_rng(1)
    count = min(-(-limits.max_model_len // limits.block_size), limits.num_blocks)
    ids = np.arange(limits.num_blocks)
    if not limits.is_contiguous:
        ids = generator.permutation(ids)
    start = 0
    while True:
        if limits.is_contiguous and start + count > limits.num_blocks:
            start = 0
        yield np.take(ids, np.arange(start, start + count), mode="wrap").tolist()
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
        for _ in range(MOVES):
            plan = StepPlan(DecodeSet(limits.block_size), 0)
            plan.moves = [BlockMove(kind, block, count + block) for block in range(count)]
            durations.append(executor.execute(plan, 1).durations_ns[0])
        found[f"{name}_block_us"] = _us(float(np.median(durations)) / count)
    return found


def fit(trials: list[list[Measured]], limits: Limits) -> tuple[TableStepTime, list[float]]:
    """A step time for all trials, and how much slower than it the machine was in each.

    The step time's errors, relative to itself, squared and summed, are least, and no coefficient is
    below 0. Decodes alone have an entry for every batch size of the grid, steps with prompts two
    an octave up to the largest measured.
    """
    rows = np.array([one for trial in trials for one in trial], np.float64)
    trial_of = np.repeat(np.arange(len(trials)), [len(trial) for trial in trials])
    prompt, seqs, context, chunks, pairs, times = rows.T
    tokens, has_prompts = prompt + seqs - chunks, chunks > 0
    sizes = entries_of(min(limits.max_num_seqs, limits.num_blocks))
    totals = spread(1, int(tokens.max()), 2)
    columns = [
        _weights(tokens, sizes) * ~has_prompts[:, None],
        _weights(tokens, totals) * has_prompts[:, None],
        seqs,
        context,
        chunks,
        pairs,
    ]
    features = np.column_stack(columns)
    slowness, told = np.ones(len(trials)), times
    for _ in range(REWEIGHTED):
        weights = 1 / np.maximum(told, times.min() / 2)
        even = times / slowness[trial_of]
        solved = _non_negative(features * weights[:, None], even * weights)
        told = features @ solved
        # the mean of ratios: in sums the few longest steps would count most
        slowness = np.bincount(trial_of, times / told) / np.bincount(trial_of)
    ms, prompt_ms, rest = np.split(solved, [len(sizes), len(sizes) + len(totals)])
    per_seq, per_context, per_chunk, per_pair = rest.tolist()
    step_time = TableStepTime(
        kind="table",
        **_table("", sizes, ms),
        **_table("prompt_", totals, prompt_ms),
        per_seq_ms=_ms(per_seq),
        per_context_token_us=_us(per_context),
        per_chunk_ms=_ms(per_chunk),
        per_pair_us=_us(per_pair),
    )
    return step_time, slowness.tolist()


def _table(prefix: str, entries: list[int], solved: np.ndarray) -> dict[str, list]:
    """Two entries at least."""
    ms = [_ms(entry) for entry in solved.tolist()]
    if len(entries) == 1:
        entries, ms = [*entries, entries[0] + 1], ms * 2
    return {f"{prefix}tokens": entries, f"{prefix}ms": ms}


def slowed(step_time: TableStepTime, slowness: float) -> TableStepTime:
    """Every time in it that much longer."""
    longer = {}
    for name, value in step_time.model_dump().items():
        if isinstance(value, float):
            longer[name] = round(value * slowness, 9)
        elif name in ("ms", "prompt_ms"):
            longer[name] = [round(entry * slowness, 9) for entry in value]
    return step_time.model_copy(update=longer)


def _ms(ns: float) -> float:
    """In whole picoseconds, as the simulator keeps it: a step time read again is the same."""
    return round(ns / NS_PER_MS, 9)


def _us(ns: float) -> float:
    return round(ns / NS_PER_US, 6)


def _weights(tokens: np.ndarray, entries: list[int]) -> np.ndarray:
    """How much each entry of a table counts at each number of tokens, [steps, entries]."""
    return np.column_stack([np.interp(tokens, entries, one) for one in np.eye(len(entries))])


def _non_negative(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares; while a coefficient is negative, the one whose column says most is left
    out."""
    norms = np.linalg.norm(features, axis=0)
    kept = np.flatnonzero(norms).tolist()
    while True:
        columns = features[:, kept] / norms[kept]
        solved = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        if not len(solved) or solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    found = np.zeros(features.shape[1])
    found[kept] = solved / norms[kept]
    return found
