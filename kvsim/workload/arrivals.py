"""When requests arrive: arrival processes, as functions from a number of requests to times.

Every process counts its first gap from time 0. Chance is drawn at unit rate and scaled by the rate
last: with one seed two rates differ by a stretch of time, not in luck, and the first k arrivals
are the same whatever number is asked for. Times are int64 nanoseconds [n], never falling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvsim.errors import UserError

NS_PER_S = 1_000_000_000
LAST_S = 4e9  # 127 years
MOST_DRAWS = 20_000_000

# (n, generator) -> arrival_ns of the first n requests; shorter where the process ends before.
ArrivalProcess = Callable[[int, np.random.Generator], np.ndarray]


class RateState(NamedTuple):
    """A state of a modulated process: Poisson at `rate_per_s`, for `mean_dwell_s` on average."""

    rate_per_s: float
    mean_dwell_s: float


def poisson(n: int, generator: np.random.Generator, *, rate_per_s: float) -> np.ndarray:
    return _ns(_unit_poisson(n, generator) / rate_per_s)


def gamma(n: int, generator: np.random.Generator, *, rate_per_s: float, cv: float) -> np.ndarray:
    """Independent Gamma gaps with coefficient of variation `cv` (> 0); 1 is Poisson.

    vLLM's benchmark calls 1 / cv**2 the burstiness. Only gaps vary, not the rate: bursts longer
    than a few gaps need `markov_modulated` or `piecewise`.
    """
    gaps = generator.standard_gamma(1.0 / cv**2, n) * cv**2
    return _ns(np.cumsum(gaps) / rate_per_s)


def piecewise(
    n: int, generator: np.random.Generator, *, segments: Sequence[tuple[float, float]]
) -> np.ndarray:
    """Poisson with a rate that changes at set times; `segments` are (start_s, rate_per_s).

    The first starts at 0, starts rise, the last segment does not end. Fewer than n requests
    arrive where its rate is 0. By time change: unit Poisson through the inverse of the rate's
    integral.
    """
    starts, rates = np.array(segments, float).T
    expected = np.concatenate(([0.0], np.cumsum(rates[:-1] * np.diff(starts))))
    unit = _unit_poisson(n, generator)
    if rates[-1] == 0.0:
        unit = unit[unit < expected[-1]]
    return _ns(_through(unit, expected, starts, rates))


def markov_modulated(
    n: int, generator: np.random.Generator, *, states: Sequence[RateState]
) -> np.ndarray:
    """Poisson whose rate follows states taken in turn, each for an exponential time (MMPP).

    It starts in its steady state, so the mean rate is sum(rate * dwell) / sum(dwell) from time 0
    on. At least one rate is above 0. The path of the states and the arrivals given the path are
    separate streams.
    """
    path, luck = generator.spawn(2)
    rates, mean_dwells = np.array(states, float).T
    unit = _unit_poisson(n, luck)
    first = int(np.searchsorted(np.cumsum(mean_dwells) / mean_dwells.sum(), path.random()))
    dwells_s = np.empty(0)
    while True:
        dwells_s = np.append(dwells_s, path.standard_exponential(max(64, len(dwells_s))))
        state = (first + np.arange(len(dwells_s))) % len(states)
        expected = np.cumsum(dwells_s * mean_dwells[state] * rates[state])
        if n == 0 or expected[-1] > unit[-1]:
            break
        if len(dwells_s) > MOST_DRAWS:
            raise UserError(f"workload: {n:,} arrivals take over {MOST_DRAWS:,} changes of state")
    starts = np.concatenate(([0.0], np.cumsum(dwells_s * mean_dwells[state])[:-1]))
    return _ns(_through(unit, np.concatenate(([0.0], expected[:-1])), starts, rates[state]))


def all_at_once(n: int, generator: np.random.Generator) -> np.ndarray:
    """Everything at time 0: offline inference, and the saturated end of a capacity search."""
    return np.zeros(n, np.int64)


def replay(
    n: int, generator: np.random.Generator, *, arrival_ns: np.ndarray, speed: float
) -> np.ndarray:
    """The first n of `arrival_ns`, `speed` times as fast; fewer where it holds fewer."""
    return faster(arrival_ns[:n], speed)


def faster(times_ns: np.ndarray, speed: float) -> np.ndarray:
    """int64 ns divided by `speed` and rounded; UserError beyond the clock."""
    if speed == 1:
        return times_ns
    return clock_ns(times_ns / (speed * NS_PER_S), "times")


def within(process: ArrivalProcess, make: Callable[[], np.random.Generator], until_ns: int) -> int:
    """How many requests of `process` arrive before `until_ns`; `make` returns its fresh generator.

    Raises UserError where time stands still or too many arrive to be drawn.
    """
    n = 1024
    while True:
        arrival_ns = process(n, make())
        if len(arrival_ns) == n and arrival_ns[-1] == 0:
            raise UserError("workload: requests arrive all at once: give num_requests instead")
        if len(arrival_ns) < n or arrival_ns[-1] >= until_ns:
            return int(np.searchsorted(arrival_ns, until_ns, side="left"))
        n *= 2
        if n > MOST_DRAWS:
            raise UserError(f"workload: over {MOST_DRAWS:,} requests arrive in that time")


def _unit_poisson(n: int, generator: np.random.Generator) -> np.ndarray:
    return np.cumsum(generator.standard_exponential(n))


def _through(
    unit: np.ndarray, expected: np.ndarray, starts_s: np.ndarray, rates: np.ndarray
) -> np.ndarray:
    """The times at which the integrated rate reaches `unit`; piece i starts at expected[i]."""
    piece = np.searchsorted(expected, unit, side="right") - 1  # skips pieces whose rate is 0
    return starts_s[piece] + (unit - expected[piece]) / rates[piece]


def clock_ns(seconds: np.ndarray, what: str) -> np.ndarray:
    """Seconds as int64 ns. Raises UserError beyond what the clock holds with room to spare."""
    last = float(np.max(seconds, initial=0.0))
    if not last <= LAST_S:
        raise UserError(f"workload: {what} reach {last:.3g} s; the clock holds {LAST_S:.0e} s")
    return np.rint(seconds * NS_PER_S).astype(np.int64)


def _ns(seconds: np.ndarray) -> np.ndarray:
    return clock_ns(seconds, "arrival times")
