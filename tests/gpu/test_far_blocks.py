from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.kernels import (
    decode_attention,
    move_blocks,
    prefill_attention,
    store_kv,
)
from tests.gpu.batches import DEVICE, TOLERANCE, normal, worst

FAR = 2**31  # elements from block to block: block 1 is beyond 32 bits
SHAPE = (2, 2, 16, 1, 64)  # [2, N, B, G, D], the halves of a block side by side


@pytest.fixture
def far_kv(tmp_path):
    """A cache of two blocks, in a sparse file of 4 GiB where there is no GPU."""
    size = FAR + 2 * 16 * 64
    if DEVICE == "cuda":
        memory = torch.empty(size, dtype=torch.float16, device=DEVICE)
    else:
        name = str(tmp_path / "kv")
        memory = torch.from_file(name, shared=True, size=size, dtype=torch.float16)
    return memory.as_strided(SHAPE, (16 * 64, FAR, 64, 64, 1))


def test_blocks_beyond_32_bits_are_found(far_kv):
    random = torch.Generator().manual_seed(1)
    k, v = normal(random, 2, 10, 1, 64, dtype=torch.float16)
    slots = torch.arange(16, 26, device=DEVICE)
    store_kv(k, v, far_kv, slots)
    assert torch.equal(far_kv[0, 1, :10], k) and torch.equal(far_kv[1, 1, :10], v)

    tables = torch.full((1, 16), -1, dtype=torch.int32, device=DEVICE)
    tables[0, 0] = 1
    length = torch.tensor([10], dtype=torch.int32, device=DEVICE)
    q = normal(random, 10, 2, 64, dtype=torch.float16)
    starts = torch.tensor([0, 10], dtype=torch.int32, device=DEVICE)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().movedim(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True, scale=0.125
    ).movedim(0, 1)
    out = prefill_attention(q, far_kv, starts, tables, length, 0.125, max_num_new=10)
    assert worst(out, expected) <= TOLERANCE[torch.float16]
    out = decode_attention(q[-1:], far_kv, tables, length, 0.125)
    assert worst(out, expected[-1:]) <= TOLERANCE[torch.float16]

    move_blocks(far_kv, far_kv, torch.tensor([[1, 0]], device=DEVICE))
    assert torch.equal(far_kv[:, 0, :10], far_kv[:, 1, :10])
