"""The simulated executor: a step-time model, and the answer lengths that nobody else may know."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import groupby

from kvsim.engine.plan import Fork, StepPlan, StepResult, load_of
from kvsim.engine.request import Sequence
from kvsim.latency.model import LatencyModel
from kvsim.sim.beams import BeamSurvival


class SimulatedExecutor:
    """Runs plans in no time and says how long they would have taken.

    `output_tokens[i]` is the true answer length of request i. For every member of the decode set
    it keeps the clock of the set at which its answer is complete, in a heap, so that the end of a
    promise costs nothing per sequence. `survival` draws which beams are dropped for others, where
    requests have any.
    """

    def __init__(
        self,
        latency: LatencyModel,
        output_tokens: list[int],
        survival: BeamSurvival | None = None,
    ) -> None:
        self._latency = latency
        self._output_tokens = output_tokens
        self._survival = survival
        self._due: dict[Sequence, int] = {}
        self._ending: dict[int, list[Sequence]] = {}  # clock -> members then due, stale ones too
        self._clocks: list[int] = []  # heap of the keys of _ending

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        due, clock = self._due, plan.decodes.clock
        for seq in plan.joined:
            self._expect(seq, seq.joined_at + self._missing(seq))
        for seq in plan.left:
            due.pop(seq, None)
        steps, finished = max_steps, []
        end = self._next_end(clock)
        if end is not None and end - clock <= max_steps:
            steps = end - clock
            finished = [seq for seq in self._ending[end] if due.get(seq) == end]
        if len(plan.work) > plan.num_joining:
            for seq, start, num_new in plan.work:
                is_last = seq.joined_at < 0 and start + num_new == seq.num_tokens
                if is_last and self._missing(seq) == 1:
                    finished.append(seq)
        if len(finished) > 1:
            finished.sort(key=lambda seq: seq.order)
        forks = () if self._survival is None else self._dropped(plan, self._survival)
        return StepResult(self._durations(plan, steps), finished, forks)

    def _dropped(self, plan: StepPlan, survival: BeamSurvival) -> list[Fork]:
        """The beams that do not survive the step; those of one request stand together in it."""
        forks: list[Fork] = []
        decodes = (work.seq for work in plan.work if work.is_decode and work.seq.request.is_beam)
        for index, beams in groupby(decodes, key=lambda seq: seq.request.index):
            seqs = list(beams)
            if self._missing(seqs[0]) == 1:
                survival.ended(index)
            else:
                forks += survival.forks(seqs)
        return forks

    def _durations(self, plan: StepPlan, steps: int) -> list[int]:
        decodes, step_ns = plan.decodes, self._latency.step_ns
        num_seqs = decodes.num_seqs
        num_computing, context = num_seqs + plan.num_padding_seqs, decodes.context
        if not plan.work and not plan.moves:
            return step_ns(0, num_computing, context, 0, 0, num_seqs, steps)
        durations = step_ns(*load_of(plan), 0, 1, plan.moves)
        if steps > 1:
            context += num_seqs
            durations += step_ns(0, num_computing, context, 0, 0, num_seqs, steps - 1)
        return durations

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
