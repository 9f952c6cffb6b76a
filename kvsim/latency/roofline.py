"""Step time as a roofline of every operator, with fixed costs of a layer and of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvsim.engine.plan import BlockMove
from kvsim.latency.demand import Load, Operators
from kvsim.latency.model import PS_PER_MS, PS_PER_NS, PS_PER_US, block_ps

PS_PER_S = 1_000_000_000_000


class Device(NamedTuple):
    """Data sheet: dense 16-bit FLOP/s, memory bytes/s, bytes/s to the other GPUs one way, and how
    many times as fast 8-bit GEMMs are (1: it has none)."""

    flops: float
    bandwidth: float
    link: float
    fp8_speedup: float = 2.0


@dataclass(frozen=True)
class Kernels:
    """A GPU's constants: shares of the data sheet that its kernels reach, and their fixed costs.

    gemm_compute, gemm_memory (fp8_...: with 8-bit weights), attention_memory (fp8_...: of an 8-bit
    KV cache), attention_compute, link_share; layer_us, prefill_layer_us (with any prompt),
    fp8_layer_us, seq_layer_ns (for each decode), reduce_us (an all-reduce). Where one launch has
    the attention of prompts and decodes (FlashAttention 2), decodes lose their own kernel's splits
    and sharing of heads: mixed_context is how many times as long theirs takes, and mixed_query_ns
    the cost, for each decode, of each row of a chunk: thread blocks that stay empty.
    """

    gemm_compute: float
    gemm_memory: float
    attention_memory: float
    attention_compute: float
    layer_us: float
    prefill_layer_us: float
    seq_layer_ns: float
    reduce_us: float = 5.0
    link_share: float = 0.6
    mixed_context: float = 1.0
    mixed_query_ns: float = 0.0
    fp8_compute: float = 0.5
    fp8_memory: float = 0.8
    fp8_layer_us: float = 0.0
    fp8_attention_memory: float = 0.75


@dataclass(frozen=True)
class EngineCosts:
    """An engine's constants: `slowdown` of the kernels as it calls them (clocks, cold caches),
    step_ms, seq_us (each sequence), prompt_layer_us (a layer with any prompt, beside the kernels'),
    and cpu_layer_us, the launches of a layer where no CUDA graph hides them."""

    slowdown: float = 1.0
    step_ms: float = 0.0
    seq_us: float = 0.0
    prompt_layer_us: float = 0.0
    cpu_layer_us: float = 0.0


class Machine(NamedTuple):
    """All that a step's time depends on but its load."""

    ops: Operators
    device: Device
    kernels: Kernels
    engine: EngineCosts


def step_s(machine: Machine, load: Load) -> float:
    """Seconds of a step (of many, where the load has arrays)."""
    gpu = fixed_s(machine, load)
    for layers, second in zip(machine.ops.attention, context_s(machine), strict=True):
        context = load.context
        if layers.window is not None:
            context = np.minimum(context, layers.window * load.decodes)
        factor = 1 + (machine.kernels.mixed_context - 1) * (load.chunks > 0)
        gpu = gpu + second * factor * context
    engine, seqs = machine.engine, load.decodes + load.chunks
    launched = np.maximum(gpu, machine.ops.layers * engine.cpu_layer_us * 1e-6)
    return launched * engine.slowdown + engine.step_ms * 1e-3 + engine.seq_us * 1e-6 * seqs


def fixed_s(machine: Machine, load: Load) -> float:
    """Seconds of the GPU for all that does not grow with the context of decodes."""
    ops, device, kernels, engine = machine
    prompt_us = (kernels.prefill_layer_us + engine.prompt_layer_us) * (load.chunks > 0)
    layer_us = kernels.layer_us + prompt_us + kernels.seq_layer_ns * 1e-3 * load.decodes
    if any(gemm.is_8_bit for gemm in ops.gemms):
        layer_us = layer_us + kernels.fp8_layer_us
    chunk = (load.tokens - load.decodes) / np.maximum(load.chunks, 1)
    layer_us = layer_us + kernels.mixed_query_ns * 1e-3 * load.decodes * chunk
    total = (ops.layers * layer_us + ops.reduces * kernels.reduce_us) * 1e-6
    total = total + _gemm_s(machine, load)
    total = total + ops.reduce_bytes * load.tokens / (kernels.link_share * device.link)
    prompt_flops = kernels.attention_compute * device.flops
    state_bytes = kernels.attention_memory * device.bandwidth
    for layers in ops.attention:
        pairs, seqs = load.pairs, load.decodes + load.chunks
        if layers.window is not None:
            pairs = np.minimum(pairs, layers.window * (load.tokens - load.decodes))
        total = total + layers.count * layers.pair_flops * pairs / prompt_flops
        total = total + layers.count * layers.seq_bytes * seqs / state_bytes
    return total


def context_s(machine: Machine) -> list[float]:
    """Seconds for each token of context of the decodes, for each kind of layer: reading its KV, or
    (latent attention of many heads) computing with it."""
    ops, device, kernels, _ = machine
    share = kernels.fp8_attention_memory if ops.has_8_bit_kv else kernels.attention_memory
    reads, computes = share * device.bandwidth, kernels.attention_compute * device.flops
    return [
        layers.count * max(layers.kv_bytes / reads, layers.context_flops / computes)
        for layers in ops.attention
    ]


def _gemm_s(machine: Machine, load: Load) -> float:
    """Seconds of all GEMMs: of compute and memory time the 3-norm, which rounds the corner of the
    roofline off, since kernels reach neither where both are near."""
    ops, device, kernels, _ = machine
    total = 0.0
    for gemm in ops.gemms:
        flops, moved = gemm.flops_and_bytes(load)
        compute, memory = kernels.gemm_compute, kernels.gemm_memory
        if gemm.is_8_bit:
            memory = kernels.fp8_memory
            if device.fp8_speedup > 1:
                compute = kernels.fp8_compute * device.fp8_speedup
        busy, reading = flops / (compute * device.flops), moved / (memory * device.bandwidth)
        total = total + (busy**3 + reading**3) ** (1 / 3)
    return total


class Roofline:
    """step_s as a step-time model: whole picoseconds, so that a jump takes what its steps take."""

    def __init__(
        self,
        machine: Machine,
        *,
        swap_in_block_us: float = 0.0,
        swap_out_block_us: float = 0.0,
        copy_block_us: float = 0.0,
    ) -> None:
        engine = machine.engine
        self._slowdown = engine.slowdown
        self._step_ps = round(engine.step_ms * PS_PER_MS) + PS_PER_NS // 2
        self._seq_ps = round(engine.seq_us * PS_PER_US)
        launches_s = machine.ops.layers * engine.cpu_layer_us * 1e-6
        self._least_ps = round(launches_s * engine.slowdown * PS_PER_S)
        self._slopes = _slopes(machine, 1.0)
        self._mixed_slopes = _slopes(machine, machine.kernels.mixed_context)
        self._block_ps = block_ps(swap_in_block_us, swap_out_block_us, copy_block_us)
        # a batch keeps its size from step to step, and sizes come back
        self._fixed_ps = lru_cache(maxsize=65_536)(
            lambda load: round(fixed_s(machine, load) * engine.slowdown * PS_PER_S)
        )

    def step_ns(
        self,
        num_prompt_tokens: int,
        num_seqs: int,
        context: int,
        num_chunks: int,
        num_pairs: int,
        num_decodes: int,
        num_steps: int,
        moves: list[BlockMove] | tuple[()] = (),
    ) -> list[int]:
        after = self._step_ps + sum(self._block_ps[move.kind] for move in moves)
        if not num_seqs:
            return [after // PS_PER_NS or 1] * num_steps
        after += self._seq_ps * num_seqs
        decodes = num_seqs - num_chunks
        load = Load(decodes + num_prompt_tokens, decodes, 0, num_chunks, num_pairs)
        gpu = self._fixed_ps(load)
        (slope, window), *others = self._mixed_slopes if num_chunks else self._slopes
        if not others and window is None:
            first, rise, least = gpu + slope * context, slope * num_decodes, self._least_ps
            if first >= least:
                first += after
                if not rise:
                    return [first // PS_PER_NS] * num_steps
                return [ps // PS_PER_NS for ps in range(first, first + rise * num_steps, rise)]
        return [
            (max(gpu + self._attended_ps(context + n * num_decodes, load), self._least_ps) + after)
            // PS_PER_NS
            for n in range(num_steps)
        ]

    def _attended_ps(self, context: int, load: Load) -> int:
        return sum(
            slope * (context if window is None else min(context, window * load.decodes))
            for slope, window in (self._mixed_slopes if load.chunks else self._slopes)
        )


def _slopes(machine: Machine, factor: float) -> list[tuple[int, int | None]]:
    """Picoseconds for each token of context, and the window, of each kind of layer."""
    scale = factor * machine.engine.slowdown * PS_PER_S
    return [
        (round(second * scale), layers.window)
        for layers, second in zip(machine.ops.attention, context_s(machine), strict=True)
    ]
