"""Writes new keys and values to their slots of the paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout import FP8, FP8_MAX, check_kv, is_plain_torch, next_power_of_2

# T tokens, G KV heads, D head size, N blocks, B slots in a block


def store_kv_reference(
    k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """What `store_kv` does, in plain torch."""
    live = slots >= 0
    block, slot = slots[live] // kv.shape[2], slots[live] % kv.shape[2]
    for half, new, scale in ((0, k, k_scale), (1, v, v_scale)):
        new = new[live]
        if kv.dtype == FP8:
            new = (new.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        kv[half, block, slot] = new.to(kv.dtype)


@triton.jit
def _store_kernel(
    k,
    v,
    kv,
    slots,
    k_inverse,
    v_inverse,
    stride_k: tl.int64,
    stride_v: tl.int64,
    stride_half: tl.int64,
    stride_block: tl.int64,
    SLOTS: tl.constexpr,
    ROW: tl.constexpr,
    ROW_PAD: tl.constexpr,
    MAX: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    columns = tl.arange(0, ROW_PAD)
    live = (columns < ROW) & (slot >= 0)
    key = tl.load(k + token * stride_k + columns, mask=live, other=0.0)
    value = tl.load(v + token * stride_v + columns, mask=live, other=0.0)
    if MAX > 0:
        key = tl.minimum(tl.maximum(key.to(tl.float32) * k_inverse, -MAX), MAX)
        value = tl.minimum(tl.maximum(value.to(tl.float32) * v_inverse, -MAX), MAX)
    target = kv + (slot // SLOTS) * stride_block + (slot % SLOTS) * ROW + columns
    tl.store(target, key.to(kv.dtype.element_ty), mask=live)
    tl.store(target + stride_half, value.to(kv.dtype.element_ty), mask=live)


def store_kv(
    k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write token t's key and value to slot slots[t] of kv, slot `block * B + offset`.

    k, v [T, G, D], any stride over T; kv [2, N, B, G, D] of their dtype, or fp8 e4m3 that then
    holds k / k_scale and v / v_scale, clamped to its range; slots int64 [T], -1 for a row that
    writes nothing. Two rows must not name one slot. Raises ValueError on other shapes or dtypes.
    """
    check_kv(kv, k.dtype)
    num_tokens, num_kv_heads, head_dim = k.shape
    if v.shape != k.shape or k.shape[1:] != kv.shape[3:] or v.dtype != k.dtype:
        raise ValueError(f"k {list(k.shape)}, v {list(v.shape)} do not fit kv {list(kv.shape)}")
    if any(new.stride()[1:] != (head_dim, 1) for new in (k, v)):
        raise ValueError("the heads of a token must be contiguous in k and in v")
    if slots.dtype != torch.int64 or slots.shape != (num_tokens,):
        raise ValueError(f"slots: int64 [{num_tokens}], not {slots.dtype} {list(slots.shape)}")
    if is_plain_torch(kv):
        return store_kv_reference(k, v, kv, slots, k_scale, v_scale)
    if num_tokens == 0:
        return None
    row = num_kv_heads * head_dim
    _store_kernel[(num_tokens,)](
        k,
        v,
        kv,
        slots,
        1 / k_scale,
        1 / v_scale,
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        kv.stride(1),
        SLOTS=kv.shape[2],
        ROW=row,
        ROW_PAD=next_power_of_2(row),
        MAX=FP8_MAX if kv.dtype == FP8 else 0.0,
        num_warps=4,
    )
    return None
