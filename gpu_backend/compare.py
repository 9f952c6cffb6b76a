"""Simulated beside measured: variants of one experiment at shares of their own capacity, each run
on the model and, with a step time fitted on a grid, in the simulator."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from gpu_backend.decisions import Noting, Replay, compared, replayed
from gpu_backend.entry import prepare
from gpu_backend.environment import environment
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
)
from kvsim.config.build import build_engine, build_latency, build_route, build_workload
from kvsim.config.loading import Source, load, points_of, set_at
from kvsim.config.models import Experiment, TableStepTime
from kvsim.engine.plan import BlockMove, StepPlan, StepResult, load_of
from kvsim.errors import UserError
from kvsim.sim.run import Engine, simulate
from kvsim.study.metrics import Slo, summarize, window_of
from kvsim.study.tables import Run, expand
from kvsim.workload.workload import Workload

GRID_EVERY = 2  # steps of serving, after which comes a step of the grid
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
    """What was measured of a variant; `step_time` is fitted to the grid over all of its trials."""

    name: str
    experiment: Experiment
    capacity_per_s: float
    trials: list[Trial]
    step_time: TableStepTime
    num_grid_steps: int


class Comparison(NamedTuple):
    """`environment`: what it was measured on."""

    environment: dict[str, object]
    variants: list[Variant]


def compare(
    source: Source, options: dict[str, str], loads: list[float], repeats: int, say: Say
) -> Comparison:
    """Every variant of the file's `compare`: first all its requests at once, which gives its
    capacity, then at every load, `repeats` times with seeds that follow the file's.

    Steps of a designed grid are run between those of serving, after every second one, so that a
    drift of the machine's speed meets both alike; the virtual clock does not see them, and the grid
    knows the engine's limits, not the requests. Raises UserError.
    """
    points = points_of(source)
    if any(at for _, at, _ in points):
        raise UserError(f"{source.name}: sweep: rates are given by --rates here: leave it out")
    for _, _, point in points:
        _check(load(point), point)
    found: dict[str, object] = {}
    variants = []
    for name, _, point in points:
        bench = _Bench(name or load(point).kv.policy.kind, point, options, say)
        found = environment(bench.device)
        variants.append(bench.run(loads, repeats))
    return Comparison(found, variants)


def _check(experiment: Experiment, source: Source) -> None:
    if getattr(experiment.workload.arrivals, "kind", None) not in ("poisson", "gamma"):
        raise UserError(
            f"{source.name}: workload.arrivals: must be poisson or gamma, whose rate_per_s is set "
            "to shares of the capacity"
        )
    if experiment.workload.beam is not None:
        raise UserError(
            f"{source.name}: workload.beam: which beams survive is drawn in a simulation and "
            "scored by a model: they cannot be compared"
        )
    if experiment.replicas.count > 1:
        raise UserError(f"{source.name}: replicas.count: must be 1 to be compared")


class _Bench:
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
        self._pass = len(grid(limits)) * (SETTLING + REPEATS)
        self._on_grid: list[Measured] = []

    def run(self, loads: list[float], repeats: int) -> Variant:
        gc.disable()  # as a simulation does
        for _ in range(self._pass):  # until the machine is warm
            next(self._grid)
        gc.enable()
        seed = self._experiment.seed
        trials = [self._trial(None, None, seed)]
        capacity = trials[0].measured["capacity"]
        for share in loads:
            trials += [self._trial(share, share * capacity, seed + n) for n in range(repeats)]
        step_time = self._fitted(self._on_grid)
        num_steps = len(self._on_grid)
        return Variant(self._name, self._experiment, capacity, trials, step_time, num_steps)

    def _trial(self, share: float | None, rate_per_s: float | None, seed: int) -> Trial:
        experiment, workload = self._at(rate_per_s, seed)
        first, measuring = len(self._on_grid), []

        def make(output_tokens: list[int]) -> _Measuring:
            measuring.append(_Measuring(self._make(output_tokens), self._grid_step))
            return measuring[0]

        engine = build_engine(experiment, workload, make)
        run = _run(experiment, workload, engine)
        noted: _Measuring = measuring[0]
        while noted.num_grid_steps < self._pass:
            noted.step_of_grid()
        step_time = self._fitted(self._on_grid[first:])
        latency = build_latency(step_time)
        predicted = [
            latency.step_ns(*one, 0, 1, moves)[0]
            for one, moves in zip(noted.loads, noted.moves, strict=True)
        ]
        replay = compared(
            (noted, run),
            replayed(engine, noted.durations_ns, lambda e: _run(experiment, workload, e)),
        )
        fitted = experiment.engine.model_copy(update={"step_time": step_time})
        fitted_experiment = experiment.model_copy(update={"engine": fitted})
        simulated = _run(fitted_experiment, workload, build_engine(fitted_experiment, workload))
        steps = Steps(np.array(noted.loads), np.array(noted.durations_ns), np.array(predicted))
        trial = Trial(
            self._name,
            share,
            rate_per_s,
            seed,
            _figures(experiment, simulated),
            _figures(experiment, run),
            steps,
            replay,
            step_time,
        )
        self._say(_line(trial))
        return trial

    def _grid_step(self) -> None:
        if (one := next(self._grid)) is not None:
            self._on_grid.append(one)

    def _fitted(self, measured: list[Measured]) -> TableStepTime:
        return fit(measured, self._limits).model_copy(update=self._moved)

    def _at(self, rate_per_s: float | None, seed: int) -> tuple[Experiment, Workload]:
        """The variant's experiment and its requests at this rate, or all at once."""
        plain = copy.deepcopy(self._source.plain)
        if rate_per_s is None:
            set_at(plain, "workload.arrivals", {"kind": "all_at_once"})
        else:
            set_at(plain, RATE, rate_per_s)
        set_at(plain, "seed", seed)
        source = Source(plain, self._source.name, self._source.folder, self._source.lines)
        experiment = load(source)
        return experiment, build_workload(experiment, source.folder)


