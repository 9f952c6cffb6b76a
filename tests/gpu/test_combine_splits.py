from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.kernels import DecodeScratch, num_splits_of
from gpu_backend.kernels.combine_splits import (
    combine_splits,
    combine_splits_reference,
)
from gpu_backend.kernels.layout import HEAD_DIMS
from tests.gpu.batches import DEVICE, NAN, TOLERANCE, normal, worst


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_splits", [1, 2, 64])
def test_splits_are_weighted_by_their_totals_and_dead_ones_not_read(num_splits, head_dim):
    random = torch.Generator().manual_seed(num_splits)
    partial = normal(random, 3, 2, num_splits, head_dim, dtype=torch.float32)
    log_total = 20 * normal(random, 3, 2, num_splits, dtype=torch.float32)
    dead = torch.rand(3, 2, num_splits, generator=random).to(DEVICE) < 0.4
    dead[1] = True
    scratch = DecodeScratch(
        partial.masked_fill(dead[..., None], NAN), log_total.masked_fill(dead, float("-inf"))
    )
    out, expected = torch.full((2, 2, 2, head_dim), NAN, device=DEVICE)
    combine_splits(scratch, out)
    exact = DecodeScratch(scratch.partial.double(), scratch.log_total.double())
    combine_splits_reference(exact, expected := expected.double())
    assert worst(out, expected) <= TOLERANCE[torch.float32]
    assert (out[1] == 0).all()
    weight = torch.softmax(log_total[0] * torch.log(torch.tensor(2.0)), -1)
    if not dead[0].any():
        assert torch.allclose(expected[0].float(), (weight[..., None] * partial[0]).sum(1))


def test_the_splits_fill_the_processors_and_are_worth_it():
    assert num_splits_of(1, 8, 4096, 132) == 32  # of 128 tokens: 256 programs
    assert num_splits_of(1, 8, 131_072, 132) == 64  # the most
    assert num_splits_of(8, 8, 4096, 132) == 16  # 1,024 programs; 8 would be 16 short of 4 each
    assert num_splits_of(66, 8, 4096, 132) == 1  # 528 programs: 4 each
    assert num_splits_of(1, 8, 100, 132) == 1
    for num_seqs in (1, 2, 3, 5, 100):
        num_splits = num_splits_of(num_seqs, 4, 8192, 108)
        assert num_splits & (num_splits - 1) == 0 < num_splits <= 64


def test_scratch_of_another_shape_is_refused():
    out = torch.zeros(2, 4, 64, device=DEVICE)
    for shape in ((1, 4, 2, 64), (2, 3, 2, 64), (2, 4, 2, 80), (2, 4, 3, 64)):
        partial = torch.zeros(shape, device=DEVICE)
        with pytest.raises(ValueError):
            combine_splits(DecodeScratch(partial, partial[..., 0]), out)
