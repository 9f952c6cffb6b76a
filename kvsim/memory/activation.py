"""The peak of the step that an engine runs to see how much memory a step takes."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.memory.catalog import Gpu
from kvsim.memory.entry import EngineEntry, LimitDefaults
from kvsim.memory.kv import Limits
from kvsim.memory.shape import Layer, ModelShape
from kvsim.memory.weights import DTYPE_BYTES, Parallel

LOGIT_BYTES = 4  # samplers work in float32


class Step(NamedTuple):
    """The profiled step, and the rule that set its size."""

    tokens: int
    seqs: int
    rule: str


def profiled_step(engine: EngineEntry, gpu: Gpu, limits: Limits) -> Step:
    """As asked for; else by the engine's defaults for a GPU of this size. An engine that does not
    chunk prompts profiles one whole prompt, up to the max_model_len at which it starts to."""
    default = _default(engine, gpu)
    seqs = limits.max_num_seqs or default.max_num_seqs
    tokens, rule = default.max_num_batched_tokens, "the engine's default step"
    if limits.max_num_batched_tokens:
        tokens, rule = limits.max_num_batched_tokens, "max_num_batched_tokens"
    elif tokens < limits.max_model_len <= engine.whole_prompt_up_to:
        tokens, rule = limits.max_model_len, "one whole prompt of max_model_len, not chunked"
    return Step(tokens, min(seqs, tokens), rule)


def _default(engine: EngineEntry, gpu: Gpu) -> LimitDefaults:
    small, *larger = sorted(engine.defaults, key=lambda row: row.at_least_gib)
    if gpu.large_step_defaults is False:
        return small
    return next((row for row in reversed(larger) if gpu.memory_gib >= row.at_least_gib), small)


def forward_bytes(shape: ModelShape, layer: Layer, parallel: Parallel, tokens: int) -> float:
    """The most that one layer holds at once: three rows of the residual stream and either the
    MLP's gate, up and their product, or queries, keys, values and the attention's output.

    Fits Llama-3.1-8B's printed 2.07 GiB at 20,000 tokens and 2.99 at 29,000 (vllm#10517): 110.6
    kB a token is 2 * 3 * (14,336 + 4,096). Experts: their rows for every token and choice.
    """
    tensor, attention = parallel.tensor, layer.attention
    rows = 3 if shape.is_gated else 2
    shared = layer.experts.shared_intermediate if layer.experts else 0
    mlp = rows * (layer.intermediate + shared) / tensor
    if layer.experts:
        width = rows * layer.experts.intermediate / tensor + shape.hidden
        mlp += layer.experts.active * width
    if latent := attention.latent:
        head = 2 * (latent.nope_dim + latent.rope_dim) + latent.nope_dim + 2 * latent.v_dim
        inner = attention.heads * head / tensor
    else:
        heads = 2 * attention.heads + 2 * attention.kv_heads
        inner = heads * attention.head_dim / tensor
    return tokens * (3 * shape.hidden + max(mlp, inner)) * DTYPE_BYTES[shape.dtype]


def sampler_bytes(shape: ModelShape, engine: EngineEntry, step: Step) -> float:
    """The step's hidden states, logits in the model's dtype, and the sampler's float32 copies."""
    width = DTYPE_BYTES[shape.dtype]
    logits = step.seqs * shape.vocab
    return step.tokens * shape.hidden * width + logits * (
        width + engine.sampler_copies * LOGIT_BYTES
    )


def implied_seqs(shape: ModelShape, engine: EngineEntry, step: Step, activation_gib: float) -> int:
    """The max_num_seqs whose sampler takes a printed activation: where it is far from the one
    asked for, or from the default, the log's server was started with another."""
    width = DTYPE_BYTES[shape.dtype]
    rest = activation_gib * 2**30 - step.tokens * shape.hidden * width
    return round(rest / shape.vocab / (width + engine.sampler_copies * LOGIT_BYTES))


def logits_bytes(shape: ModelShape, step: Step) -> int:
    """float32 logits of max_num_seqs requests: what the sampler's warm-up starts from."""
    return step.seqs * shape.vocab * LOGIT_BYTES
