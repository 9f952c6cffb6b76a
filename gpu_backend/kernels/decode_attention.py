"""Attention of one new token a sequence over its KV, split over programs and put together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.combine_splits import DecodeScratch, check_scratch, combine_splits
from gpu_backend.kernels.layout import (
    arch,
    check_kv,
    check_tables,
    check_touching,
    is_plain_torch,
    next_power_of_2,
)
from gpu_backend.kernels.softmax_tiles import (
    LOG2_E,
    Tile,
    attend_reference,
    attend_tile,
    dot_dtype,
    following,
    gather_kv,
    kv_offsets,
)

# S sequences, H heads, G KV heads, D head size, N blocks, B slots in a block, M blocks in a table


def decode_attention_reference(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """What `decode_attention` does, in plain torch; sums in float64 where q is float64."""
    out = torch.zeros_like(q)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for seq, length in enumerate(context_lens.tolist()):
        if length:
            start = max(length - window, 0) if window else 0
            k, v = (x.to(wide) for x in gather_kv(kv, block_tables[seq], start, length))
            new = q[seq : seq + 1].to(wide)
            out[seq] = attend_reference(new, k * k_scale, v * v_scale, scale, window)[0]
    return out


@triton.jit
def _decode_kernel(
    out,
    partial,
    log_total,
    q,
    kv,
    block_tables,
    context_lens,
    scale,
    v_scale,
    stride_q: tl.int64,
    stride_half: tl.int64,
    stride_block: tl.int64,
    stride_table: tl.int64,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_PAGED: tl.constexpr,
    DOT: tl.constexpr,
):
    SHARE: tl.constexpr = NUM_HEADS // NUM_KV_HEADS  # heads that read one KV head: the tile's rows
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(context_lens + seq)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - WINDOW, 0)
    first = start // TOKENS * TOKENS
    num_tiles = tl.cdiv(tl.maximum(length - first, 0), TOKENS)
    split_tokens = tl.cdiv(num_tiles, NUM_SPLITS) * TOKENS
    first += split * split_tokens
    end = tl.minimum(first + split_tokens, length)

    row = tl.program_id(0) // NUM_KV_HEADS * ROWS + tl.arange(0, ROWS)
    head = kv_head * SHARE + row
    column = tl.arange(0, HEAD_DIM_PAD)
    real = (row < SHARE)[:, None] & (column < HEAD_DIM)[None, :]
    at = head[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + seq * stride_q + at, mask=real, other=0.0).to(DOT)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    table = block_tables + seq * stride_table
    keys = kv + kv_head * HEAD_DIM
    for tile in range(first, end, TOKENS):
        token = tile + tl.arange(0, TOKENS)
        live = (token >= start) & (token < end)
        offset = kv_offsets(
            table, token, live, stride_block, SLOTS, NUM_KV_HEADS * HEAD_DIM, IS_PAGED
        )
        k_mask = (column < HEAD_DIM)[:, None] & live[None, :]
        k = tl.load(keys + offset[None, :] + column[:, None], mask=k_mask, other=0.0)
        v_mask = live[:, None] & (column < HEAD_DIM)[None, :]
        values = keys + stride_half + offset[:, None] + column[None, :]
        v = tl.load(values, mask=v_mask, other=0.0)
        peak, total, acc = attend_tile(queries, k, v, live[None, :], peak, total, acc, scale, DOT)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None] * v_scale
    if NUM_SPLITS == 1:
        target = out + seq * (NUM_HEADS * HEAD_DIM) + at
        tl.store(target, acc.to(out.dtype.element_ty), mask=real)
    else:
        part = (seq * NUM_HEADS + head) * NUM_SPLITS + split
        found = real & (total > 0.0)[:, None]
        tl.store(partial + part[:, None] * HEAD_DIM + column[None, :], acc, mask=found)
        tl.store(log_total + part, peak + tl.log2(total), mask=row < SHARE)


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scratch: DecodeScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token a sequence over its paged KV.

    q [S, H, D]; kv [2, N, B, G, D], keys then values, of q's dtype or fp8 e4m3 times k_scale and
    v_scale; block_tables int32 [S, M], -1 past the end; context_lens int32 [S] tokens, the new
    one included, 0 for an empty slot, whose output is 0. window: how many tokens a query sees,
    itself included, 0 for all; blocks wholly before it may be gone. Each context is cut into as
    many splits as scratch has, none without. Returns [S, H, D] (out, if given) in q's dtype,
    summed in float32. Reads no value on the host. Raises ValueError unless the shapes agree and
    G divides H. After Kwon et al. 2023 (PagedAttention), section 4.1, and Dao et al. 2023
    (Flash-Decoding).
    """
    return _decode(
        q,
        kv,
        block_tables,
        context_lens,
        scale,
        window,
        k_scale,
        v_scale,
        scratch,
        out,
        is_paged=True,
    )


