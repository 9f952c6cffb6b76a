"""What the benchmark of the kernels runs: cases, their tensors, and the work that each stands for.

    dense [Y, 2, S, L, G, D]   the KV of every layer, each sequence's in one piece, padded to L
    kv    [Y, 2, N, B, G, D]   the same in blocks of B tokens, strewn at random: N = S * L / B

Y layers, S sequences, T tokens, H heads, G KV heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_backend.kernels.layout import FP8

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16, fp8 KV": (torch.bfloat16, FP8),
}
TABLE_MULTIPLE = 16


class Case(NamedTuple):
    """One call of a kernel a layer; defaults are the heads of Llama-3-8B. The first layers' KV has
    left the L2 cache when the last is read, if they are many, as in a step of a model."""

    kernel: str  # decode, prefill, store or move
    num_seqs: int
    context: int  # tokens of the longest sequence; store, move: of every one
    is_ragged: bool = False  # contexts from context / num_seqs up to context, else all the same
    num_new: int = 1  # of each context, its last tokens that are computed, at most
    block_size: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"
    num_layers: int = 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        if not self.is_ragged:
            return [self.context] * self.num_seqs
        order = torch.randperm(self.num_seqs, generator=torch.Generator().manual_seed(1))
        return [max(1, self.context * (i + 1) // self.num_seqs) for i in order.tolist()]

    @property
    def new_lengths(self) -> list[int]:
        """Tokens of each sequence that are computed."""
        return [min(length, self.num_new) for length in self.lengths]

    @property
    def token_kv_bytes(self) -> int:
        """Of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPES[self.dtype][1].itemsize

    @property
    def kv_bytes(self) -> int:
        """KV that one call reads; store, move: writes."""
        return sum(self.lengths) * self.token_kv_bytes

    @property
    def moved_bytes(self) -> int:
        """What one call must read and write at least: KV once, queries, output; store, move: the KV
        and what it came from."""
        dtype = DTYPES[self.dtype][0]
        if self.kernel == "store":
            new = 2 * self.num_kv_heads * self.head_dim * dtype.itemsize
            return self.kv_bytes + sum(self.lengths) * new
        if self.kernel == "move":
            return 2 * self.kv_bytes
        row = self.num_heads * self.head_dim * dtype.itemsize
        return self.kv_bytes + 2 * sum(self.new_lengths) * row

    @property
    def flops(self) -> int:
        """Of one call's two products over what causality lets a query see."""
        pairs = 0
        for length, new in zip(self.lengths, self.new_lengths, strict=True):
            pairs += new * (length - new) + new * (new + 1) // 2
        return 4 * self.num_heads * self.head_dim * pairs


class Inputs(NamedTuple):
    """A case's tensors; `dense` and `kv` hold the same values for the same tokens."""

    padded_q: Tensor  # [S, T, H, D]
    is_query: Tensor  # bool [S, T]
    q: Tensor  # [T, H, D], of all sequences, one behind the other
    query_starts: Tensor  # int32 [S + 1]
    context_lens: Tensor  # int32 [S]
    dense: Tensor
    dense_tables: Tensor  # int32 [S, M], of `dense` in blocks
    kv: Tensor
    block_tables: Tensor  # int32 [S, M], -1 past the end


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Normal values of one seed."""
    random = torch.Generator(device).manual_seed(2)
    dtype, kv_dtype = DTYPES[case.dtype]
    num_blocks = -(-case.context // case.block_size)
    heads = (case.num_kv_heads, case.head_dim)
    padded = num_blocks * case.block_size
    shape = (case.num_layers, 2, case.num_seqs, padded, *heads)
    dense = torch.randn(shape, generator=random, device=device, dtype=dtype).to(kv_dtype)

    total = case.num_seqs * num_blocks
    place = torch.randperm(total, generator=torch.Generator().manual_seed(3)).to(device)
    kv = torch.empty((case.num_layers, 2, total, case.block_size, *heads), dtype=kv_dtype,
                     device=device)  # fmt: skip
    as_bytes = torch.uint8 if kv_dtype == FP8 else kv_dtype  # index_copy_ does not take fp8
    blocks = dense.view(kv.shape).view(as_bytes)
    for layer in range(case.num_layers):
        for half in range(2):
            kv.view(as_bytes)[layer, half].index_copy_(0, place, blocks[layer, half])

    new = torch.tensor(case.new_lengths, device=device)
    longest = max(case.new_lengths)
    q = torch.randn((case.num_seqs, longest, case.num_heads, case.head_dim), generator=random,
                    device=device, dtype=dtype)  # fmt: skip
    is_query = torch.arange(longest, device=device) < new[:, None]
    starts = torch.zeros(case.num_seqs + 1, dtype=torch.int32, device=device)
    starts[1:] = new.cumsum(0)
    return Inputs(
        padded_q=q,
        is_query=is_query,
        q=q[is_query],
        query_starts=starts,
        context_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        dense=dense,
        dense_tables=_tables(torch.arange(total, device=device), case.num_seqs),
        kv=kv,
        block_tables=_tables(place, case.num_seqs),
    )


def _tables(blocks: Tensor, num_seqs: int) -> Tensor:
    """blocks [N], each sequence's in its order -> int32 [S, M], as wide as the kernels ask for."""
    found = blocks.view(num_seqs, -1)
    width = -(-found.shape[1] // TABLE_MULTIPLE) * TABLE_MULTIPLE
    tables = torch.full((num_seqs, width), -1, dtype=torch.int32, device=blocks.device)
    tables[:, : found.shape[1]] = found
    return tables


CASES = [
    Case("decode", 1, 256, num_layers=32),
    Case("decode", 16, 256, num_layers=32),
    Case("decode", 16, 256, is_ragged=True, num_layers=32),
    Case("decode", 8, 1024),  # 34 MB: below an H200's L2 of 50 MB
    Case("decode", 64, 1280),  # 336 MB
    Case("decode", 128, 4096, is_ragged=True),  # 1.08 GB
    Case("decode", 1, 131_072),  # 537 MB
    Case("decode", 64, 8192),  # 2.1 GB
    Case("decode", 64, 16_384, is_ragged=True),  # 2.2 GB
    Case("decode", 64, 8192, block_size=128),
    Case("decode", 64, 8192, block_size=8),
    Case("decode", 64, 16_384, dtype="bf16, fp8 KV"),  # 2.1 GB
    Case("decode", 64, 8192, num_heads=28, num_kv_heads=4, dtype="fp16"),  # Qwen2-7B, 1.07 GB
    Case("decode", 32, 4096, num_kv_heads=32),  # as Llama-2-7B, 2.1 GB
    Case("decode", 64, 8192, head_dim=64),  # Llama-3.2-1B, 1.07 GB
    Case("prefill", 1, 512, num_new=512),
    Case("prefill", 8, 4096, num_new=4096),
    Case("prefill", 16, 4096, is_ragged=True, num_new=4096),
    Case("prefill", 8, 8192, num_new=512),  # a chunk behind a cached prefix
    Case("store", 1, 256),
    Case("store", 8, 4096),
    Case("move", 4, 256, num_layers=32),
]
