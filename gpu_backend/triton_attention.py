"""Attention of a step by the Triton kernels: its decodes in one launch, its chunks in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_backend.kernels import (
    DecodeScratch,
    contiguous_decode_attention,
    contiguous_prefill_attention,
    decode_attention,
    layout,
    prefill_attention,
    store_kv,
)
from gpu_backend.kernels.layout import DTYPES, HEAD_DIMS, MAX_BLOCK_SIZE
from gpu_backend.shape import Shape
from kvsim.errors import UserError

COLUMNS = 16  # block tables are a multiple of so many blocks wide, or kernels are compiled anew


class Kernels(NamedTuple):
    """How KV is read: through a block table, or from its first block on. `num_columns` says how
    much of a table of so many blocks that takes."""

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    num_columns: Callable[[int], int]


PAGED = Kernels(decode_attention, prefill_attention, lambda num_blocks: num_blocks)
CONTIGUOUS = Kernels(contiguous_decode_attention, contiguous_prefill_attention, lambda _: 1)


class Decodes(NamedTuple):
    """The first rows of a step, one a sequence: int32 block tables [S, M] and contexts [S], 0 for
    an empty row, whose result is 0."""

    tables: Tensor
    contexts: Tensor
    scratch: DecodeScratch | None


class Chunks(NamedTuple):
    """The rows behind the decodes: sequence c has rows starts[c] to starts[c + 1] of them, int32
    [C + 1], at most max_num_new; int32 block tables [C, M] and contexts [C]."""

    starts: Tensor
    tables: Tensor
    contexts: Tensor
    max_num_new: int


class TritonAttention(NamedTuple):
    """Writes the KV of the first rows to `slots` int64, -1 for nowhere, then lets decodes and
    chunks attend. Rows behind them, padding, get zeros."""

    kernels: Kernels
    slots: Tensor
    decodes: Decodes | None
    chunks: Chunks | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> Tensor:
        count, scale = len(self.slots), q.shape[2] ** -0.5
        store_kv(k[:count], v[:count], kv, self.slots)
        out = q.new_zeros(q.shape) if len(q) > count else q.new_empty(q.shape)
        first = 0
        if self.decodes:
            tables, contexts, scratch = self.decodes
            first = len(contexts)
            self.kernels.decode(
                q[:first], kv, tables, contexts, scale, scratch=scratch, out=out[:first]
            )
        if self.chunks:
            starts, tables, contexts, max_num_new = self.chunks
            self.kernels.prefill(
                q[first:],
                kv,
                starts,
                tables,
                contexts,
                scale,
                max_num_new=max_num_new,
                out=out[first:],
            )
        return out


def check_triton(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, block_size: int
) -> None:
    """Raise UserError where the kernels cannot run a model."""
    if device.type == "cpu" and not layout.INTERPRETED:
        raise UserError("attention triton needs a GPU: device=cuda, or attention=torch")
    if dtype not in DTYPES:
        known = ", ".join(map(_name, DTYPES))
        raise UserError(f"attention triton: dtype {_name(dtype)} is not one of {known}")
    if shape.head_size not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise UserError(f"attention triton: heads of {shape.head_size} are not of {known}")
    if block_size > MAX_BLOCK_SIZE:
        raise UserError(
            f"attention triton: kv.block_size {block_size:,} is more than {MAX_BLOCK_SIZE}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