def contiguous_decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scratch: DecodeScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`decode_attention` where each sequence's blocks lie one behind the other: only the first
    column of block_tables is read, so that the difference in time is what paging costs. Raises
    ValueError too if blocks that follow each other do not touch."""
    check_touching(kv)
    return _decode(
        q,
        kv,
        block_tables,
        context_lens,
        scale,
        window,
        k_scale,
        v_scale,
        scratch,
        out,
        is_paged=False,
    )


def decode_tile(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    share: int,
    head_dim: int,
    arch: int,
    *,
    is_paged: bool,
) -> Tile:
    """Rows are the share of heads that read one KV head, padded to what a dot takes; the rest is
    the largest tried that spills nowhere. float32 multiplies without tensor cores, from registers,
    and fp8 is widened in them. Two tiles are held where they fit, one being read while the other
    is worked on: 3 of Triton's stages, or 5 where block ids are read ahead of the KV they name."""
    if dtype == torch.float32:
        return Tile(16, 16, 8 if head_dim in (80, 96) else 4, 2)
    padded = max(16, next_power_of_2(share))
    if kv_dtype != dtype:
        if head_dim > 128:
            return Tile(min(padded, 32), 16, 4, 2)
        return Tile(min(padded, 64), 64, 4 if head_dim <= 64 and padded == 16 else 8, 2)
    stages = 2 if padded > 16 else 5 if is_paged else 3
    if head_dim > 128:
        return Tile(min(padded, 32), 32, 4, stages)
    return Tile(min(padded, 32 if arch >= 100 and head_dim > 64 else 64), 64, 4, stages)


def _decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    k_scale: float,
    v_scale: float,
    scratch: DecodeScratch | None,
    out: Tensor | None,
    *,
    is_paged: bool,
) -> Tensor:
    """The one launch behind both public functions, which document its arguments."""
    check_kv(kv, q.dtype)
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    check_tables(block_tables, context_lens, num_seqs)
    if head_dim != kv.shape[4] or num_heads % num_kv_heads or q.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q {list(q.shape)} does not fit kv {list(kv.shape)}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: contiguous {q.dtype} {list(q.shape)}")
    if scratch is not None:
        check_scratch(scratch, out)
    if is_plain_torch(q):
        if not is_paged:
            block_tables = following(block_tables, kv.shape[1])
        return out.copy_(
            decode_attention_reference(
                q, kv, block_tables, context_lens, scale, window, k_scale, v_scale
            )
        )
    if num_seqs == 0:
        return out
    num_splits = 1 if scratch is None else scratch.log_total.shape[2]
    share = num_heads // num_kv_heads
    tile = decode_tile(q.dtype, kv.dtype, share, head_dim, arch(), is_paged=is_paged)
    head_dim_pad = next_power_of_2(head_dim)
    partial, log_total = scratch if num_splits > 1 else (out, out)
    # heads first: programs that start together read what lies together, all heads of a token
    grid = (num_kv_heads * triton.cdiv(share, tile.rows), num_seqs, num_splits)
    _decode_kernel[grid](
        out,
        partial,
        log_total,
        q,
        kv,
        block_tables,
        context_lens,
        scale * k_scale * LOG2_E,
        v_scale,
        q.stride(0),
        kv.stride(0),
        kv.stride(1),
        block_tables.stride(0),
        NUM_SPLITS=num_splits,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        SLOTS=kv.shape[2],
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        WINDOW=window,
        IS_PAGED=is_paged,
        DOT=dot_dtype(q.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        combine_splits(scratch, out)
    return out
