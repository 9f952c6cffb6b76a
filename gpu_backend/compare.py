"""Simulated beside measured: one experiment, both ways, with a step time fitted in between."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpu_backend.entry import prepare
from gpu_backend.executor import ModelExecutor
from gpu_backend.profile import Limits, Measured, fit, grid, measure, moved_block_us
from kvsim.config.build import build_engine, build_route, build_workload
from kvsim.config.loading import Source, load
from kvsim.config.models import Experiment
from kvsim.engine.plan import StepPlan, StepResult, load_of
from kvsim.latency.model import Linear
from kvsim.sim.run import Engine, simulate
from kvsim.study.metrics import Slo, summarize, window_of
from kvsim.study.tables import expand
from kvsim.workload.workload import Workload

METRICS = (
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
    "batch_size_mean",
    "preemptions",
)


class Row(NamedTuple):
    """A figure of both runs."""

    metric: str
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        """Of the simulated one, relative."""
        if self.measured == self.simulated:
            return 0.0
        return self.simulated / self.measured - 1 if self.measured else float("inf")


class Comparison(NamedTuple):
    """`steps` compares single steps: the model's time for each step of the real run."""

    step_time: dict[str, float]
    num_points: int
    rows: list[Row]
    num_steps: int
    step_error: float  # mean over steps of the relative error, unsigned
    total_error: float  # of the summed time


class Noting:
    """A real executor that notes what each step computed and took."""

    def __init__(self, executor: ModelExecutor, measured: list[tuple[Measured, list]]) -> None:
        self._executor = executor
        self._measured = measured

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        load, moves = load_of(plan), list(plan.moves)
        result = self._executor.execute(plan, max_steps)
        self._measured.append((Measured(*load, result.durations_ns[0]), moves))
        return result


def compare(source: Source, options: dict[str, str]) -> Comparison:
    """Measure a grid of steps, fit step_time to it, simulate the experiment with it, and run it on
    the model. The grid knows nothing of the experiment's requests. Raises UserError."""
    experiment = load(source)
    workload = build_workload(experiment, source.folder)
    make = prepare(experiment, workload, options)
    limits = _limits(experiment)
    points = measure(make, grid(limits), limits)
    step_time = fit(points)
    step_time |= moved_block_us(make([]), limits, experiment.kv.num_host_blocks or 0)
    latency = Linear(**step_time)
    fitted = experiment.model_copy(
        update={
            "engine": experiment.engine.model_copy(
                update={"step_time": type(experiment.engine.step_time)(**step_time)}
            )
        }
    )
    simulated = _figures(fitted, workload, build_engine(fitted, workload))
    noted: list[tuple[Measured, list]] = []
    engine = build_engine(experiment, workload, lambda tokens: Noting(make(tokens), noted))
    real = _figures(experiment, workload, engine)
    told = np.array([
        latency.step_ns(one.num_prompt_tokens, one.num_seqs, one.context, 0, 1, moves)[0]
        for one, moves in noted
    ])  # fmt: skip
    took = np.array([one.duration_ns for one, _ in noted])
    return Comparison(
        step_time,
        len(points),
        [Row(name, float(simulated[name]), float(real[name])) for name in METRICS],
        len(noted),
        float(np.abs(told / took - 1).mean()),
        float(told.sum() / took.sum() - 1),
    )


def _limits(experiment: Experiment) -> Limits:
    engine, kv = experiment.engine, experiment.kv
    assert engine.max_model_len is not None and kv.num_blocks is not None
    return Limits(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        engine.max_model_len,
        kv.num_blocks,
        kv.block_size,
    )


def _figures(experiment: Experiment, workload: Workload, engine: Engine) -> dict:
    measure_ = experiment.measure
    stop_s = measure_.stop_s
    log = simulate(
        workload,
        engine,
        num_replicas=experiment.replicas.count,
        route=build_route(experiment.replicas),
        stop_ns=None if stop_s is None else round(stop_s * 1e9),
    )
    run = expand(log, measure_.booking)
    window = window_of(run, measure_.warmup_s, measure_.cooldown_s)
    return summarize(run, window, Slo(**experiment.slo.model_dump()))
