"""One variant of an experiment, run on the model at several rates with a grid of steps in between,
and each run again in the simulator."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from gpu_backend.decisions import Noting, Replay, compared, replayed
from gpu_backend.entry import prepare
from gpu_backend.executor import ModelExecutor
from gpu_backend.profile import (
    LONG_ANSWER,
    NUM_ANSWERS,
    REPEATS,
    SETTLING,
    Limits,
    Measured,
    fit,
    grid,
    measured_steps,
    moved_block_us,
    slowed,
)
from kvsim.config.build import build_engine, build_latency, build_route, build_workload
from kvsim.config.loading import Source, load, set_at
from kvsim.config.models import Experiment, TableStepTime
from kvsim.engine.plan import BlockMove, StepPlan, StepResult, load_of
from kvsim.errors import UserError
from kvsim.sim.feed import Outcome
from kvsim.sim.run import Engine, simulate
from kvsim.study.metrics import Slo, summarize, window_of
from kvsim.study.tables import Run, expand
from kvsim.workload.workload import Workload

GRID_EVERY = 2  # steps of serving, after which comes a step of the grid
LEAST_ON_GRID = 100  # measured in each run, so that the machine's speed in it is known
RATE = "workload.arrivals.rate_per_s"
Say = Callable[[str], None]


class Steps(NamedTuple):
    """Every step of a real run: what it computed, int64 [steps, 5] (plan.load_of); how long it took
    and what the fitted model says of it, int64 [steps] ns."""

    loads: np.ndarray
    measured_ns: np.ndarray
    predicted_ns: np.ndarray


class Trial(NamedTuple):
    """A variant, run both ways on the same requests. `load` is the share of its measured capacity
    at which they arrive, None for all at once; figures are those of a run's summary."""

    variant: str
    load: float | None
    rate_per_s: float | None
    seed: int
    simulated: dict
    measured: dict
    steps: Steps
    replay: Replay
    step_time: TableStepTime


class Variant(NamedTuple):
    """What was measured of a variant; `step_time` is fitted to the grid of all its trials, and each
    of them has it as much longer as the machine was slower then."""

    name: str
    experiment: Experiment
    capacity_per_s: float
    trials: list[Trial]
    step_time: TableStepTime
    num_grid_steps: int


class _Ran(NamedTuple):
    """A run on the model: each step's load (plan.load_of), moves and time, its decisions replayed,
    and the steps of the grid that ran in between."""

    share: float | None
    rate_per_s: float | None
    experiment: Experiment
    workload: Workload
    run: Run
    loads: list[tuple[int, ...]]
    moves: list[list[BlockMove]]
    durations_ns: list[int]
    replay: Replay
    on_grid: list[Measured]


