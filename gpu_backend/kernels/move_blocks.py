"""Copies blocks of KV: copy-on-write inside a cache, swaps between two."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout import is_plain_torch

TILE_BYTES = 8192  # of a block that one program copies


def runs_of_moves(moves: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut (source, target) moves inside one cache, to be made in order, into runs whose moves may
    be made at once: no block that a run writes is read or written by another move of the run."""
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in moves:
        if not runs or source in written or target in read or target in written:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, target))
        read.add(source)
        written.add(target)
    return runs


def move_blocks_reference(source: Tensor, target: Tensor, moves: Tensor) -> None:
    """What `move_blocks` does, in plain torch."""
    live = moves[moves[:, 0] >= 0].long()
    blocks = source[..., live[:, 0].to(source.device), :, :, :]
    target[..., live[:, 1].to(target.device), :, :, :] = blocks.to(target.device)


@triton.jit
def _move_kernel(
    source,
    target,
    moves,
    stride_plane_source: tl.int64,
    stride_plane_target: tl.int64,
    stride_block_source: tl.int64,
    stride_block_target: tl.int64,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    move = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    from_block = tl.load(moves + 2 * move)
    to_block = tl.load(moves + 2 * move + 1)
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    live = (at < LENGTH) & (from_block >= 0)
    read = source + plane * stride_plane_source + from_block * stride_block_source + at
    write = target + plane * stride_plane_target + to_block * stride_block_target + at
    tl.store(write, tl.load(read, mask=live), mask=live)


def move_blocks(source: Tensor, target: Tensor, moves: Tensor) -> None:
    """Copy block moves[i, 0] of source to block moves[i, 1] of target, in every plane.

    source, target [..., N, B, G, D], alike but for N: one layer's [2, N, B, G, D] or all layers'
    [L, 2, N, B, G, D]; the same tensor for copy-on-write, the device's cache and a pinned one of
    the host for swaps. moves int64 [P, 2] on the device, -1 for one that copies nothing. All are
    made at once: see `runs_of_moves`. Raises ValueError on other shapes or dtypes.
    """
    if source.shape[-3:] != target.shape[-3:] or source.shape[:-4] != target.shape[:-4]:
        raise ValueError(f"{list(source.shape)} and {list(target.shape)} differ beyond blocks")
    if source.dtype != target.dtype or min(source.dim(), target.dim()) < 5:
        raise ValueError(f"caches of [..., N, B, G, D], not {source.dtype} and {target.dtype}")
    if moves.dtype != torch.int64 or moves.dim() != 2 or moves.shape[1] != 2:
        raise ValueError(f"moves: int64 [P, 2], not {moves.dtype} {list(moves.shape)}")
    if is_plain_torch(moves):
        return move_blocks_reference(source, target, moves)
    if moves.shape[0] == 0:
        return None
    source, target = _planes(source), _planes(target)
    length = source[0, 0].numel()
    tile = min(TILE_BYTES // source.element_size(), triton.next_power_of_2(length))
    _move_kernel[(moves.shape[0], source.shape[0], triton.cdiv(length, tile))](
        source,
        target,
        moves.contiguous(),
        source.stride(0),
        target.stride(0),
        source.stride(1),
        target.stride(1),
        LENGTH=length,
        TILE=tile,
        num_warps=4,
    )
    return None


def _planes(cache: Tensor) -> Tensor:
    """cache [..., N, B, G, D] as [planes, N, B, G, D], never a copy."""
    if not cache[(0,) * (cache.dim() - 3)].is_contiguous():
        raise ValueError("the slots of a block must be contiguous")
    return cache.view(-1, *cache.shape[-4:])
