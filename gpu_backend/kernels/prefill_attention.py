"""Attention of chunks of prompts over their paged KV, cached prefixes included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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

# T tokens, S sequences, H heads, G KV heads, D head size, N blocks, B slots in a block,
# M blocks in a table


def prefill_attention_reference(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """What `prefill_attention` does, in plain torch; sums in float64 where q is float64."""
    out = torch.zeros_like(q)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = query_starts.tolist()
    for seq, length in enumerate(context_lens.tolist()):
        chunk = slice(starts[seq], starts[seq + 1])
        if length and chunk.start < chunk.stop:
            new = q[chunk].to(wide)
            start = max(length - len(new) - window + 1, 0) if window else 0
            k, v = (x.to(wide) for x in gather_kv(kv, block_tables[seq], start, length))
            out[chunk] = attend_reference(new, k * k_scale, v * v_scale, scale, window)
    return out


@triton.jit
def _prefill_kernel(
    out,
    q,
    kv,
    query_starts,
    block_tables,
    context_lens,
    scale,
    v_scale,
    stride_q: tl.int64,
    stride_half: tl.int64,
    stride_block: tl.int64,
    stride_table: tl.int64,
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
    SHARE: tl.constexpr = NUM_HEADS // NUM_KV_HEADS  # heads that read one KV head
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    begin = tl.load(query_starts + seq)
    num_new = tl.load(query_starts + seq + 1) - begin
    first_row = tl.program_id(0) * ROWS
    if first_row >= num_new * SHARE:
        return
    length = tl.load(context_lens + seq)
    row = first_row + tl.arange(0, ROWS)  # SHARE rows a token, so that none is wasted
    new = row // SHARE
    position = length - num_new + new
    end = tl.minimum(length, length - num_new + (first_row + ROWS - 1) // SHARE + 1)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - num_new + first_row // SHARE - WINDOW + 1, 0)

    column = tl.arange(0, HEAD_DIM_PAD)
    real = (new < num_new)[:, None] & (column < HEAD_DIM)[None, :]
    token_at = (begin + new).to(tl.int64)
    head_at = (kv_head * SHARE + row % SHARE) * HEAD_DIM
    at = token_at * stride_q + head_at
    queries = tl.load(q + at[:, None] + column[None, :], mask=real, other=0.0).to(DOT)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32)
    table = block_tables + seq * stride_table
    keys = kv + kv_head * HEAD_DIM
    for tile in range(start // TOKENS * TOKENS, end, TOKENS):
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
        seen = live[None, :] & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        peak, total, acc = attend_tile(queries, k, v, seen, peak, total, acc, scale, DOT)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None] * v_scale
    target = out + (token_at * (NUM_HEADS * HEAD_DIM) + head_at)[:, None] + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real)


def prefill_tile(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, arch: int) -> Tile:
    """The largest tried that spills nowhere. float32 multiplies without tensor cores, and below
    compute capability 9.0 tensor cores read their operands from registers too."""
    if dtype == torch.float32:
        if head_dim > 128:
            return Tile(16, 16, 4, 3)
        return Tile(32, 16, 8 if arch >= 100 else 4, 2) if head_dim > 64 else Tile(32, 32, 8, 2)
    if arch < 90:
        if head_dim > 64:
            return Tile(64, 32 if head_dim > 128 else 64, 8, 2)
        return Tile(128, 32, 8, 2)
    if head_dim > 128:
        return Tile(128 if kv_dtype == dtype else 64, 32, 8, 2)
    if kv_dtype != dtype and arch >= 100:
        return Tile(32, 32, 4, 2) if head_dim > 96 else Tile(64, 32, 8, 2)
    return Tile(128, 64, 8, 2)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    max_num_new: int,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over all its paged KV.

    q [T, H, D]: sequence s has rows query_starts[s] to query_starts[s + 1] (int32 [S + 1]), at most
    max_num_new (the grid is cut for it: more are left out), and they are the last of its
    context_lens[s] tokens (int32 [S]), so that a chunk sees the chunks and the cached prefix
    before it. Their own KV is stored already. kv, block_tables, window, k_scale, v_scale as in
    `decode_attention`. Returns [T, H, D] (out, if given) in q's dtype, summed in float32; rows of
    no sequence are 0 in a new tensor and stay as they are in out. Reads no value on the host.
    Raises ValueError unless the shapes agree and G divides H. After Kwon et al. 2023
    (PagedAttention), section 4, and Dao 2023 (FlashAttention-2), section 3.1.
    """
    return _prefill(
        q,
        kv,
        query_starts,
        block_tables,
        context_lens,
        scale,
        max_num_new,
        window,
        k_scale,
        v_scale,
        out,
        is_paged=True,
    )


def contiguous_prefill_attention(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    max_num_new: int,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`prefill_attention` where each sequence's blocks lie one behind the other: only the first
    column of block_tables is read. Raises ValueError too if blocks that follow each other do not
    touch."""
    check_touching(kv)
    return _prefill(
        q,
        kv,
        query_starts,
        block_tables,
        context_lens,
        scale,
        max_num_new,
        window,
        k_scale,
        v_scale,
        out,
        is_paged=False,
    )


def _prefill(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    max_num_new: int,
    window: int,
    k_scale: float,
    v_scale: float,
    out: Tensor | None,
    *,
    is_paged: bool,
) -> Tensor:
    """The one launch behind both public functions, which document its arguments."""
    check_kv(kv, q.dtype)
    num_seqs = query_starts.shape[0] - 1
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    check_tables(block_tables, context_lens, num_seqs)
    if head_dim != kv.shape[4] or num_heads % num_kv_heads or q.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q {list(q.shape)} does not fit kv {list(kv.shape)}")
    if query_starts.dtype != torch.int32:
        raise ValueError(f"query_starts: int32 [S + 1], not {query_starts.dtype}")
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out: contiguous {q.dtype} {list(q.shape)}")
    if is_plain_torch(q):
        if not is_paged:
            block_tables = following(block_tables, kv.shape[1])
        rows = slice(int(query_starts[0]), int(query_starts[-1]))
        out[rows] = prefill_attention_reference(
            q, kv, query_starts, block_tables, context_lens, scale, window, k_scale, v_scale
        )[rows]
        return out
    if num_tokens == 0 or num_seqs == 0:
        return out
    share = num_heads // num_kv_heads
    tile = prefill_tile(q.dtype, kv.dtype, head_dim, arch())
    grid = (triton.cdiv(max_num_new * share, tile.rows), num_kv_heads, num_seqs)
    _prefill_kernel[grid](
        out,
        q,
        kv,
        query_starts,
        block_tables,
        context_lens,
        scale * k_scale * LOG2_E,
        v_scale,
        q.stride(0),
        kv.stride(0),
        kv.stride(1),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=next_power_of_2(head_dim),
        SLOTS=kv.shape[2],
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        WINDOW=window,
        IS_PAGED=is_paged,
        DOT=dot_dtype(q.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
