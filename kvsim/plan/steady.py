"""What a steady flow of like requests does to one replica: how many run, and what binds."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from kvsim.memory.kv import Pool

MOST_STEP_S = 100.0
SCAN, HALVINGS = 1.25, 24


class StepLoad(NamedTuple):
    """One step: sequences that make a token, the sum of their context, and of prompts the tokens,
    the chunks, and the pairs of a token and one that it attends to."""

    decodes: float
    context: float
    prompt_tokens: float
    chunks: float
    pairs: float


StepTime = Callable[[StepLoad], float]  # seconds


class Flow(NamedTuple):
    """Requests of input_len and output_len tokens each, rate_per_s of them, or `users` always in
    flight, on one replica."""

    input_len: int
    output_len: int
    rate_per_s: float | None = None
    users: float | None = None


class Room(NamedTuple):
    """How many of a flow's requests run at once at most, by memory and by max_num_seqs."""

    mean_tokens: float
    longest_tokens: int
    by_mean: float
    by_longest: float
    max_num_seqs: int

    @property
    def binds(self) -> str:
        return "KV memory" if self.by_mean < self.max_num_seqs else "max_num_seqs"

    @property
    def at_once(self) -> float:
        return min(self.by_mean, self.max_num_seqs)


class State(NamedTuple):
    """Means of the steady state, without the queues that bursts make; running by Little's law."""

    rate_per_s: float
    running: float
    kv_share: float
    ttft_s: float
    tpot_s: float
    e2el_s: float
    prompt_share: float


class Limit(NamedTuple):
    """The rate at which a limit binds."""

    name: str
    rate_per_s: float


class Replica(NamedTuple):
    pool: Pool
    max_num_seqs: int
    max_num_batched_tokens: int
    step_s: StepTime


def room(flow: Flow, pool: Pool, max_num_seqs: int) -> Room:
    """A request holds its prompt and, in the mean over its decoding, half of its output; of a
    window's layers no more than the window, since a decode's step has one token."""
    mean, longest = flow.input_len + flow.output_len / 2, flow.input_len + flow.output_len
    decoding = pool._replace(step_tokens=1)
    by_mean, by_longest = map(decoding.requests_at_once, (ceil(mean), longest))
    return Room(mean, longest, by_mean, by_longest, max_num_seqs)


def state_at(flow: Flow, replica: Replica, rate_per_s: float) -> State | None:
    """None where the steps cannot keep up with the rate.

    Of T, the mean step, three things follow: decodes running, rate x (output - 1) x T (Little);
    prompt tokens a step; and the share of steps with a prompt in them, whose time is the mean's
    other part. T is the least that reproduces itself.
    """
    mean_s = _least_step_s(flow, replica, rate_per_s)
    if mean_s is None:
        return None
    decodes = rate_per_s * (flow.output_len - 1) * mean_s
    chunks = _chunks(flow, replica, decodes)
    with_prompt = replica.step_s(_load(flow, decodes, flow.input_len / chunks, chunks))
    work_s = chunks * with_prompt
    share = min(rate_per_s * chunks * mean_s, 1.0)
    # prompts wait for one another as in M/D/1, as far as a step holds one prompt only
    busy = min(rate_per_s * work_s, 0.95) if share < 1 else 0.0
    ttft = mean_s / 2 + work_s + work_s * busy / (2 * (1 - busy))
    e2el = ttft + (flow.output_len - 1) * mean_s
    running = rate_per_s * e2el
    kv = running / max(room(flow, replica.pool, replica.max_num_seqs).by_mean, 1e-9)
    return State(rate_per_s, running, kv, ttft, mean_s, e2el, share)


def _least_step_s(flow: Flow, replica: Replica, rate_per_s: float) -> float | None:
    low = high = replica.step_s(_load(flow, 1, 0, 1))
    low = 0.0
    while _next_step_s(flow, replica, rate_per_s, high) > high:
        low, high = high, high * SCAN
        if high > MOST_STEP_S:
            return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _next_step_s(flow, replica, rate_per_s, middle) > middle:
            low = middle
        else:
            high = middle
    return high


def _next_step_s(flow: Flow, replica: Replica, rate_per_s: float, mean_s: float) -> float:
    """The mean step that a mean step of mean_s leads to; inf past the step's budget."""
    decodes = rate_per_s * (flow.output_len - 1) * mean_s
    prompt_tokens = rate_per_s * flow.input_len * mean_s
    if decodes + prompt_tokens > replica.max_num_batched_tokens:
        return float("inf")
    chunks = _chunks(flow, replica, decodes)
    share = rate_per_s * chunks * mean_s
    if share >= 1:  # some of every step is prompt
        return replica.step_s(_load(flow, decodes, prompt_tokens, chunks)._replace(chunks=share))
    alone = replica.step_s(_load(flow, decodes, 0, 1))
    beside = replica.step_s(_load(flow, decodes, flow.input_len / chunks, chunks))
    return (1 - share) * alone + share * beside


def _chunks(flow: Flow, replica: Replica, decodes: float) -> int:
    return ceil(flow.input_len / max(replica.max_num_batched_tokens - decodes, 1.0))


def _load(flow: Flow, decodes: float, prompt_tokens: float, chunks: int) -> StepLoad:
    """A prompt token attends to half of its prompt, in the mean."""
    context = decodes * (flow.input_len + flow.output_len / 2)
    pairs = prompt_tokens * (flow.input_len + 1) / 2
    return StepLoad(decodes, context, prompt_tokens, 1.0 if prompt_tokens else 0.0, pairs)


def limits_of(flow: Flow, replica: Replica) -> list[Limit]:
    """Each limit with the rate at which it binds, the lowest first."""
    top = _highest(flow, replica, lambda state: True)
    most = room(flow, replica.pool, replica.max_num_seqs)
    found = [Limit("step time", top)]
    for name, at_once in (("KV memory", most.by_mean), ("max_num_seqs", most.max_num_seqs)):
        rate = _highest(flow, replica, lambda state, n=at_once: state.running <= n)
        if rate < top:
            found.append(Limit(name, rate))
    return sorted(found, key=lambda limit: limit.rate_per_s)


def rate_of_users(flow: Flow, replica: Replica, users: float) -> float:
    """The rate at which so many requests are in flight: a closed loop's."""
    return _highest(flow, replica, lambda state: state.running <= users)


def _highest(flow: Flow, replica: Replica, holds: Callable[[State], bool]) -> float:
    low, high = 0.0, 1e-4
    while (state := state_at(flow, replica, high)) is not None and holds(state):
        low, high = high, high * 2
    for _ in range(14):
        middle = (low + high) / 2
        state = state_at(flow, replica, middle)
        if state is not None and holds(state):
            low = middle
        else:
            high = middle
    return low
