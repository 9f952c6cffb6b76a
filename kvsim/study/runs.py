"""Running experiments: one point in this process, many over local processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim import __version__
from kvsim.config.build import build_engine, build_route, build_workload
from kvsim.config.loading import Source, load, resolved_text
from kvsim.config.models import KV, Experiment
from kvsim.errors import TraceError, UserError
from kvsim.sim.run import simulate
from kvsim.study.metrics import Slo, summarize, window_of
from kvsim.study.results import RUNS, Point, write_run
from kvsim.study.tables import expand

if TYPE_CHECKING:
    from kvsim.study.backends import Backend

Progress = Callable[[int, int], None]

STANDARD_VARIANTS: dict[str, dict] = {
    "contiguous max": {"kv.policy": {"kind": "contiguous", "reserve": "max"}},
    "contiguous pow2": {"kv.policy": {"kind": "contiguous", "reserve": "pow2"}},
    "contiguous oracle": {"kv.policy": {"kind": "contiguous", "reserve": "oracle"}},
    "paged": {"kv.policy": {"kind": "paged"}},
    "paged + sharing": {"kv.policy": {"kind": "paged_sharing"}},
}
"""What `kvsim compare` sets side by side where the file has no `compare`: the paper's baselines
over a buddy allocator, PagedAttention without and with sharing."""


def run_point(
    source: Source,
    out: Path,
    on_progress: Progress | None = None,
    backend: Backend | None = None,
) -> dict:
    """Simulate one experiment, or let a backend run its steps, and write its folder; returns its
    summary. Raises UserError."""
    experiment = load(source)
    stop_s = experiment.measure.stop_s
    try:
        workload = build_workload(experiment, source.folder)
        if not len(workload):
            raise UserError("workload: no requests")
        make_executor = None if backend is None else backend.prepare(experiment, workload)
        log = simulate(
            workload,
            build_engine(experiment, workload, make_executor),
            num_replicas=experiment.replicas.count,
            route=build_route(experiment.replicas),
            stop_ns=None if stop_s is None else round(stop_s * 1e9),
            on_progress=on_progress,
        )
    except TraceError:  # names the trace
        raise
    except UserError as error:
        raise UserError(f"{source.name}: {error}") from None
    measure = experiment.measure
    run = expand(log, measure.booking)
    window = window_of(run, measure.warmup_s, measure.cooldown_s)
    figures = summarize(run, window, Slo(**experiment.slo.model_dump()))
    figures["swapped_bytes"] = _swapped_bytes(experiment.kv, figures)
    summary = _header(experiment, len(workload), workload.notes) | figures
    if backend is not None:
        summary["backend"] = backend.name
        summary["notes"] = [*workload.notes, backend.note]
    write_run(out, resolved_text(experiment, source.folder, out), run, summary)
    return summary


def run_points(
    points: list[tuple[str, dict, Source]], out: Path, jobs: int, on_progress: Progress | None
) -> list[Point]:
    """Simulate every point into a folder of its own under `out`/runs, `jobs` at a time."""
    import joblib

    folders = [out / RUNS / name for name in _folder_names(points)]
    tasks = (
        joblib.delayed(_numbered)(number, source, folder)
        for number, ((_, _, source), folder) in enumerate(zip(points, folders, strict=True))
    )
    summaries: dict[int, dict] = {}
    done: Iterator = joblib.Parallel(
        n_jobs=min(jobs, len(points)), return_as="generator_unordered", batch_size=1
    )(tasks)
    for number, outcome in done:
        if isinstance(outcome, UserError):
            raise outcome
        summaries[number] = outcome
        if on_progress is not None:
            on_progress(len(summaries), len(points))
    return [
        Point(variant, at, folder, summaries[number])
        for number, ((variant, at, _), folder) in enumerate(zip(points, folders, strict=True))
    ]


def _numbered(number: int, source: Source, out: Path) -> tuple[int, dict | UserError]:
    try:
        return number, run_point(source, out)
    except UserError as error:  # an exception with arguments of its own would not travel
        return number, UserError(str(error))


def _folder_names(points: list[tuple[str, dict, Source]]) -> list[str]:
    """A readable, distinct folder name for each point."""
    names: list[str] = []
    for number, (variant, at, _) in enumerate(points):
        parts = [variant, *(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in at.items())]
        words = re.sub(r"[^A-Za-z0-9_.=-]+", "-", "_".join(filter(None, parts))).strip("-.")
        names.append(f"{number:03d}_{words[:80]}" if words else f"{number:03d}")
    return names


def _header(experiment: Experiment, num_requests: int, notes: list[str]) -> dict:
    """What the figures belong to. The keys of `vllm bench serve` that say nothing of a simulation,
    or would differ from run to run (`date`), are there and null."""
    arrivals = getattr(experiment.workload, "arrivals", None)
    kind = getattr(arrivals, "kind", None)
    cv = {"poisson": 1.0, "gamma": getattr(arrivals, "cv", None)}.get(kind)
    return {
        "date": None,
        "endpoint_type": None,
        "backend": "kvsim",
        "label": None,
        "tokenizer_id": None,
        "request_rate": "inf" if kind == "all_at_once" else getattr(arrivals, "rate_per_s", None),
        "burstiness": None if cv is None else 1 / cv**2,
        "max_concurrency": getattr(arrivals, "num_users", None),
        "kvsim": __version__,
        "model_id": experiment.engine.preset or "custom",
        "policy": experiment.kv.policy.kind,
        "block_size": experiment.kv.block_size,
        "num_blocks": experiment.kv.num_blocks,
        "num_replicas": experiment.replicas.count,
        "seed": experiment.seed,
        "num_prompts": num_requests,
        "max_model_len": experiment.engine.max_model_len,
        "booking": experiment.measure.booking,
        "rules": experiment.engine.rules,
        "shortest_hit_tokens": _shortest_hit(experiment.kv),
        "notes": notes,
    }


def _shortest_hit(kv: KV) -> int | None:
    policy = kv.policy
    if policy.kind != "paged_sharing" or not (policy.prefix_caching or policy.registered_prefixes):
        return None
    return {"hash_chain": kv.block_size, "radix": 1}[policy.prefix_index]


def _swapped_bytes(kv: KV, figures: dict) -> int | None:
    blocks = figures["swapped_out_blocks"] + figures["swapped_in_blocks"]
    if kv.bytes_per_token is None:
        return None if blocks else 0
    return blocks * kv.block_size * kv.bytes_per_token
