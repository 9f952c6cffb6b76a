"""What would make a server start, or hold more: each change alone, with the figure it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvsim.memory.budget import STARTS, Known, budget
from kvsim.memory.catalog import Gpu, find_quantization
from kvsim.memory.entry import EngineEntry
from kvsim.memory.kv import Limits
from kvsim.memory.shape import ModelShape
from kvsim.memory.weights import Parallel, parallel_faults

HIGHEST_SHARE = 0.95  # more leaves too little for CUDA graphs and what the driver takes
SMALL_STEP, FEW_SEQS = 1024, 64
WEIGHT_FORMATS = ("fp8", "awq-4bit")


class Remedy(NamedTuple):
    """A change (of the serve line's key to value), what it costs, and the KV memory and full-length
    requests that it gives."""

    key: str
    value: int | float | str
    price: str
    kv_gib: float
    requests_at_once: float
    starts: bool

    @property
    def change(self) -> str:
        if self.key == "quantization":
            return f"{self.value} weights"
        return (
            f"{self.key} {self.value:,}"
            if isinstance(self.value, int)
            else f"{self.key} {self.value}"
        )


def remedies(
    shape: ModelShape,
    gpu: Gpu,
    parallel: Parallel,
    engine: EngineEntry,
    limits: Limits,
    known: Known = Known(),  # noqa: B008 (frozen)
) -> list[Remedy]:
    """Changes that help, those that suffice first, the cheapest of them first: what costs nothing,
    then shorter requests and smaller steps, then precision, then GPUs."""

    def tried(key: str, value: int | float | str, price: str, **new) -> Remedy:
        out = budget(**({"shape": shape, "gpu": gpu, "parallel": parallel, "engine": engine,
                         "limits": limits, "known": known} | new))  # fmt: skip
        at_once = out.pool.requests_at_once(new.get("limits", limits).max_model_len)
        return Remedy(key, value, price, out.kv.gib, at_once, out.outcome == STARTS)

    now = budget(shape, gpu, parallel, engine, limits, known)
    found = []
    if limits.gpu_memory_utilization < HIGHEST_SHARE:
        more = limits._replace(gpu_memory_utilization=HIGHEST_SHARE)
        found.append(tried("gpu_memory_utilization", HIGHEST_SHARE, "nothing", limits=more))
    shorter = now.pool.estimated_max_len(limits.max_model_len)
    if 0 < shorter < limits.max_model_len:
        fewer = limits._replace(max_model_len=shorter)
        price = "longer requests are refused"
        found.append(tried("max_model_len", shorter, price, limits=fewer))
    again = known._replace(activation_gib=None)  # a smaller step has another peak
    if now.step.seqs > FEW_SEQS:
        fewer = limits._replace(max_num_seqs=FEW_SEQS)
        price = "fewer requests run at once"
        found.append(tried("max_num_seqs", FEW_SEQS, price, limits=fewer, known=again))
    if now.step.tokens > SMALL_STEP:
        small = limits._replace(max_num_batched_tokens=SMALL_STEP)
        price = "prompts take more steps"
        found.append(tried("max_num_batched_tokens", SMALL_STEP, price, limits=small, known=again))
    if limits.kv_dtype == "auto" and shape.dtype != "fp8":
        half = limits._replace(kv_dtype="fp8")
        found.append(tried("kv_cache_dtype", "fp8", "some precision", limits=half))
    if shape.quantization is None:
        found += [
            tried("quantization", name.removesuffix("-4bit"), "some precision",
                  shape=replace(shape, quantization=find_quantization(name)),
                  known=known._replace(weights_gib=None))
            for name in WEIGHT_FORMATS
        ]  # fmt: skip
    wider = parallel._replace(tensor=2 * parallel.tensor)
    if not parallel_faults(shape, wider) and not known.free_gib:
        price = f"{wider.tensor * wider.pipeline * wider.data} GPUs"
        new = {"parallel": wider, "known": Known()}
        found.append(tried("tensor_parallel_size", wider.tensor, price, **new))
    helps = [one for one in found if one.starts or one.kv_gib > now.kv.gib + 0.005]
    return sorted(helps, key=lambda one: not one.starts)
