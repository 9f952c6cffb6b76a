"""The step time of a plan's model on its GPU, where the roofline knows both."""

from __future__ import annotations

from kvsim.errors import ConfigError
from kvsim.latency.catalog import engine_names, find_device, find_engine_costs, find_kernels
from kvsim.latency.demand import Load, operators
from kvsim.latency.roofline import EngineCosts, Machine, step_s
from kvsim.memory.kv import kv_dtype_bytes
from kvsim.plan.resolve import Setup
from kvsim.plan.steady import StepLoad, StepTime


def step_time_of(setup: Setup) -> tuple[StepTime | None, str]:
    """Seconds of a step of one replica, and what it stands on; or None, and why not. An engine's
    own cost of a step is counted where one was fitted on this GPU to weights of this kind."""
    if setup.parallel.pipeline > 1:
        return None, "pipeline stages' step times are not modelled"
    try:
        device, kernels = find_device(setup.gpu.name), find_kernels(setup.gpu.name)
    except ConfigError:
        return None, f"no step times of {setup.gpu.name} are known"
    kv_bytes = kv_dtype_bytes(setup.shape, setup.limits.kv_dtype)
    ops = operators(setup.shape, setup.parallel.tensor, kv_bytes=kv_bytes)
    costs_name = _engine_costs_name(setup)
    costs = find_engine_costs(costs_name) if costs_name else EngineCosts()
    machine = Machine(ops, device, kernels, costs)

    def seconds(load: StepLoad) -> float:
        tokens = load.decodes + load.prompt_tokens
        return float(step_s(machine, Load(tokens, *load[:2], load.chunks, load.pairs)))

    overhead = f"engine overhead of {costs_name}" if costs_name else "engine overhead left out"
    text = f"roofline of {setup.gpu.name}'s kernels, {overhead}"
    if any(layer.experts or layer.attention.latent for layer in setup.shape.layers):
        text += "; experts and latents in closed form, not held against steps"
    return seconds, text


def _engine_costs_name(setup: Setup) -> str | None:
    """The newest of vLLM's, as vllm-0.12.0/h100/bf16; None where there is none."""
    kept = setup.shape.quantization
    form = "bf16" if kept is None else kept.name
    names = [name for name in engine_names() if name.startswith("vllm-")]
    return next((n for n in reversed(names) if n.endswith(f"/{setup.gpu.name}/{form}")), None)
