from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.kernels import move_blocks, runs_of_moves
from gpu_backend.kernels.layout import DTYPES
from tests.gpu.batches import DEVICE, NAN, draw, normal

MOVES = [(0, 4), (-1, 3), (0, 2), (3, 1)]


def moves_on_device(moves):
    return torch.tensor(moves, dtype=torch.int64, device=DEVICE).view(-1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [(2,), (3, 2)])
@pytest.mark.parametrize("block_size, head_dim", [(1, 64), (5, 80), (16, 96), (128, 256)])
def test_blocks_are_copied_and_no_other_is_touched(block_size, head_dim, planes, dtype):
    random = torch.Generator().manual_seed(block_size)
    cache = normal(random, *planes, 6, block_size, draw(random, 1, 2), head_dim, dtype=dtype)
    expected = cache.clone()
    move_blocks(cache, cache, moves_on_device(MOVES))
    expected[..., [4, 2, 1], :, :, :] = expected[..., [0, 0, 3], :, :, :]
    assert torch.equal(cache, expected)


def test_blocks_go_to_another_cache_and_come_back():
    random = torch.Generator().manual_seed(1)
    device_cache = normal(random, 2, 7, 16, 2, 64, dtype=torch.float16)
    host_cache = torch.full((2, 4, 16, 2, 64), NAN, dtype=torch.float16)
    if DEVICE == "cuda":
        host_cache = host_cache.pin_memory()
    before = device_cache.clone()
    move_blocks(device_cache, host_cache, moves_on_device([(6, 0), (2, 3)]))
    device_cache[:, [6, 2]] = NAN
    move_blocks(host_cache, device_cache, moves_on_device([(0, 1), (3, 2)]))
    assert torch.equal(device_cache[:, [1, 2]], before[:, [6, 2]])
    assert host_cache[:, [1, 2]].isnan().all()


def test_the_cpu_path_copies_the_same(plain_torch):
    cache = torch.arange(2 * 5 * 64.0).view(2, 5, 1, 1, 64)
    expected = cache.clone()
    expected[:, [4, 2, 1]] = expected[:, [0, 0, 3]]
    move_blocks(cache, cache, torch.tensor(MOVES))
    assert torch.equal(cache, expected)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_runs_at_once_do_what_the_moves_do_in_order(moves):
    in_order = list(range(6))
    for source, target in moves:
        in_order[target] = in_order[source]
    by_runs = list(range(6))
    for run in runs_of_moves(moves):
        at_once = [by_runs[source] for source, _ in run]
        assert len({target for _, target in run}) == len(run)
        for (_, target), value in zip(run, at_once, strict=True):
            by_runs[target] = value
    assert by_runs == in_order
    assert [move for run in runs_of_moves(moves) for move in run] == moves


def test_caches_that_differ_are_refused():
    cache = torch.zeros(2, 3, 16, 2, 64, device=DEVICE)
    moves = moves_on_device([(0, 1)])
    for bad in (
        (cache, cache[..., :32], moves),
        (cache, cache.half(), moves),
        (cache, cache, moves.int()),
        (cache, cache, moves[0]),
        (cache.transpose(2, 3), cache.transpose(2, 3), moves),
    ):
        with pytest.raises(ValueError):
            move_blocks(*bad)
