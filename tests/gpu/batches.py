"""Random batches over a poisoned paged cache, and how close a kernel must come to float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")

# |kernel - float64| <= TOLERANCE * (1 + |float64|) for keys and values of variance 1
TOLERANCE = {
    torch.float32: 2.0**-18,  # float32 sums of up to some hundred products, and exp2
    torch.float16: 2.0**-10,  # weights and output are each rounded to 11 bits
    torch.bfloat16: 2.0**-7,  # the same to 8 bits; the interpreter cuts off instead of rounding
}


class Batch(NamedTuple):
    """Sequences in a cache whose other slots are all NaN; their own KV in full beside it."""

    kv: Tensor  # [2, N, B, G, D]
    block_tables: Tensor  # int32 [S, M], -1 past the end and before the window
    context_lens: Tensor  # int32 [S]
    dense: list[Tensor]  # of each sequence: [2, L, G, D]


def make_batch(
    random: torch.Generator,
    lengths: list[int],
    dtype: torch.dtype,
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_gone: list[int] | None = None,
    is_contiguous: bool = False,
) -> Batch:
    """Sequences of these lengths, in blocks taken at random (or one behind the other); the first
    num_gone tokens of each may have lost their blocks."""
    num_blocks = [-(-length // block_size) for length in lengths]
    total = sum(num_blocks) + 3  # that nobody uses
    ids = torch.arange(total) if is_contiguous else torch.randperm(total, generator=random)
    width = -(-max(*num_blocks, 1) // 16) * 16
    kv = torch.full((2, total, block_size, num_kv_heads, head_dim), NAN)
    tables = torch.full((len(lengths), width), -1, dtype=torch.int32)
    dense = []
    for seq, length in enumerate(lengths):
        mine, ids = ids[: num_blocks[seq]], ids[num_blocks[seq] :]
        new = torch.randn(2, length, num_kv_heads, head_dim, generator=random).to(dtype).float()
        dense.append(new.to(DEVICE, dtype))
        gone = num_gone[seq] if num_gone else 0
        token = torch.arange(gone, length)
        kv[:, mine[token // block_size], token % block_size] = new[:, gone:]
        tables[seq, : len(mine)] = mine
        tables[seq, : gone // block_size] = -1
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    return Batch(kv.to(dtype).to(DEVICE), tables.to(DEVICE), context_lens.to(DEVICE), dense)


def normal(random: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=random).to(DEVICE, dtype)


def draw(random: torch.Generator, low: int, high: int) -> int:
    """One of low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=random))


def worst(got: Tensor, exact: Tensor) -> float:
    """The largest error, as TOLERANCE measures it; NaN where either is."""
    return ((got.double() - exact.double()).abs() / (1 + exact.double().abs())).max().item()
