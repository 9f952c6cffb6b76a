"""Bytes of weights on a rank: sharding and number formats."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.errors import ConfigError
from kvsim.memory.shape import (
    Layer,
    ModelShape,
    attention_params,
    dense_params,
    embedding_params,
    expert_params,
    head_params,
    latent_down_params,
    plain_params,
)

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of it before it splits it


class Parallel(NamedTuple):
    """tensor x pipeline GPUs a replica, `data` replicas. Routed experts are split over tensor x
    data GPUs; all else, the KV pool included, is whole in each replica."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


class Stage(NamedTuple):
    """The layers of one pipeline stage, and whether it holds the embeddings and the head."""

    layers: tuple[Layer, ...]
    is_first: bool
    is_last: bool


def check_parallel(shape: ModelShape, parallel: Parallel) -> None:
    """ConfigError unless the engine accepts this split: tensor divides attention heads and padded
    vocabulary, and divides the KV heads or is a multiple of them; a stage has a layer at least."""
    if faults := parallel_faults(shape, parallel):
        legal = [n for n in (1, 2, 4, 8, 16) if not parallel_faults(shape, Parallel(n))]
        hint = f"; tensor parallel sizes that do: {', '.join(map(str, legal))}"
        raise ConfigError([fault + hint for fault in faults])


def parallel_faults(shape: ModelShape, parallel: Parallel) -> list[str]:
    found, tensor = [], parallel.tensor
    attention = shape.layers[0].attention
    padded = -(-shape.vocab // VOCAB_PADDING) * VOCAB_PADDING
    for count, what in ((attention.heads, "attention heads"), (padded, "padded vocabulary")):
        if count % tensor:
            found.append(f"tensor parallel {tensor} does not divide the {count} {what}")
    kv_heads = attention.kv_heads
    if attention.latent is None and kv_heads % tensor and tensor % kv_heads:
        found.append(f"tensor parallel {tensor} does not go with {kv_heads} KV heads")
    if parallel.pipeline > len(shape.layers):
        found.append(f"{len(shape.layers)} layers do not fill {parallel.pipeline} stages")
    return found


def stages(shape: ModelShape, num_stages: int) -> list[Stage]:
    """Layers in equal runs; what is left over goes one each to the stages before the last, as
    vLLM does, since the last stage holds the head."""
    base, left = divmod(len(shape.layers), num_stages)
    sizes = [base + (num_stages - 1 - left <= n < num_stages - 1) for n in range(num_stages)]
    starts = [sum(sizes[:n]) for n in range(num_stages + 1)]
    return [
        Stage(shape.layers[starts[n] : starts[n + 1]], n == 0, n == num_stages - 1)
        for n in range(num_stages)
    ]


def bytes_a_weight(shape: ModelShape, part: str) -> float:
    """part: attention, mlp, experts, or plain (embeddings, head, norms, router).

    Checkpoints of every format but GGUF keep embeddings, head, norms and router in the model's
    dtype: `modules_to_not_convert` and `ignore` of their config.json say so (Llama-3.1 FP8, Phi-4
    GPTQ, gpt-oss); Meta's 405B FP8 leaves out the attention too, gpt-oss all but the experts.
    """
    covered = {
        "all": ("attention", "mlp", "experts", "plain"),
        "linear": ("attention", "mlp", "experts"),
        "mlp": ("mlp", "experts"),
        "experts": ("experts",),
    }
    if shape.quantization and part in covered[shape.quantization.covers]:
        return shape.quantization.bits / 8
    return DTYPE_BYTES[shape.dtype]


def stage_weight_bytes(shape: ModelShape, stage: Stage, parallel: Parallel) -> float:
    """Weights of one rank of a stage. KV projections are repeated where KV heads are fewer than
    ranks; the projections to the latents, norms and routers are whole on every rank."""
    total = sum(_layer_bytes(shape, layer, parallel) for layer in stage.layers)
    plain, tensor = bytes_a_weight(shape, "plain"), parallel.tensor
    ends = embedding_params(shape) if stage.is_first else 0
    if stage.is_last and not (shape.is_tied and stage.is_first):
        ends += head_params(shape)
    if stage.is_first:
        total += shape.other_params * DTYPE_BYTES[shape.dtype] / tensor
    return total + ends * plain / tensor


def _layer_bytes(shape: ModelShape, layer: Layer, parallel: Parallel) -> float:
    tensor, attention = parallel.tensor, layer.attention
    whole = latent_down_params(shape, attention)
    split = attention_params(shape, attention) - whole
    params = split / tensor + whole
    if attention.latent is None and tensor > attention.kv_heads:
        kv = 2 * shape.hidden * attention.head_dim
        params += kv * (1 - attention.kv_heads / tensor)
    return (
        params * bytes_a_weight(shape, "attention")
        + dense_params(shape, layer) / tensor * bytes_a_weight(shape, "mlp")
        + expert_params(shape, layer) / tensor / parallel.data * bytes_a_weight(shape, "experts")
        + plain_params(shape, layer) * bytes_a_weight(shape, "plain")
    )
