"""Where a GPU's memory goes when a server starts, term by term, and whether it starts."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.errors import ConfigError
from kvsim.memory.activation import (
    Step,
    forward_bytes,
    logits_bytes,
    profiled_step,
    sampler_bytes,
)
from kvsim.memory.catalog import Gpu
from kvsim.memory.entry import EngineEntry
from kvsim.memory.kv import GIB, Limits, Pool, layout
from kvsim.memory.shape import ModelShape
from kvsim.memory.weights import (
    DTYPE_BYTES,
    Parallel,
    Stage,
    check_parallel,
    stage_weight_bytes,
    stages,
)

STARTS = "starts"
NO_BLOCKS = "no memory is left for KV blocks"
TOO_LONG = "max_model_len does not fit into the KV pool"
NO_WARM_UP = "the sampler's warm-up does not fit beside the KV pool"


class Term(NamedTuple):
    gib: float
    how: str


class Known(NamedTuple):
    """Terms read from a log, which go before the arithmetic. free_gib: of each rank at the start,
    where other processes hold memory."""

    weights_gib: float | None = None
    activation_gib: float | None = None
    runtime_gib: float | None = None
    free_gib: tuple[float, ...] = ()


class Budget(NamedTuple):
    """One rank's memory, of the rank that has least for KV; GiB.

    usable = weights + activation + runtime + communication + graphs (where the engine counts
    them) + occupied + kv. warm_up_logits lie within activation; outside_graphs beside `usable`.
    rank_loss: KV of the best rank less this one's.
    """

    total: Term
    usable: Term
    weights: Term
    activation: Term
    warm_up_logits: Term
    runtime: Term
    communication: Term
    graphs: Term
    outside_graphs: Term
    occupied: Term
    kv: Term
    rank_loss: Term
    pool: Pool
    step: Step
    outcome: str
    error_gib: float


def budget(
    shape: ModelShape,
    gpu: Gpu,
    parallel: Parallel,
    engine: EngineEntry,
    limits: Limits,
    known: Known = Known(),  # noqa: B008 (frozen)
) -> Budget:
    """The budget of one replica's worst rank. Raises ConfigError on a split no engine accepts, a
    share outside 0..1, a length under 1, or more ranks in known.free_gib than there are."""
    _check(limits, known, parallel)
    check_parallel(shape, parallel)
    step = profiled_step(engine, gpu, limits)
    ranks = [
        _rank(shape, gpu, parallel, engine, limits, known, step=step, stage=stage, number=n)
        for n, stage in enumerate(stages(shape, parallel.pipeline))
    ]
    worst = min(ranks, key=lambda rank: rank.pool.kv_bytes / rank.pool.layout.block_bytes)
    return worst._replace(outcome=_outcome(worst, limits, shape, engine))


def _check(limits: Limits, known: Known, parallel: Parallel) -> None:
    if not 0 < limits.gpu_memory_utilization <= 1:
        text = f"gpu_memory_utilization: {limits.gpu_memory_utilization} is not in 0..1"
        raise ConfigError([text])
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"):
        value = getattr(limits, name)
        if value is not None and value < 1:
            raise ConfigError([f"{name}: {value} is not at least 1"])
    for name, value in parallel._asdict().items():
        if value < 1:
            raise ConfigError([f"{name} parallel: {value} is not at least 1"])
    form = limits.kv_dtype.partition("_")[0]
    if form not in ("auto", *DTYPE_BYTES):
        allowed = ", ".join(("auto", *DTYPE_BYTES))
        raise ConfigError([f"kv_dtype: {limits.kv_dtype!r} is not one of {allowed}"])
    ranks = parallel.tensor * parallel.pipeline
    if known.free_gib and len(known.free_gib) != ranks:
        raise ConfigError([f"free_gib: {len(known.free_gib)} figures for {ranks} ranks"])


def _rank(
    shape: ModelShape,
    gpu: Gpu,
    parallel: Parallel,
    engine: EngineEntry,
    limits: Limits,
    known: Known,
    *,
    step: Step,
    stage: Stage,
    number: int,
) -> Budget:
    """The stage's rank with least memory. So long because it is the one list of the terms."""
    usable = gpu.memory_gib * limits.gpu_memory_utilization
    weights = _weights(shape, stage, parallel, known)
    activation = _activation(shape, stage, parallel, engine, step, known)
    runtime = Term(engine.runtime_gib, f"outside PyTorch, preset {engine.versions}")
    communication = Term(0.0, "one GPU")
    if parallel.tensor * parallel.pipeline > 1:
        communication = Term(engine.communication_gib, f"NCCL buffers, preset {engine.versions}")
    if known.runtime_gib is not None:
        runtime, communication = Term(known.runtime_gib, "given"), Term(0.0, "in the runtime")
    graphs = Term(
        0.0 if limits.enforce_eager else engine.graphs_gib, f"CUDA graphs, preset {engine.versions}"
    )
    none = Term(0.0, "eager" if limits.enforce_eager else "see graphs")
    inside, outside = (graphs, none) if engine.graphs_in_budget else (none, graphs)
    free = known.free_gib[number * parallel.tensor : (number + 1) * parallel.tensor]
    taken = [max(0.0, gpu.memory_gib - gib) for gib in free] or [0.0]
    reserve = weights.gib + activation.gib + runtime.gib + communication.gib + inside.gib
    kv = usable - reserve - max(taken)
    cut = layout(
        shape, stage.layers, engine, limits, tensor=parallel.tensor, block_size=gpu.block_size
    )
    return Budget(
        total=Term(gpu.memory_gib, gpu.source),
        usable=Term(usable, f"{gpu.memory_gib:.2f} x {limits.gpu_memory_utilization:g}"),
        weights=weights,
        activation=activation,
        warm_up_logits=Term(
            logits_bytes(shape, step) / GIB, f"{step.seqs:,} seqs x {shape.vocab:,} vocab x 4 B"
        ),
        runtime=runtime,
        communication=communication,
        graphs=inside,
        outside_graphs=outside,
        occupied=Term(max(taken), "held by others on the rank with least free memory"),
        kv=Term(kv, "what is left"),
        rank_loss=Term(max(taken) - min(taken), "the best rank's pool less the smallest's"),
        pool=Pool(cut, int(kv * GIB), step.tokens, engine.printed_tokens),
        step=step,
        outcome=STARTS,
        error_gib=max(engine.error_gib, 0.15 * (usable - weights.gib - kv)),
    )


