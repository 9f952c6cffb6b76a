"""What decode and prefill attention share: KV read tile by tile, a running softmax, tile sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout import INTERPRETED

LOG2_E = 1.4426950408889634  # the kernels' softmax is in powers of 2


class Tile(NamedTuple):
    """Query rows and KV tokens that a program holds at once, and how the compiler lays it out."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What q, K, V and the weights are multiplied in, summed in float32. The interpreter keeps
    bfloat16 as bits and multiplies those, so there it is float32."""
    return tl.float32 if INTERPRETED else DOT_DTYPES[dtype]


def attend_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention of the last tokens of one sequence, in q's dtype.

    q [T, H, D] are the last T of the L tokens of k, v [L, G, D]; each sees itself and what lies
    before it, at most window tokens in all where window is not 0. Returns [T, H, D].
    """
    num_new, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    q = q.view(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tgrd,lgd->grtl", q, k) * scale
    behind = torch.arange(length - num_new, length)[:, None] - torch.arange(length)[None, :]
    seen = (behind >= 0) & ((behind < window) if window else True)
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    return torch.einsum("grtl,lgd->tgrd", scores.softmax(-1), v).reshape(
        num_new, num_heads, head_dim
    )


def gather_kv(kv: Tensor, blocks: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [end - start, G, D] of tokens start to end of the sequence with blocks."""
    first = start // kv.shape[2]
    used = blocks[first : -(-end // kv.shape[2])].long()
    skipped = start - first * kv.shape[2]
    k, v = kv[:, used].flatten(1, 2)[:, skipped : skipped + end - start]
    return k, v


def following(block_tables: Tensor, num_blocks: int) -> Tensor:
    """Tables [S, num_blocks] of the blocks from each sequence's first one on."""
    return block_tables[:, :1] + torch.arange(num_blocks, device=block_tables.device)


@triton.jit
def kv_offsets(
    table,
    tokens,
    live,
    stride_block,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    IS_PAGED: tl.constexpr,
):
    """Where in a half of the cache the tokens' slots begin, in elements, int64. Not paged: the
    table's first block, and the others behind it."""
    if IS_PAGED:
        block = tl.load(table + tokens // SLOTS, mask=live, other=0).to(tl.int64)
        offsets = block * stride_block + (tokens % SLOTS) * SLOT
    else:
        offsets = tl.load(table).to(tl.int64) * stride_block + tokens.to(tl.int64) * SLOT
    return offsets


@triton.jit
def attend_tile(q, k, v, seen, peak, total, acc, scale, DOT: tl.constexpr):
    """The running softmax over one more tile: q [R, D], k [D, T], v [T, D], seen [R, T] -> the
    largest score, the sum of the weights and the weighted values of each row, in powers of 2.

    A row that has seen nothing yet has peak -inf, total 0 and acc 0.
    """
    scores = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(peak - finite)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(DOT), v.to(DOT), acc, input_precision="ieee")
    return new_peak, total, acc