class _Measuring(Noting):
    """The real executor, its steps and their loads noted, and steps of the grid in between."""

    def __init__(self, executor: ModelExecutor, grid_step: Callable[[], None]) -> None:
        super().__init__(executor)
        self.loads: list[tuple[int, ...]] = []
        self.moves: list[list[BlockMove]] = []
        self.num_grid_steps = 0
        self._grid_step = grid_step

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        self.loads.append(load_of(plan))
        self.moves.append(list(plan.moves))
        result = super().execute(plan, max_steps)
        if len(self.loads) % GRID_EVERY == 0:
            self.step_of_grid()
        return result

    def step_of_grid(self) -> None:
        self.num_grid_steps += 1
        self._grid_step()


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
    figures = summarize(run, window, Slo(**experiment.slo.model_dump()))
    return figures | {"capacity": _capacity(run)}


def _capacity(run: Run) -> float:
    """Requests per second while some wait: tokens made then, over the mean answer."""
    steps, is_full = run.steps, run.steps["num_waiting"] > 0
    if not is_full.any():
        is_full[:] = True
    seconds = (steps["end_ns"] - steps["start_ns"])[is_full].sum() / 1e9
    answers = run.requests["answer_tokens"] * run.requests["num_samples"]
    return float(steps["num_tokens"][is_full].sum() / seconds / answers.mean())


def _line(trial: Trial) -> str:
    measured, steps = trial.measured, trial.steps
    off = steps.predicted_ns.sum() / steps.measured_ns.sum() - 1
    at = "all at once" if trial.load is None else f"{trial.load:g} of capacity"
    return (
        f"{trial.variant}, {at}, seed {trial.seed}: {trial.replay.num_steps:,} steps in "
        f"{steps.measured_ns.sum() / 1e9:.1f} s, their fitted times {100 * off:+.1f} % off in sum; "
        f"{measured['preemptions']} preemptions; replay: {len(trial.replay.differences)} "
        "differences"
    )
