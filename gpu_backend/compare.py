"""Simulated beside measured: variants of one experiment at shares of their own capacity, each run
on the model and, with a step time fitted on a grid, in the simulator."""

from __future__ import annotations

import gc
from typing import NamedTuple

from gpu_backend.environment import environment
from gpu_backend.trials import Bench, Say, Variant, at_rate
from kvsim.config.loading import Source, load, points_of
from kvsim.config.models import Experiment
from kvsim.errors import UserError


class Comparison(NamedTuple):
    """`environment`: what it was measured on."""

    environment: dict[str, object]
    variants: list[Variant]


def compare(
    source: Source, options: dict[str, str], loads: list[float], repeats: int, say: Say
) -> Comparison:
    """Every variant of the file's `compare`: after a pass of the grid to warm up, first all its
    requests at once, which gives its capacity, then at every load, `repeats` times with seeds that
    follow the file's.

    Steps of a designed grid are run between those of serving, after every second one, so that a
    drift of the machine's speed meets both alike; the virtual clock does not see them, and the grid
    knows the engine's limits, not the requests. One step time is fitted to the grid of all runs of
    a variant, and by how much the machine was slower in each run. Raises UserError.
    """
    points = points_of(source)
    if any(at for _, at, _ in points):
        raise UserError(f"{source.name}: sweep: rates are given by --rates here: leave it out")
    for _, _, point in points:
        _check(load(point), point)
        load(at_rate(point, None, 0))
    found: dict[str, object] = {}
    variants = []
    for name, _, point in points:
        bench = Bench(name or load(point).kv.policy.kind, point, options, say)
        found = environment(bench.device)
        variants.append(bench.run(loads, repeats))
        del bench  # its model and pools go before the next ones come
        gc.collect()
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
