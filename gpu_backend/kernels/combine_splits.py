"""Puts together what the splits of a context found, each by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout import is_plain_torch, next_power_of_2

# S sequences, H heads, D head size, P splits

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128  # a shorter split would hardly be worth the second kernel
PROGRAMS_PER_PROCESSOR = 4  # see num_splits_of
SPLITS_AT_ONCE = 8  # that a program holds


class DecodeScratch(NamedTuple):
    """Room for what each split of each sequence found; its content means nothing between calls."""

    partial: Tensor  # float32 [S, H, P, D], normalised by the split's own total
    log_total: Tensor  # float32 [S, H, P], log2 of that total, -inf for a split of no token


def num_splits_of(num_seqs: int, num_kv_heads: int, max_context: int, num_processors: int) -> int:
    """Into how many parts to cut each context: a power of 2, the scratch's width.

    num_seqs is the size of the batch's bucket and max_context what a row of the block table can
    hold, in tokens: fixed things, never the contexts, so that a captured graph stays right as
    those grow. num_processors: the device's multiprocessors.

    Every processor gets at least 4 programs where there is work for them. A program has 32 KiB or
    more of KV on its way while it works on as much (16-bit heads of 128), and 3 fit into the
    shared memory of a processor. By Little's law an H200 (4.8 TB/s, about 1 us to memory, 132
    processors) needs 36 KiB on the way in each, so that 2 would do if none ever waited for its
    first tile. The rest is for ragged batches: the longest context ends the sooner the more parts
    it has. More parts still would cost more (each 4 D bytes a query head, written and read) than
    they save.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // (num_seqs * num_kv_heads))
    worth = max(1, max_context // MIN_SPLIT_TOKENS)
    return min(next_power_of_2(min(wanted, worth)), MAX_SPLITS)


def decode_scratch(
    num_seqs: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device | str
) -> DecodeScratch:
    """Scratch for batches of at most num_seqs, each context cut into num_splits, a power of 2."""
    shape = (num_seqs, num_heads, num_splits)
    return DecodeScratch(
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def combine_splits_reference(scratch: DecodeScratch, out: Tensor) -> None:
    """What `combine_splits` does, in plain torch."""
    log_total = scratch.log_total[: len(out)]
    peak = log_total.amax(-1, keepdim=True)
    weight = (log_total - peak.where(peak.isfinite(), torch.zeros_like(peak))).exp2()[..., None]
    found = scratch.partial[: len(out)].where(weight > 0, torch.zeros_like(weight))
    total = weight.sum(2)
    out.copy_((found * weight).sum(2) / total.where(total > 0, torch.ones_like(total)))


@triton.jit
def _combine_kernel(
    out,
    partial,
    log_total,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)  # of all sequences: s * H + h
    column = tl.arange(0, HEAD_DIM_PAD)
    peak = tl.max(tl.load(log_total + head * NUM_SPLITS + tl.arange(0, NUM_SPLITS)), 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for first in range(0, NUM_SPLITS, AT_ONCE):
        split = head * NUM_SPLITS + first + tl.arange(0, AT_ONCE)
        weight = tl.exp2(tl.load(log_total + split) - peak)
        found = (weight > 0.0)[:, None] & (column < HEAD_DIM)[None, :]  # the rest is unwritten
        at = partial + split[:, None] * HEAD_DIM + column[None, :]
        acc += tl.sum(tl.load(at, mask=found, other=0.0) * weight[:, None], 0)
        total += tl.sum(weight, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    target = out + head * HEAD_DIM + column
    tl.store(target, acc.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def combine_splits(scratch: DecodeScratch, out: Tensor) -> None:
    """Write to out [S, H, D], contiguous, the splits of its S sequences, weighted by their totals;
    0 where no split found a token. Raises ValueError if scratch is not for out."""
    check_scratch(scratch, out)
    if is_plain_torch(out):
        return combine_splits_reference(scratch, out)
    num_seqs, num_heads, head_dim = out.shape
    num_splits = scratch.log_total.shape[2]
    _combine_kernel[(num_seqs * num_heads,)](
        out,
        *scratch,
        NUM_SPLITS=num_splits,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=next_power_of_2(head_dim),
        AT_ONCE=min(SPLITS_AT_ONCE, num_splits),
        num_warps=2,
    )
    return None


def check_scratch(scratch: DecodeScratch, out: Tensor) -> None:
    """Raise ValueError unless scratch has room for the sequences of out."""
    num_seqs, num_heads, num_splits, head_dim = scratch.partial.shape
    if num_seqs < out.shape[0] or (num_heads, head_dim) != tuple(out.shape[1:]):
        raise ValueError(f"scratch {list(scratch.partial.shape)} is not for {list(out.shape)}")
    if scratch.log_total.shape != scratch.partial.shape[:3]:
        raise ValueError("scratch: one total for each part")
    if num_splits != next_power_of_2(num_splits):
        raise ValueError(f"splits: a power of 2, not {num_splits}")
