"""The simulated executor: a step-time model, and the answer lengths that nobody else may know."""

from __future__ import annotations

from heapq import heappop, heappush

from kvsim.engine.plan import StepPlan, StepResult, load_of
from kvsim.engine.request import Sequence
from kvsim.latency.model import LatencyModel


class SimulatedExecutor:
    """Runs plans in no time and says how long they would have taken.

    `output_tokens[i]` is the true answer length of request i. For every member of the decode set
    it keeps the clock of the set at which its answer is complete, in a heap, so that the end of a
    promise costs nothing per sequence.
    """

    def __init__(self, latency: LatencyModel, output_tokens: list[int]) -> None:
        self._latency = latency
        self._output_tokens = output_tokens
        self._due: dict[Sequence, int] = {}
        self._ending: dict[int, list[Sequence]] = {}  # clock -> members then due, stale ones too
        self._clocks: list[int] = []  # heap of the keys of _ending

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        for seq in plan.joined:
            self._expect(seq, seq.joined_at + self._missing(seq))
        for seq in plan.left:
            self._due.pop(seq, None)
        clock = plan.decodes.clock
        end = self._next_end(clock)
        steps = max_steps if end is None else min(max_steps, end - clock)
        finished = []
        if end == clock + steps:
            finished = [seq for seq in self._ending[end] if self._due.get(seq) == end]
        for work in plan.work:
            if work.emits and self._missing(work.seq) == 1:
                finished.append(work.seq)
        if len(finished) > 1:
            finished.sort(key=lambda seq: seq.order)
        load = load_of(plan)
        durations = self._latency.step_ns(load, plan.decodes.num_seqs, steps)
        return StepResult(durations, finished)

    def _missing(self, seq: Sequence) -> int:
        """Tokens that its answer still lacks."""
        return self._output_tokens[seq.request.index] - seq.num_generated

    def _expect(self, seq: Sequence, clock: int) -> None:
        self._due[seq] = clock
        if clock not in self._ending:
            self._ending[clock] = []
            heappush(self._clocks, clock)
        self._ending[clock].append(seq)

    def _next_end(self, clock: int) -> int | None:
        """The first clock after `clock` at which a member ends."""
        while self._clocks:
            end = self._clocks[0]
            if end > clock and any(self._due.get(seq) == end for seq in self._ending[end]):
                return end
            heappop(self._clocks)
            del self._ending[end]
        return None
