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
        due = self._due
        for seq in plan.joined:
            self._expect(seq, seq.joined_at + self._missing(seq))
        for seq in plan.left:
            due.pop(seq, None)
        clock = plan.decodes.clock
        end = self._next_end(clock)
        steps, finished = max_steps, []
        if end is not None and end - clock <= max_steps:
            steps = end - clock
            finished = [seq for seq in self._ending[end] if due.get(seq) == end]
        for seq, num_new in plan.work:
            if seq.num_computed + num_new == seq.num_tokens and self._missing(seq) == 1:
                finished.append(seq)
        if len(finished) > 1:
            finished.sort(key=lambda seq: seq.order)
        durations = self._latency.step_ns(*load_of(plan), plan.decodes.num_seqs, steps)
        return StepResult(durations, finished)

    def _missing(self, seq: Sequence) -> int:
        """Tokens that its answer still lacks."""
        request = seq.request
        return self._output_tokens[request.index] - seq.num_tokens + request.prompt_tokens

    def _expect(self, seq: Sequence, clock: int) -> None:
        self._due[seq] = clock
        if clock not in self._ending:
            self._ending[clock] = []
            heappush(self._clocks, clock)
        self._ending[clock].append(seq)

    def _next_end(self, clock: int) -> int | None:
        """The first clock after `clock` at which a member ends."""
        due = self._due
        while self._clocks:
            end = self._clocks[0]
            if end > clock:
                for seq in self._ending[end]:
                    if due.get(seq) == end:
                        return end
            heappop(self._clocks)
            del self._ending[end]
        return None