def _weights(shape: ModelShape, stage: Stage, parallel: Parallel, known: Known) -> Term:
    if known.weights_gib is not None:
        return Term(known.weights_gib, "given")
    kept = shape.quantization
    form = f"{kept.name}, {kept.bits:.3g} bits on {kept.covers}" if kept else shape.dtype
    how = f"{len(stage.layers)} layers, {form}, tensor parallel {parallel.tensor}"
    return Term(stage_weight_bytes(shape, stage, parallel) / GIB, how)


def _activation(
    shape: ModelShape,
    stage: Stage,
    parallel: Parallel,
    engine: EngineEntry,
    step: Step,
    known: Known,
) -> Term:
    """The larger of the forward pass's peak and, in the last stage, the sampler's."""
    if known.activation_gib is not None:
        return Term(known.activation_gib, "given")
    kinds = set(stage.layers)
    forward = max(forward_bytes(shape, layer, parallel, step.tokens) for layer in kinds)
    sampler = sampler_bytes(shape, engine, step) if stage.is_last else 0.0
    part = "sampler" if sampler > forward else "forward pass"
    how = f"{part} of {step.tokens:,} tokens, {step.seqs:,} seqs ({step.rule})"
    return Term(max(forward, sampler) / GIB, how)


def _outcome(worst: Budget, limits: Limits, shape: ModelShape, engine: EngineEntry) -> str:
    if worst.pool.num_blocks == 0:
        return NO_BLOCKS
    if worst.pool.requests_at_once(limits.max_model_len) < 1:
        return TOO_LONG
    idle = worst.total.gib - worst.usable.gib + worst.activation.gib - worst.outside_graphs.gib
    if engine.warms_up_sampler and sampler_bytes(shape, engine, worst.step) / GIB > idle:
        return NO_WARM_UP
    return STARTS
