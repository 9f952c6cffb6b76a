"""One replica: the step loop of an engine, driven by SimPy's clock."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from kvsim.engine.plan import ARRIVALS, Executor, Fork, StepPlan
from kvsim.engine.request import Sequence
from kvsim.engine.scheduler import Scheduler
from kvsim.sim.recorder import Recorder

NEVER = 1 << 62
STEP_END, PLAN = 2, 1 << 20
"""SimPy priorities. At one instant come first the arrivals, then the ends of steps (replicas in
order, each followed by the arrivals that it causes), then the plans of the next steps."""


class _Alarm(simpy.Event):
    """A triggered event that calls back once its time has come."""

    def __init__(self, env: simpy.Environment, on_alarm: Callable[[simpy.Event], None]) -> None:
        self.env = env
        self.callbacks = [on_alarm]
        self._ok = True
        self._value = None


class Replica:
    """Plans a step, lets the executor promise how long it and its repeats take, waits for the last,
    commits. An arrival that could enter the batch cuts the promise at the end of the step in
    flight; one that could not (no seat, a blocked head before it) changes nothing and waits.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        scheduler: Scheduler,
        executor: Executor,
        recorder: Recorder,
        on_end: Callable[[Sequence], None],
        *,
        jump: bool,
        has_followers: bool,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.recorder = recorder
        self.next_arrival_ns = NEVER  # of a request that is sure to come here, as far as known
        self.num_outstanding = 0  # sequences submitted and not ended
        self._env = env
        self._index = index
        self._on_end = on_end
        self._jump = jump
        self._has_followers = has_followers  # an end may cause an arrival, here or elsewhere
        self._alarm: simpy.Event | None = None
        self._plan: StepPlan | None = None
        self._start_ns = 0
        self._durations: list[int] = []
        self._finished: list[Sequence] = []
        self._forks: list[Fork] | tuple[()] = ()
        recorder.idle(scheduler.kv.usage())

    def submit(self, seq: Sequence) -> None:
        self.num_outstanding += 1
        self.scheduler.submit(seq)
        if self._alarm is None:  # idle: plan once everything of this instant has arrived
            self._set_alarm(0, PLAN)
        elif self._plan is not None and len(self._durations) > 1 and self._may_enter(self._plan):
            self._cut()

    def _may_enter(self, plan: StepPlan) -> bool:
        """Whether an arrival could enter the batch after the step in flight: nothing blocks the
        queue, or by priority it may pass a head that is blocked."""
        return plan.limit == ARRIVALS or self.scheduler.is_by_priority

    def stop(self) -> None:
        """End the simulation: the step in flight runs to its end, and no other begins."""
        if self._plan is not None:
            self._cut()
            self._commit()
        self.recorder.stopped(self.scheduler)

    def _begin(self) -> None:
        now_ns, scheduler = self._env.now, self.scheduler
        plan = scheduler.plan()
        steps = scheduler.steady_steps(plan) if self._jump else 1
        self._durations, self._finished, self._forks = self.executor.execute(plan, steps)
        self._plan = plan
        self._start_ns = now_ns
        end_ns = now_ns + sum(self._durations)
        if end_ns > self.next_arrival_ns and plan.limit == ARRIVALS:
            end_ns = self._keep_until(self.next_arrival_ns)
        self._set_alarm(end_ns - now_ns, STEP_END)

    def _cut(self) -> None:
        """Let the promise end with the step in flight."""
        num_steps = len(self._durations)
        end_ns = self._keep_until(self._env.now)
        if len(self._durations) < num_steps:
            self._set_alarm(end_ns - self._env.now, STEP_END)

    def _keep_until(self, at_ns: int) -> int:
        """Keep the steps of the promise up to the one in flight at at_ns; when that ends."""
        durations, end_ns, num_steps = self._durations, self._start_ns, 0
        for duration_ns in durations:
            end_ns += duration_ns
            num_steps += 1
            if end_ns >= at_ns:  # at one instant arrivals come before ends of steps
                break
        if num_steps < len(durations):
            del durations[num_steps:]
            self._finished = []
        return end_ns

    def _set_alarm(self, delay_ns: int, priority: int) -> None:
        """Wake at now + delay_ns; an alarm set before is void."""
        self._alarm = _Alarm(self._env, self._on_alarm)
        self._env.schedule(self._alarm, priority + self._index, delay_ns)

    def _on_alarm(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        if self._plan is not None:
            self._commit()
            if self._has_followers:  # what they send at this instant enters the next plan
                self._set_alarm(0, PLAN)
                return
        if self.scheduler.has_work:
            self._begin()
        else:
            self._alarm = None
            self.recorder.idle(self.scheduler.kv.usage())

    def _commit(self) -> None:
        plan, finished, self._plan = self._plan, self._finished, None
        scheduler, recorder, durations = self.scheduler, self.recorder, self._durations
        recorder.ran(plan, scheduler, self._start_ns, durations)
        done = scheduler.commit(plan, len(durations), finished, self._forks)
        recorder.committed(self._start_ns + sum(durations), finished, done)
        self.num_outstanding += len(done.forked) - len(done.ended)
        for seq in done.ended:
            self._on_end(seq)