class Bench:
    """One variant on the model, and the grid beside it."""

    def __init__(self, name: str, source: Source, options: dict[str, str], say: Say) -> None:
        self._name, self._source, self._say = name, source, say
        self._experiment = experiment = load(source)
        workload = build_workload(experiment, source.folder)
        twice = experiment.replicas.model_copy(update={"count": 2})  # room for the grid's own pool
        self._make = prepare(experiment.model_copy(update={"replicas": twice}), workload, options)
        self._limits = limits = _limits(experiment)
        executor = self._make([LONG_ANSWER] * NUM_ANSWERS)
        self.device: torch.device = executor.decoder.device
        self._moved = moved_block_us(executor, limits, experiment.kv.num_host_blocks or 0)
        self._grid = measured_steps(executor, limits, experiment.seed)
        self._pass = len(grid(limits, np.random.default_rng(0)))  # points, about as many in each
        self._on_grid: list[Measured] = []

    def run(self, loads: list[float], repeats: int) -> Variant:
        gc.disable()  # as a simulation does
        for _ in range(self._pass * (SETTLING + REPEATS)):  # until the machine is warm
            next(self._grid)
        gc.enable()
        seed = self._experiment.seed
        ran = [self._ran(None, None, seed)]
        capacity = _capacity(ran[0].run)
        for share in loads:
            ran += [self._ran(share, share * capacity, seed + n) for n in range(repeats)]
        while sum(len(one.on_grid) for one in ran) < REPEATS * self._pass:
            self._grid_step()  # what is fitted has seen the whole grid, as part of the last run
        step_time, slowness = fit([one.on_grid for one in ran], self._limits)
        step_time = step_time.model_copy(update=self._moved)
        trials = [
            self._trial(one, slowed(step_time, times))
            for one, times in zip(ran, slowness, strict=True)
        ]
        num_steps = sum(len(one.on_grid) for one in ran)
        self._say(
            f"{self._name}: step time fitted to {num_steps:,} steps of the grid; speed of the "
            f"machine {1 / max(slowness):.2f} to {1 / min(slowness):.2f} of the mean"
        )
        return Variant(self._name, self._experiment, capacity, trials, step_time, num_steps)

    def _ran(self, share: float | None, rate_per_s: float | None, seed: int) -> _Ran:
        """A run on the model, with steps of the grid in between, and its replay."""
        gc.collect()  # the pool of the run before hangs in a cycle
        experiment = load(at_rate(self._source, rate_per_s, seed))
        workload = build_workload(experiment, self._source.folder)
        self._on_grid, measuring = [], []

        def make(output_tokens: list[int]) -> _Measuring:
            measuring.append(_Measuring(self._make(output_tokens), self._grid_step))
            return measuring[0]

        engine = build_engine(experiment, workload, make)
        run = _run(experiment, workload, engine)
        if not (run.requests["outcome"] <= Outcome.LENGTH).any():
            raise UserError(
                f"{self._name}, seed {seed}: none of its {len(workload):,} requests is finished: "
                "there is nothing to compare (too long for kv.num_blocks or engine.max_model_len, "
                "or measure.stop_s too early?)"
            )
        noted: _Measuring = measuring[0]
        while len(self._on_grid) < LEAST_ON_GRID:
            self._grid_step()
        replay = compared(
            (noted, run),
            replayed(engine, noted.durations_ns, lambda e: _run(experiment, workload, e)),
        )
        at = "all at once" if share is None else f"{share:g} of capacity"
        self._say(
            f"{self._name}, {at}, seed {seed}: {replay.num_steps:,} steps in "
            f"{sum(noted.durations_ns) / 1e9:.1f} s; {run.steps['num_preempted'].sum()} "
            f"preemptions; replay: {len(replay.differences)} differences"
        )
        times = noted.loads, noted.moves, noted.durations_ns
        return _Ran(share, rate_per_s, experiment, workload, run, *times, replay, self._on_grid)

    def _trial(self, ran: _Ran, step_time: TableStepTime) -> Trial:
        """The same in the simulator, with this step time."""
        latency, experiment = build_latency(step_time), ran.experiment
        predicted = [
            latency.step_ns(*load, 0, 1, moves)[0]
            for load, moves in zip(ran.loads, ran.moves, strict=True)
        ]
        engine = experiment.engine.model_copy(update={"step_time": step_time})
        fitted = experiment.model_copy(update={"engine": engine})
        simulated = _run(fitted, ran.workload, build_engine(fitted, ran.workload))
        return Trial(
            self._name,
            ran.share,
            ran.rate_per_s,
            experiment.seed,
            _figures(experiment, simulated),
            _figures(experiment, ran.run),
            Steps(np.array(ran.loads), np.array(ran.durations_ns), np.array(predicted)),
            ran.replay,
            step_time,
        )

    def _grid_step(self) -> None:
        if (one := next(self._grid)) is not None:
            self._on_grid.append(one)


def at_rate(source: Source, rate_per_s: float | None, seed: int) -> Source:
    """The same with its requests at this rate, or all at once, and drawn with this seed."""
    plain = copy.deepcopy(source.plain)
    if rate_per_s is None:
        set_at(plain, "workload.arrivals", {"kind": "all_at_once"})
    else:
        set_at(plain, RATE, rate_per_s)
    set_at(plain, "seed", seed)
    return Source(plain, source.name, source.folder, source.lines)


class _Measuring(Noting):
    """The real executor, its steps and their loads noted, and steps of the grid in between."""

    def __init__(self, executor: ModelExecutor, grid_step: Callable[[], None]) -> None:
        super().__init__(executor)
        self.loads: list[tuple[int, ...]] = []
        self.moves: list[list[BlockMove]] = []
        self._grid_step = grid_step

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        self.loads.append(load_of(plan))
        self.moves.append(list(plan.moves))
        result = super().execute(plan, max_steps)
        if len(self.loads) % GRID_EVERY == 0:
            self._grid_step()
        return result


def _limits(experiment: Experiment) -> Limits:
    engine, kv = experiment.engine, experiment.kv
    assert engine.max_model_len is not None and kv.num_blocks is not None
    return Limits(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        engine.max_model_len,
        kv.num_blocks,
        kv.block_size,
        shares=kv.policy.kind == "paged_sharing",
        is_contiguous=kv.policy.kind == "contiguous",
    )


def _run(experiment: Experiment, workload: Workload, engine: Engine) -> Run:
    stop_s = experiment.measure.stop_s
    log = simulate(
        workload,
        engine,
        route=build_route(experiment.replicas),
        stop_ns=None if stop_s is None else round(stop_s * 1e9),
    )
    return expand(log, experiment.measure.booking)


def _figures(experiment: Experiment, run: Run) -> dict:
    measure = experiment.measure
    window = window_of(run, measure.warmup_s, measure.cooldown_s)
    return summarize(run, window, Slo(**experiment.slo.model_dump()))


def _capacity(run: Run) -> float:
    """Requests per second while some wait: tokens made then, over the mean answer."""
    steps, is_full = run.steps, run.steps["num_waiting"] > 0
    if not is_full.any():
        is_full[:] = True
    seconds = (steps["end_ns"] - steps["start_ns"])[is_full].sum() / 1e9
    answers = run.requests["answer_tokens"] * run.requests["num_samples"]
    return float(steps["num_tokens"][is_full].sum() / seconds / answers.mean())
