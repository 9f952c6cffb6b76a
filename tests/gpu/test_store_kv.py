from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.kernels import store_kv
from gpu_backend.kernels.layout import DTYPES, FP8, HEAD_DIMS
from gpu_backend.kernels.store_kv import store_kv_reference
from tests.gpu.batches import DEVICE, NAN, draw, normal


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def new_tokens(random, num_tokens, num_kv_heads, head_dim, dtype):
    """k as a fused projection leaves it, a view, rows apart; v on its own."""
    fused = normal(random, num_tokens, 3 * num_kv_heads, head_dim, dtype=dtype)
    return fused[:, :num_kv_heads], fused[:, num_kv_heads : 2 * num_kv_heads].contiguous()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_tokens_go_to_their_slots_and_nowhere_else(block_size, dtype, head_dim):
    random = torch.Generator().manual_seed(block_size * head_dim)
    num_kv_heads, num_blocks = draw(random, 1, 3), draw(random, 9, 12)
    k, v = new_tokens(random, 7, num_kv_heads, head_dim, dtype)
    slots = torch.randperm(num_blocks * block_size, generator=random)[:7].to(DEVICE)
    slots[[2, 5]] = -1
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    kv = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    expected = kv.clone()
    store_kv(k, v, kv, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // block_size, slot % block_size] = k[token]
            expected[1, slot // block_size, slot % block_size] = v[token]
    assert torch.equal(bits(kv), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_holds_scaled_values_within_its_range(dtype):
    random = torch.Generator().manual_seed(1)
    k, v = (
        2.0 ** torch.randint(-3, 4, (5, 2, 64), generator=random)
        * torch.randint(8, 16, (5, 2, 64), generator=random)
        / 8
        for _ in range(2)
    )  # what e4m3 holds without rounding: the interpreter's rounding is wrong
    k, v = k.to(DEVICE, dtype), (-v).to(DEVICE, dtype)
    k[1, 0, 3], v[2, 1, 4] = 30000.0, -30000.0
    kv = torch.zeros(2, 4, 8, 2, 64, dtype=FP8, device=DEVICE)
    expected = torch.zeros_like(kv)
    slots = torch.tensor([3, 12, 31, 8, 0], device=DEVICE)
    store_kv(k, v, kv, slots, k_scale=0.5, v_scale=2.0)
    store_kv_reference(k, v, expected, slots, k_scale=0.5, v_scale=2.0)
    assert kv.float().abs().max() == 448
    assert torch.equal(kv.float(), expected.float())


def test_the_cpu_path_writes_the_same(plain_torch):
    random = torch.Generator().manual_seed(2)
    k, v = (new.cpu() for new in new_tokens(random, 4, 2, 64, torch.float16))
    kv = torch.full((2, 3, 5, 2, 64), NAN, dtype=torch.float16)
    store_kv(k, v, kv, torch.tensor([14, -1, 0, 6]))
    written = torch.zeros(15, dtype=torch.bool)
    written[[14, 0, 6]] = True
    assert torch.equal(kv[0, 2, 4], k[0]) and torch.equal(kv[1, 1, 1], v[3])
    assert torch.equal(kv.isnan().all((0, 3, 4)).flatten(), ~written)


def test_other_shapes_and_dtypes_are_refused():
    kv = torch.zeros(2, 3, 16, 2, 64, device=DEVICE)
    k = torch.zeros(4, 2, 64, device=DEVICE)
    slots = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for bad in (
        (k[:, :1], k, kv, slots),
        (k, k, kv, slots[:3]),
        (k, k, kv, slots.int()),
        (k, k, kv.half(), slots),
        (k, k, kv.to(FP8), slots),
        (k, k, kv[:, :, :, :, :48], slots),
        (k, k, kv.transpose(2, 3), slots),
    ):
        with pytest.raises(ValueError):
            store_kv(*bad)
