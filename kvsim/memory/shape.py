"""What memory depends on in a model: its layers one by one, and how many parameters each has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one latent vector a token, shared by all heads."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None = None


@dataclass(frozen=True)
class Attention:
    """What one layer keeps of a token. window: tokens kept at most; None: all. A layer of linear
    attention has a state of state_elements a request instead, whatever its length."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: Latent | None = None
    state_elements: int = 0


@dataclass(frozen=True)
class Experts:
    """Experts of `intermediate` each; shared_intermediate: width of those every token takes."""

    count: int
    active: int
    intermediate: int
    shared_intermediate: int = 0


@dataclass(frozen=True)
class Layer:
    attention: Attention
    intermediate: int = 0
    experts: Experts | None = None


@dataclass(frozen=True)
class Quantization:
    """bits a weight, scales included, of what it covers: all weights, the linear layers of the
    decoder, its MLPs only, or its routed experts only. The rest stays in the model's dtype."""

    name: str
    bits: float
    covers: str


@dataclass(frozen=True)
class ModelShape:
    """published_params: on the model card; other_params: beside the decoder, as a vision tower."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    is_gated: bool
    is_tied: bool
    dtype: str
    quantization: Quantization | None
    max_position: int | None
    learned_positions: int
    published_params: float | None
    other_params: int
    source: str


def attention_params(shape: ModelShape, attention: Attention) -> int:
    """Weights of q, k, v and output projections (latent: of both factors of each)."""
    hidden, heads = shape.hidden, attention.heads
    if (latent := attention.latent) is None:
        width = attention.head_dim * (2 * heads + 2 * attention.kv_heads)
        return hidden * width
    q_out = heads * (latent.nope_dim + latent.rope_dim)
    rank = latent.q_rank
    q = hidden * q_out if rank is None else rank * q_out
    kv = latent.kv_rank * heads * (latent.nope_dim + latent.v_dim)
    return q + kv + heads * latent.v_dim * hidden + latent_down_params(shape, attention)


def latent_down_params(shape: ModelShape, attention: Attention) -> int:
    """The projections to the latents, which every tensor-parallel rank holds whole."""
    latent = attention.latent
    if latent is None:
        return 0
    return shape.hidden * (latent.kv_rank + latent.rope_dim + (latent.q_rank or 0))


def mlp_params(shape: ModelShape, intermediate: int) -> int:
    return (3 if shape.is_gated else 2) * shape.hidden * intermediate


def expert_params(shape: ModelShape, layer: Layer) -> int:
    """Routed experts of a layer, all of them."""
    experts = layer.experts
    return experts.count * mlp_params(shape, experts.intermediate) if experts else 0


def dense_params(shape: ModelShape, layer: Layer) -> int:
    """The MLP that every token takes: dense, or the shared experts."""
    shared = layer.experts.shared_intermediate if layer.experts else 0
    return mlp_params(shape, layer.intermediate + shared)


def plain_params(shape: ModelShape, layer: Layer) -> int:
    """What no quantisation covers: two norms and the router. Biases are left out (under 0.1 %)."""
    return shape.hidden * (2 + (layer.experts.count if layer.experts else 0))


def layer_params(shape: ModelShape, layer: Layer) -> int:
    return (
        attention_params(shape, layer.attention)
        + dense_params(shape, layer)
        + expert_params(shape, layer)
        + plain_params(shape, layer)
    )


def embedding_params(shape: ModelShape) -> int:
    return (shape.vocab + shape.learned_positions) * shape.hidden


def head_params(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden


def counted_params(shape: ModelShape) -> int:
    """Parameters by arithmetic from the shape."""
    head = 0 if shape.is_tied else head_params(shape)
    layers = sum(layer_params(shape, layer) for layer in shape.layers)
    return embedding_params(shape) + head + layers + shape.other_params
