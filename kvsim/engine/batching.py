"""Batch policies: which of the scheduler's two moves a step makes, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvsim.engine.plan import ARRIVALS, STATIC_BATCH, StepPlan

if TYPE_CHECKING:
    from kvsim.engine.scheduler import Scheduler


class Batching(NamedTuple):
    """`fill` makes the plan; with `returns_together` answers wait for the last of their batch."""

    fill: Callable[[Scheduler, StepPlan], None]
    returns_together: bool


def _continuous(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.continue_running(plan)
    if not plan.preempted:
        scheduler.admit_waiting(plan)


def _static(scheduler: Scheduler, plan: StepPlan) -> None:
    if scheduler.running:
        scheduler.continue_running(plan)
        plan.limit = STATIC_BATCH
        return
    plan.token_budget = 1 + sum(seq.num_tokens for seq in scheduler.waiting)  # never what binds
    scheduler.admit_waiting(plan)
    longest = max(work.num_new for work in plan.work)
    plan.num_padding_tokens = sum(longest - work.num_new for work in plan.work)
    if plan.limit == ARRIVALS:
        plan.limit = STATIC_BATCH


CONTINUOUS = Batching(_continuous, returns_together=False)
"""Iteration-level: finished answers leave and waiting requests enter at every step (Orca, Yu et
al. 2022; running before waiting and no admission after a preemption as in vLLM V1)."""

STATIC = Batching(_static, returns_together=True)
"""Request-level, as FasterTransformer: fill a batch, pad its prompts to the longest, run it until
its last answer is complete, return all together (Kwon et al. 2023, section 6.1)."""
