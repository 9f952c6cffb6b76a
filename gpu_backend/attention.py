"""Attention over KV in blocks in plain torch: write, attend, move blocks.

The KV of one layer is [2, N, B, G, D]: keys, then values, of N blocks of B tokens; a slot is block
* B + place in it. Axes: T tokens, H query heads, G KV heads, D head size, M blocks of a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Segment(NamedTuple):
    """Tokens of one sequence: rows `first` to `first + num_new` of the batch, the last of its
    `num_context` tokens, whose KV stands in `blocks`: int64 [M], or a slice of blocks that lie one
    behind the other."""

    first: int
    num_new: int
    num_context: int
    blocks: Tensor | slice
    mask: Tensor | None  # bool [num_new, num_context], True where a token may look; None: anywhere


class TorchAttention(NamedTuple):
    """Writes the KV of the first rows to `slots` int64, then lets the segments attend to theirs."""

    slots: Tensor
    segments: list[Segment]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> Tensor:
        write_kv(kv, self.slots, k, v)
        return attention(q, kv, self.segments, q.shape[2] ** -0.5)


def segment(
    first: int, num_new: int, num_context: int, blocks: Tensor | slice, device: torch.device
) -> Segment:
    """A segment whose tokens look at themselves and at what stands before them."""
    mask = None
    if num_new > 1:
        mask = torch.ones(num_new, num_context, dtype=torch.bool, device=device)
        mask = mask.tril(num_context - num_new)
    return Segment(first, num_new, num_context, blocks, mask)


def write_kv(kv: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values [T, G, D] of the first len(slots) tokens into their slots int64."""
    flat = kv.flatten(1, 2)
    flat[0].index_copy_(0, slots, keys[: len(slots)])
    flat[1].index_copy_(0, slots, values[: len(slots)])


def attention(q: Tensor, kv: Tensor, segments: list[Segment], scale: float) -> Tensor:
    """Attention of q [T, H, D] over the KV of each row's own sequence, [T, H, D] in q's dtype.

    The KV of all rows has been written: a row may read what another sequence of this step wrote.
    KV in listed blocks is gathered first, which is what paging costs here; a slice is read where
    it lies.
    Reads no slot past a sequence's context. Rows in no segment get zeros.
    """
    out = torch.zeros_like(q)
    heads, size = kv.shape[3:]
    group = q.shape[1] // heads
    for first, num_new, num_context, blocks, mask in segments:
        held = kv[:, blocks] if isinstance(blocks, slice) else kv.index_select(1, blocks)
        held = held.flatten(1, 2)[:, :num_context]
        keys, values = held.transpose(1, 2).unsqueeze(2).unbind(0)  # [G, 1, context, D]
        rows = slice(first, first + num_new)
        if num_new == 1:  # the query heads of a KV head as the rows of one product
            query = q[first].view(heads, 1, group, size)
            found = scaled_dot_product_attention(query, keys, values, scale=scale)
            out[first] = found.view(heads * group, size)
            continue
        query = q[rows].unflatten(1, (heads, group)).permute(1, 2, 0, 3)  # [G, H / G, T, D]
        wide = (heads, group, num_context, size)
        found = scaled_dot_product_attention(
            query, keys.expand(wide), values.expand(wide), attn_mask=mask, scale=scale
        )
        out[rows] = found.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def copy_blocks(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy blocks of KV [L, 2, N, B, G, D], all layers, from one pool to another or within one.

    As if one after the other: pairs are cut into runs in which none reads or writes what an
    earlier one wrote.
    """
    run: list[tuple[int, int]] = []
    written: set[int] = set()
    is_same = source is target
    for pair in pairs:
        if pair[1] in written or (is_same and pair[0] in written):
            _copy_together(source, target, run)
            run, written = [], set()
        run.append(pair)
        written.add(pair[1])
    _copy_together(source, target, run)


def _copy_together(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    table = torch.tensor(pairs, dtype=torch.int64)
    moved = source.index_select(2, table[:, 0].to(source.device)).to(target.device)
    target.index_copy_(2, table[:, 1].to(target.device), moved)
