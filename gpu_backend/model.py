"""A decoder over flat tokens and block tables: no padding, no cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, relu, rms_norm, silu

from gpu_backend.rope import Turn, turned
from gpu_backend.shape import Shape
from gpu_backend.weights import POSITION_OFFSET, Weights

ACTIVATION = {"silu": silu, "relu": relu, "gelu": gelu}


class Attention(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> Tensor:
        """Write k, v [T, G, D] of a step's rows to their places in a layer's kv [2, N, B, G, D],
        and let each q [T, H, D] attend to its sequence: [T, H, D], scores scaled by D ** -0.5."""
        ...


class Batch(NamedTuple):
    """The tokens of a step, one row each: tokens, positions int64 [T]; logits are wanted of `rows`
    int64 [R]; `attend` knows each row's KV."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor | slice
    attend: Attention


class Decoder:
    """Llama, Mistral, Qwen2, Qwen3 and OPT, as their shapes say."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        self.shape = shape
        self.weights = weights
        self.dtype = weights["embed"].dtype
        self.device = weights["embed"].device
        self._activation = ACTIVATION[shape.activation]
        self._turn = None if shape.rope is None else Turn(shape.rope, self.dtype, self.device)

    def no_logits(self) -> Tensor:
        """[0, V], of a step that computes nothing."""
        return torch.empty(0, self.shape.vocab_size, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def logits(self, batch: Batch, kv: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, V] of the wanted rows, in the weights' dtype (in out, if given). The KV of the
        rows goes to kv [L, 2, N, B, G, D]."""
        shape, weights = self.shape, self.weights
        hidden = embedding(batch.tokens, weights["embed"])  # [T, hidden]
        if shape.embed_size:
            hidden = linear(hidden, weights["project_in"])
        turns = None
        if self._turn is None:
            hidden = hidden + embedding(batch.positions + POSITION_OFFSET, weights["positions"])
        else:
            turns = self._turn.tables(batch.positions)
        for number in range(shape.num_layers):
            attend = partial(
                self._attention, number=number, turns=turns, batch=batch, kv=kv[number]
            )
            hidden = self._added(hidden, f"{number}.attention_norm", attend)
            feed = partial(self._feed_forward, number=number)
            hidden = self._added(hidden, f"{number}.ffn_norm", feed)
        hidden = hidden[batch.rows]
        if not shape.norms_after:
            hidden = self._norm(hidden, "norm")
        if shape.embed_size:
            hidden = linear(hidden, weights["project_out"])
        return torch.mm(hidden, weights.get("head", weights["embed"]).t(), out=out)

    def _added(self, hidden: Tensor, norm: str, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """The stream with what the layer adds, normed before the layer or after."""
        if self.shape.norms_after:
            return self._norm(hidden + layer(hidden), norm)
        return hidden + layer(self._norm(hidden, norm))

    def _attention(
        self,
        x: Tensor,
        number: int,
        turns: tuple[Tensor, Tensor] | None,
        batch: Batch,
        kv: Tensor,
    ) -> Tensor:
        shape, size = self.shape, self.shape.head_size
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        mixed = self._linear(x, f"{number}.qkv").view(len(x), sum(heads), size)
        q, k, v = mixed.split(heads, dim=1)
        if shape.has_qk_norm:
            q, k = self._norm(q, f"{number}.q_norm"), self._norm(k, f"{number}.k_norm")
        if turns is not None:
            q, k = turned(q, *turns), turned(k, *turns)
        mixed = batch.attend(q, k, v, kv)
        return self._linear(mixed.flatten(1), f"{number}.out")

    def _feed_forward(self, x: Tensor, number: int) -> Tensor:
        up = self._linear(x, f"{number}.up")
        if self.shape.rope is None:
            return self._linear(self._activation(up), f"{number}.down")
        gate, up = up.chunk(2, dim=-1)
        return self._linear(self._activation(gate) * up, f"{number}.down")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.weights[name], self.shape.norm_eps
        if self.shape.rope is None:
            return layer_norm(x, weight.shape, weight, self.weights[f"{name}.bias"], eps)
        return rms_norm(x, weight.shape, weight, eps)
