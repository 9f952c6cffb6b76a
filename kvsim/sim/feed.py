"""From workload rows to submitted sequences: arrivals, refusals, routing, closed loops."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import simpy

from kvsim.engine.request import Request, Sequence, Span, merged
from kvsim.sim.replica import NEVER, Replica
from kvsim.workload.workload import Workload


class Outcome(IntEnum):
    """What became of a request. The first two finished; the last three were refused."""

    STOP = 0  # made its whole answer
    LENGTH = 1  # outgrew a fixed reservation, or reached max_tokens
    UNFINISHED = 2  # the simulation stopped before
    TOO_LONG = 3  # prompt and answer exceed the model's maximum length
    NEVER_FITS = 4  # not even alone in the pool (or more answers than seats)
    NO_TOKENS = 5  # no prompt or no answer: a failed request in the trace


Route = Callable[[list[Replica]], int]


def round_robin() -> Route:
    """Replicas in turn."""
    turn = -1

    def route(replicas: list[Replica]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(replicas)
        return turn

    return route


def least_outstanding() -> Route:
    """The replica with the fewest answers waiting or running, of equals the first."""

    def route(replicas: list[Replica]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].num_outstanding)

    return route


class Feed:
    """Brings every request of a workload to a replica at its time, or refuses it."""

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        answer_tokens: list[int],
        max_model_len: int,
        route: Route,
    ) -> None:
        self.outcome = [int(Outcome.UNFINISHED)] * len(workload)
        self.replica_of = [-1] * len(workload)
        self.arrived_ns = [-1] * len(workload)
        self.replicas: list[Replica] = []
        self._env = env
        self._workload = workload
        self._answer_tokens = answer_tokens
        self._max_model_len = max_model_len
        self._route = route
        self._prompt_tokens = workload.prompt_tokens.tolist()
        self._output_tokens = workload.output_tokens.tolist()
        self._num_samples = workload.num_samples.tolist()
        self._max_tokens = workload.max_tokens.tolist()
        self._priority = workload.priority.tolist()
        self._has_spans = workload.spans is not None
        self._missing: dict[int, int] = {}  # answers still to end, where a request has several
        self._next: dict[int, list[int]] = {}
        self.has_followers = bool((workload.after >= 0).any())
        for row in np.flatnonzero(workload.after >= 0).tolist():
            self._next.setdefault(int(workload.after[row]), []).append(row)

    def open(self) -> None:
        """Let the open-loop rows come, each at its time."""
        rows = np.flatnonzero(self._workload.after < 0)
        times = self._workload.arrival_ns[rows].tolist()
        self._has_one_replica = len(self.replicas) == 1
        self._coming = iter(zip(rows.tolist(), times, strict=True))
        self._await_next(None)

    def _await_next(self, arrived: simpy.Event | None) -> None:
        """Bring the row that is due with all others of this instant, and wait for the next."""
        now_ns = self._env.now
        if arrived is not None:
            self._arrive(arrived.value)
        for row, time_ns in self._coming:
            if time_ns > now_ns:
                timeout = self._env.timeout(time_ns - now_ns, row)
                timeout.callbacks.append(self._await_next)
                if self._has_one_replica:  # it need promise nothing beyond
                    self.replicas[0].next_arrival_ns = time_ns
                return
            self._arrive(row)
        if self._has_one_replica:
            self.replicas[0].next_arrival_ns = NEVER

    def ended(self, seq: Sequence) -> None:
        """An answer has ended; its request is over with its last one."""
        index = seq.request.index
        missing = self._missing.get(index, seq.width) - seq.width
        if missing:
            self._missing[index] = missing
            return
        self._missing.pop(index, None)
        wanted = self._output_tokens[index]
        is_whole = wanted == self._answer_tokens[index]
        self._over(index, Outcome.STOP if is_whole else Outcome.LENGTH)

    def _arrive(self, index: int) -> None:
        self.arrived_ns[index] = self._env.now
        prompt, answer = self._prompt_tokens[index], self._output_tokens[index]
        limit = self._max_tokens[index]
        if limit >= 0:
            answer = min(answer, limit)
        if prompt <= 0 or answer <= 0:
            return self._over(index, Outcome.NO_TOKENS)
        room = self._max_model_len - prompt
        if answer > room:
            return self._over(index, Outcome.TOO_LONG)
        if not 0 <= limit <= room:
            limit = room
        num_samples = self._num_samples[index]
        if self._has_spans:
            spans = merged(self._workload.prompt(index))
        else:
            spans = (Span(index, 0, prompt),)
        request = Request(
            index, spans, prompt, num_samples, limit, self._priority[index], self._workload.is_beam
        )
        scheduler = self.replicas[0].scheduler
        if not scheduler.fits(request, prompt + self._answer_tokens[index]):
            return self._over(index, Outcome.NEVER_FITS)
        chosen = self._route(self.replicas)
        self.replica_of[index] = chosen
        if num_samples > 1:
            self._missing[index] = num_samples
        replica = self.replicas[chosen]
        if scheduler.kv.can_fork:
            replica.submit(Sequence(request, num_tokens=prompt, width=num_samples))
        else:
            for sample in range(num_samples):
                replica.submit(Sequence(request, sample, num_tokens=prompt))
        return None

    def _over(self, index: int, outcome: Outcome) -> None:
        self.outcome[index] = int(outcome)
        for row in self._next.pop(index, ()):
            wake = self._env.timeout(int(self._workload.think_ns[row]), row)
            wake.callbacks.append(lambda event: self._arrive(event.value))
