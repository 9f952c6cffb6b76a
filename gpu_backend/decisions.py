"""What the scheduler decided in each step, noted beside any executor; and two runs compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvsim.engine.plan import BlockMove, Executor, StepPlan, StepResult
from kvsim.engine.request import Sequence
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.run import Engine
from kvsim.study.tables import Run

Name = tuple[int, int]  # of a sequence: request index, sample
SHOWN = 10  # differences that are told


class Decision(NamedTuple):
    """One step: the decode set in batch order, the work beside it, block tables of both, who came
    and went, what was moved, and who made its last token."""

    decodes: tuple[Name, ...]
    work: tuple[tuple[int, int, int, int], ...]  # request, sample, start, num_new
    tables: tuple[tuple[int, ...], ...]
    admitted: tuple[Name, ...]
    preempted: tuple[Name, ...]
    moves: tuple[BlockMove, ...]
    padding: tuple[int, int]  # sequences, tokens
    limit: int
    finished: tuple[Name, ...]


class Noting:
    """An executor whose every step is noted: the decisions, and how long it took."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.decisions: list[Decision] = []
        self.durations_ns: list[int] = []

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        decision = _decision(plan)
        result = self._executor.execute(plan, 1)
        finished = tuple(_name(seq) for seq in result.finished)
        self.decisions.append(decision._replace(finished=finished))
        self.durations_ns += result.durations_ns
        return result


class _Replayed:
    """A step-time model that tells measured times one after the other."""

    def __init__(self, durations_ns: Iterable[int]) -> None:
        self._durations = iter(durations_ns)

    def step_ns(self, *_load: object) -> list[int]:
        return [next(self._durations, 1)]  # a run that took another course may be longer


class Replay(NamedTuple):
    """How the simulator decided, given the measured time of every step."""

    num_steps: int
    num_values: int
    differences: list[str]  # the first few


def replayed(
    engine: Engine, durations_ns: list[int], run: Callable[[Engine], Run]
) -> tuple[Noting, Run]:
    """Run the simulated executor with these times for its steps, none advanced at once."""
    noted: list[Noting] = []

    def make(output_tokens: list[int]) -> Noting:
        noted.append(Noting(SimulatedExecutor(_Replayed(durations_ns), output_tokens)))
        return noted[-1]

    made = run(replace(engine, make_executor=make, jump=False))
    return noted[0], made


def compared(real: tuple[Noting, Run], simulated: tuple[Noting, Run]) -> Replay:
    """Every decision of every step, and every value of the tables of steps and requests."""
    (noted, run), (simulated_noted, simulated_run) = real, simulated
    differences: list[str] = []
    num_values = 0
    if len(noted.decisions) != len(simulated_noted.decisions):
        counts = f"{len(simulated_noted.decisions):,} simulated, {len(noted.decisions):,} measured"
        differences.append(f"steps: {counts}")
    pairs = zip(simulated_noted.decisions, noted.decisions, strict=False)
    for step, (told, made) in enumerate(pairs):
        num_values += _num_values(made)
        for name, a, b in zip(Decision._fields, told, made, strict=True):
            if a != b:
                differences.append(f"step {step}: {name}: {a} simulated, {b} measured")
    for name in ("steps", "requests"):
        table, simulated_table = getattr(run, name), getattr(simulated_run, name)
        for column, values in table.items():
            num_values += len(values)
            if not np.array_equal(values, simulated_table[column]):
                differences.append(f"{name}: column {column} differs")
    return Replay(len(noted.decisions), num_values, differences[:SHOWN])


def _decision(plan: StepPlan) -> Decision:
    everyone = [seq for bucket in plan.decodes.buckets for seq in bucket.values()]
    members = sorted(everyone, key=lambda seq: seq.order)
    seqs = [*members, *(one.seq for one in plan.work)]
    return Decision(
        tuple(_name(seq) for seq in members),
        tuple((*_name(seq), start, num_new) for seq, start, num_new in plan.work),
        tuple(tuple(seq.blocks) for seq in seqs),
        tuple(_name(seq) for seq in plan.admitted),
        tuple(_name(seq) for seq in plan.preempted),
        tuple(plan.moves),
        (plan.num_padding_seqs, plan.num_padding_tokens),
        plan.limit,
        (),
    )


def _name(seq: Sequence) -> Name:
    return seq.request.index, seq.sample


def _num_values(value: object) -> int:
    return sum(map(_num_values, value)) if isinstance(value, tuple) else 1
