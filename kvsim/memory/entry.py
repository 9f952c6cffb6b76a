"""A model, a GPU, an engine as the catalogue (or a user, inline) states them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvsim.memory.shape import Attention, Experts, Latent, Layer, ModelShape, Quantization

Count = Annotated[int, Field(ge=1, le=100_000_000)]
GiB = Annotated[float, Field(ge=0, le=1e5)]
Covers = Literal["all", "linear", "mlp", "experts"]
LayerKind = Literal["full", "sliding", "linear"]


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LatentEntry(Entry):
    """Multi-head latent attention: widths of the latents and of a head's parts."""

    kv_rank: Count
    rope_dim: Count
    nope_dim: Count = 128
    v_dim: Count = 128
    q_rank: Count | None = None


class ExpertsEntry(Entry):
    """Every `every`-th layer from first_dense_layers on has experts."""

    count: Count
    active: Count
    intermediate: Count
    shared_intermediate: Annotated[int, Field(ge=0)] = 0
    first_dense_layers: Annotated[int, Field(ge=0)] = 0
    every: Count = 1


class ModelEntry(Entry):
    """params_b: published, billions; other_params_b: those beside the decoder, as a vision tower.
    quantization: of the published weights. pattern: kinds of layers, repeated; full_kv_heads and
    full_head_dim where those of full layers differ; state_elements: of a linear layer, a request.
    """

    hidden: Count
    layers: Annotated[int, Field(ge=1, le=10_000)]
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    intermediate: Annotated[int, Field(ge=0)] = 0
    vocab: Count
    gated: bool = True
    tied: bool = False
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    quantization: str | None = None
    pattern: Annotated[list[LayerKind], Field(min_length=1)] = ["full"]
    window: Count | None = None
    full_kv_heads: Count | None = None
    full_head_dim: Count | None = None
    latent: LatentEntry | None = None
    experts: ExpertsEntry | None = None
    state_elements: Annotated[int, Field(ge=0)] = 0
    max_position: Count | None = None
    learned_positions: Annotated[int, Field(ge=0)] = 0
    params_b: Annotated[float, Field(gt=0)] | None = None
    other_params_b: Annotated[float, Field(ge=0)] = 0.0
    source: str

    @model_validator(mode="after")
    def _windows_go_with_sliding_layers(self) -> ModelEntry:
        if ("sliding" in self.pattern) != (self.window is not None):
            raise ValueError("window goes with sliding layers in the pattern, and only with them")
        if not self.intermediate and self.experts is None:
            raise ValueError("a model has an intermediate size, experts or both")
        return self

    def shape(self, name: str, quantization: Quantization | None = None) -> ModelShape:
        kinds = [self.pattern[n % len(self.pattern)] for n in range(self.layers)]
        return ModelShape(
            name=name,
            hidden=self.hidden,
            vocab=self.vocab,
            layers=tuple(self._layer(n, kind) for n, kind in enumerate(kinds)),
            is_gated=self.gated,
            is_tied=self.tied,
            dtype=self.dtype,
            quantization=quantization,
            max_position=self.max_position,
            learned_positions=self.learned_positions,
            published_params=self.params_b and self.params_b * 1e9,
            other_params=int(self.other_params_b * 1e9),
            source=self.source,
        )

    def _layer(self, number: int, kind: LayerKind) -> Layer:
        attention = self._attention(kind)
        experts = self.experts
        if experts is None or number < experts.first_dense_layers:
            return Layer(attention, self.intermediate)
        if (number + 1) % experts.every:
            return Layer(attention, self.intermediate)
        routed = experts.model_dump(exclude={"first_dense_layers", "every"})
        return Layer(attention, experts=Experts(**routed))

    def _attention(self, kind: LayerKind) -> Attention:
        kv_heads = self.kv_heads or self.heads
        head_dim = self.head_dim or self.hidden // self.heads
        if kind == "full":
            kv_heads, head_dim = self.full_kv_heads or kv_heads, self.full_head_dim or head_dim
        return Attention(
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=self.window if kind == "sliding" else None,
            latent=Latent(**self.latent.model_dump()) if self.latent else None,
            state_elements=self.state_elements if kind == "linear" else 0,
        )


class GpuEntry(Entry):
    """memory_gib: what the driver reports and start-up logs print, not the name's figure.
    block_size: tokens of a block on this device where the engine's is another."""

    memory_gib: Annotated[float, Field(gt=0, le=10_000)]
    memory_source: str
    block_size: Count | None = None
    large_step_defaults: Annotated[
        bool | None, Field(description="takes the engine's limits for large GPUs; by its memory")
    ] = None


class QuantizationEntry(Entry):
    """bits: of a weight, scales and zero points included."""

    bits: Annotated[float, Field(gt=0, le=32)]
    covers: Covers
    source: str


class LimitDefaults(Entry):
    """What vllm serve sets on GPUs of at_least_gib when nothing is asked for."""

    at_least_gib: GiB
    max_num_batched_tokens: Count
    max_num_seqs: Count


class EngineEntry(Entry):
    """How one range of engine versions sizes its pool.

    sampler_copies: float32 copies of the logits at the peak of the profiled sampler.
    runtime_gib: outside PyTorch's allocator, on one GPU; communication_gib: more of it from two.
    graphs_gib: CUDA graphs of one model, in the budget only if graphs_in_budget.
    whole_prompt_up_to: longest max_model_len whose prompts are profiled unchunked; 0: none are.
    warms_up_sampler: runs the profiled sampler again once the pool is taken.
    prices_windows: sliding layers have groups of their own; else they are charged as full ones.
    printed_tokens: whole blocks of a group, or requests at once x max_model_len.
    """

    versions: str
    sampler_copies: Annotated[float, Field(ge=0, le=100)]
    runtime_gib: GiB
    communication_gib: GiB
    graphs_gib: GiB
    graphs_in_budget: bool
    whole_prompt_up_to: Annotated[int, Field(ge=0)]
    warms_up_sampler: bool
    prices_windows: bool
    printed_tokens: Literal["blocks", "requests"]
    block_size: Count
    error_gib: Annotated[GiB, Field(description="bar of the predicted KV memory")]
    defaults: Annotated[list[LimitDefaults], Field(min_length=1)]
    source: str
