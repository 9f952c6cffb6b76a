"""The layout of the KV cache, which every kernel shares, and where a kernel runs.

kv [2, N, B, G, D]: keys, then values; N blocks of B slots; G KV heads of D. A token's heads lie
together, so that storing a token is one write of G * D a half, and a block of one half is one
run of B * G * D, so that copying it is a straight copy. Any stride over the first two axes will do:
a layer's cache may be a view of one tensor for all layers.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest finite e4m3
MAX_BLOCK_SIZE = 128
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = triton.knobs.runtime.interpret


def is_plain_torch(tensor: Tensor) -> bool:
    """Whether the reference does the work: on the CPU, unless Triton's interpreter runs there."""
    return tensor.device.type == "cpu" and not INTERPRETED


def arch() -> int:
    """Compute capability that kernels are compiled for, 90 for 9.0; 0 in the interpreter."""
    return 0 if INTERPRETED else driver.active.get_current_target().arch


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def check_kv(kv: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless kv is a cache that the kernels can read for queries of dtype."""
    if kv.dim() != 5 or kv.shape[0] != 2:
        raise ValueError(f"kv: [2, N, B, G, D], not {list(kv.shape)}")
    block_size, _, head_dim = kv.shape[2:]
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block size: 1 to {MAX_BLOCK_SIZE}, not {block_size}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head size: one of {HEAD_DIMS}, not {head_dim}")
    if not kv[0, 0].is_contiguous():
        raise ValueError("the slots of a block must be contiguous")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: one of {DTYPES}, not {dtype}")
    if kv.dtype != dtype and (kv.dtype != FP8 or dtype == torch.float32):
        raise ValueError(f"kv of {kv.dtype} does not go with {dtype}")


def check_touching(kv: Tensor) -> None:
    """Raise ValueError unless blocks of kv that follow each other touch."""
    if kv.stride(1) != kv[0, 0].numel():
        raise ValueError("the blocks of kv must be contiguous")


def check_tables(block_tables: Tensor, context_lens: Tensor, num_seqs: int) -> None:
    """Raise ValueError unless these are the block tables and context lengths of num_seqs."""
    if block_tables.dtype != torch.int32 or block_tables.shape[0] != num_seqs:
        raise ValueError(
            f"block_tables: int32 [{num_seqs}, M], not {block_tables.dtype} "
            f"{list(block_tables.shape)}"
        )
    if block_tables.stride(0) % 16 or block_tables.stride(1) != 1:
        raise ValueError("block_tables: rows of one fixed width, a multiple of 16")
    if context_lens.dtype != torch.int32 or context_lens.shape != (num_seqs,):
        raise ValueError(
            f"context_lens: int32 [{num_seqs}], not {context_lens.dtype} {list(context_lens.shape)}"
        )
