"""Simulated beside measured: variants of one experiment at shares of their own capacity, each run
on the model and, with a step time fitted on a grid, in the simulator."""

from __future__ import annotations

import gc
from typing import NamedTuple

from gpu_backend.environment import environment
from gpu_backend.trials import Bench, Say, Variant, at_rate
from kvsim.config.loading import Source, load, points_of
from kvsim.config.models import Experiment
from kvsim.errors import ConfigError, TraceError, UserError


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
        text = "rates are given by --rates here: leave it out"
        raise UserError(source.fault(("sweep",), text))
    for _, _, point in points:
        _check(experiment := load(point), point)
        load(at_rate(point, None, experiment.seed + repeats - 1))
    found: dict[str, object] = {}
    variants = []
    for name, _, point in points:
        try:
            bench = Bench(name or load(point).kv.policy.kind, point, options, say)
            found = environment(bench.device)
            variants.append(bench.run(loads, repeats))
        except (ConfigError, TraceError):  # name their file
            raise
        except UserError as error:
            raise UserError(f"{source.name}: {error}") from None
        del bench  # its model and pools go before the next ones come
        gc.collect()
    return Comparison(found, variants)


def _check(experiment: Experiment, source: Source) -> None:
    faults = []
    kind = getattr(experiment.workload.arrivals, "kind", None)
    if kind not in ("poisson", "gamma"):
        text = (
            f"{kind or 'those of the trace'}: must be poisson or gamma, whose rate_per_s is set to "
            "shares of the capacity"
        )
        faults.append(source.fault(("workload", "arrivals"), text))
    if experiment.workload.beam is not None:
        text = (
            "which beams survive is drawn in a simulation and scored by a model: they cannot be "
            "compared"
        )
        faults.append(source.fault(("workload", "beam"), text))
    if (count := experiment.replicas.count) > 1:
        faults.append(source.fault(("replicas", "count"), f"{count}: must be 1 to be compared"))
    if faults:
        raise ConfigError(faults)
