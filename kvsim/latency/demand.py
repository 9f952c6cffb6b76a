"""What one step asks of each GPU: FLOPs and bytes of its operators, from a model's shape."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvsim.memory.shape import Attention, Layer, ModelShape, latent_down_params
from kvsim.memory.weights import bytes_a_weight

ACTIVATION_BYTES = 2  # activations pass between operators in 16 bits


class Load(NamedTuple):
    """A step as the operators see it; numbers, or arrays over many steps.

    tokens: query tokens, decodes and prompts together; decodes: sequences that make one token;
    context: the sum of their KV lengths; chunks: chunks of prompts; pairs: of a prompt token and a
    token that it attends to.
    """

    tokens: float
    decodes: float
    context: float
    chunks: float
    pairs: float


class Gemm(NamedTuple):
    """y[m, n] = x[m, k] W[k, n] on one rank, `count` times a step. rows: "tokens", or "seqs" (the
    LM head). experts > 0: W is that many matrices, of which each token takes `active`."""

    count: int
    n: float
    k: float
    weight_bytes: float
    rows: str = "tokens"
    experts: int = 0
    active: int = 1

    @property
    def is_8_bit(self) -> bool:
        return self.weight_bytes <= 1.01 and self.weight_bytes >= 0.75

    def flops_and_bytes(self, load: Load) -> tuple[float, float]:
        """Weights are read once; of experts, those that at least one of the tokens takes, in the
        mean over equally likely choices: E (1 - (1 - a/E)^m)."""
        m = load.tokens if self.rows == "tokens" else load.decodes + load.chunks
        matrices = 1.0
        if self.experts:
            matrices = self.experts * (1 - (1 - self.active / self.experts) ** m)
        passed = m * self.active
        flops = 2 * passed * self.n * self.k
        read = matrices * self.weight_bytes * self.n * self.k
        moved = ACTIVATION_BYTES * passed * (self.n + self.k)
        return self.count * flops, self.count * (read + moved * (m > 0))


class AttentionCost(NamedTuple):
    """Of `count` equal layers on one rank: KV bytes and FLOPs for each token of context, FLOPs for
    each pair of a prompt, bytes of state for each sequence. window: tokens attended to at most."""

    count: int
    kv_bytes: float
    context_flops: float
    pair_flops: float
    seq_bytes: float = 0.0
    window: int | None = None


class Operators(NamedTuple):
    """One rank's share of a model: its GEMMs, its attention, its all-reduces, two a layer.

    reduce_bytes: sent and received for each token by all of them, as a ring moves them:
    2 (tp - 1) / tp of the activations.
    """

    layers: int
    gemms: tuple[Gemm, ...]
    attention: tuple[AttentionCost, ...]
    reduces: int
    reduce_bytes: float
    has_8_bit_kv: bool


def operators(
    shape: ModelShape, tensor: int = 1, *, kv_bytes: int = 2, has_head: bool = True
) -> Operators:
    """A tensor-parallel rank's operators. KV heads fewer than ranks are repeated, latents are
    whole on each. Not modelled: pipeline stages, expert parallelism, elementwise operators (in the
    layer's fixed cost), the drafts of speculative decoding."""
    gemms: list[Gemm] = []
    attention: list[AttentionCost] = []
    for layer, count in Counter(shape.layers).items():
        gemms += _projections(shape, layer.attention, tensor, count)
        gemms += _mlp(shape, layer, tensor, count)
        attention.append(_attention(layer.attention, tensor, count, kv_bytes))
    if has_head:
        plain = bytes_a_weight(shape, "plain")
        gemms.append(Gemm(1, shape.vocab / tensor, shape.hidden, plain, "seqs"))
    num_layers = len(shape.layers)
    reduces = 2 * num_layers if tensor > 1 else 0
    reduced = reduces * 2 * (tensor - 1) / tensor * ACTIVATION_BYTES * shape.hidden
    return Operators(num_layers, tuple(gemms), tuple(attention), reduces, reduced, kv_bytes == 1)


def _projections(shape: ModelShape, attention: Attention, tensor: int, count: int) -> list[Gemm]:
    """qkv and output; of latent attention the way down, then up (in decodes the way up is folded
    into query and output, which has as many weights), and output."""
    hidden, size, latent = shape.hidden, bytes_a_weight(shape, "attention"), attention.latent
    if latent is None:
        heads = attention.heads / tensor
        kv_heads = max(attention.kv_heads / tensor, 1)
        qkv = (heads + 2 * kv_heads) * attention.head_dim
        return [
            Gemm(count, qkv, hidden, size),
            Gemm(count, hidden, heads * attention.head_dim, size),
        ]
    heads = attention.heads / tensor
    q_out, kv_out = heads * (latent.nope_dim + latent.rope_dim), latent.nope_dim + latent.v_dim
    down = latent_down_params(shape, attention) / hidden
    return [
        Gemm(count, down, hidden, size),
        Gemm(count, q_out, latent.q_rank or hidden, size),
        Gemm(count, heads * kv_out, latent.kv_rank, size),
        Gemm(count, hidden, heads * latent.v_dim, size),
    ]


def _mlp(shape: ModelShape, layer: Layer, tensor: int, count: int) -> list[Gemm]:
    ups = 2 if shape.is_gated else 1
    found, experts = [], layer.experts
    dense = layer.intermediate + (experts.shared_intermediate if experts else 0)
    if dense:
        size = bytes_a_weight(shape, "mlp")
        found += [
            Gemm(count, ups * dense / tensor, shape.hidden, size),
            Gemm(count, shape.hidden, dense / tensor, size),
        ]
    if experts:
        size, width = bytes_a_weight(shape, "experts"), experts.intermediate / tensor
        for n, k in ((ups * width, shape.hidden), (shape.hidden, width)):
            found.append(Gemm(count, n, k, size, "tokens", experts.count, experts.active))
    return found


def _attention(attention: Attention, tensor: int, count: int, kv_bytes: int) -> AttentionCost:
    heads, latent = attention.heads / tensor, attention.latent
    if attention.state_elements:  # read and written once a step, whatever the context
        state = 2 * ACTIVATION_BYTES * attention.state_elements / tensor
        return AttentionCost(count, 0, 0, 0, state)
    if latent is None:
        kv_heads = max(attention.kv_heads / tensor, 1)
        per_pair = 4 * heads * attention.head_dim
        per_token = 2 * kv_heads * attention.head_dim * kv_bytes
        return AttentionCost(count, per_token, per_pair, per_pair, window=attention.window)
    width = latent.kv_rank + latent.rope_dim
    decode = 2 * heads * (width + latent.kv_rank)  # scores over the latent, then its weighted sum
    prompt = 2 * heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
    return AttentionCost(count, width * kv_bytes, decode, prompt, window=attention.window)
