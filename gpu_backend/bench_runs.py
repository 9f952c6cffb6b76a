"""A case of the benchmark as calls: the kernel, itself on contiguous KV, torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.bench_cases import DTYPES, Case, Inputs, make_inputs
from gpu_backend.kernels import (
    contiguous_decode_attention,
    decode_attention,
    decode_scratch,
    move_blocks,
    num_splits_of,
    prefill_attention,
    store_kv,
)
from gpu_backend.kernels.store_kv import store_kv_reference

Run = Callable[[], Tensor]


class Runs(NamedTuple):
    """Calls that read no value on the host, so that a graph can hold them. Each does all layers
    and returns the last one's result; `sdpa`'s, or where there is none what must come out, is to
    be compared after `packed`."""

    paged: Run
    contiguous: Run | None
    sdpa: Run | None
    packed: Callable[[Tensor], Tensor]
    expected: Run


def splits_of(case: Case, num_processors: int) -> int:
    """As an engine whose block table is just wide enough."""
    return num_splits_of(case.num_seqs, case.num_kv_heads, case.context, num_processors)


def make_runs(case: Case, device: torch.device, num_splits: int) -> Runs:
    """The case's calls on tensors of its own."""
    inputs = make_inputs(case, device)
    if case.kernel == "store":
        return _store(case, inputs)
    if case.kernel == "move":
        return _move(case, inputs)
    if case.kernel == "prefill":
        return _attention(case, inputs, _prefill(case, inputs), None)
    paged, contiguous = _decode(case, inputs, num_splits)
    return _attention(case, inputs, paged, contiguous)


def worst_error(runs: Runs, run: Run) -> float:
    """How far a head of run's result is from what it must be, to the largest value of that; inf
    where it is no number."""
    got, expected = run().float(), runs.packed(runs.expected()).float()  # [..., D]
    assert got.shape == expected.shape
    largest = expected.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = (got - expected).abs().amax(-1) / largest
    return error.nan_to_num(torch.inf).max().item()


def _decode(case: Case, inputs: Inputs, num_splits: int) -> tuple[Run, Run]:
    scale, out = case.head_dim**-0.5, torch.empty_like(inputs.q)
    scratch = None
    if num_splits > 1:
        scratch = decode_scratch(
            case.num_seqs, case.num_heads, case.head_dim, num_splits, out.device
        )
    dense = inputs.dense.view(inputs.kv.shape)

    def run(decode: Callable[..., Tensor], kv: Tensor, tables: Tensor) -> Tensor:
        for layer in kv:
            decode(inputs.q, layer, tables, inputs.context_lens, scale, scratch=scratch, out=out)
        return out

    return (
        lambda: run(decode_attention, inputs.kv, inputs.block_tables),
        lambda: run(contiguous_decode_attention, dense, inputs.dense_tables),
    )


def _prefill(case: Case, inputs: Inputs) -> Run:
    scale, out, longest = case.head_dim**-0.5, torch.empty_like(inputs.q), max(case.new_lengths)

    def run() -> Tensor:
        for layer in inputs.kv:
            prefill_attention(
                inputs.q,
                layer,
                inputs.query_starts,
                inputs.block_tables,
                inputs.context_lens,
                scale,
                max_num_new=longest,
                out=out,
            )
        return out

    return run


def _attention(case: Case, inputs: Inputs, paged: Run, contiguous: Run | None) -> Runs:
    sdpa = _causal_sdpa(inputs) if _is_whole_prompts(case) else _folded_sdpa(case, inputs)
    return Runs(paged, contiguous, sdpa, lambda found: found[inputs.is_query], sdpa)


def _is_whole_prompts(case: Case) -> bool:
    return case.kernel == "prefill" and case.num_new >= case.context


def _causal_sdpa(inputs: Inputs) -> Run:
    """Prompts padded behind their ends: what is before a query is its own sequence's."""
    q = inputs.padded_q.transpose(1, 2)
    layers = inputs.dense[:, :, :, : q.shape[2]].transpose(3, 4)  # [Y, 2, S, G, T, D]

    def run() -> Tensor:
        for k, v in layers:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def _folded_sdpa(case: Case, inputs: Inputs) -> Run:
    """The heads that read one KV head as rows of one product, which any of SDPA's kernels can do;
    a mask where not all rows see all tokens."""
    num_seqs, num_new, _, size = inputs.padded_q.shape
    q = inputs.padded_q.unflatten(2, (case.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    share = q.shape[2]
    q = q.flatten(2, 3)  # [S, G, share * T, D]
    layers = inputs.dense[:, :, :, : case.context].transpose(3, 4).to(q.dtype)
    mask = None
    if case.is_ragged or num_new > 1:
        token = torch.arange(inputs.dense.shape[3], device=q.device)
        first = inputs.context_lens - inputs.query_starts.diff()
        query = first[:, None] + torch.arange(num_new, device=q.device)
        is_seen = token <= query[..., None]  # [S, T, L]
        mask = torch.zeros(is_seen.shape, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill(~is_seen, -torch.inf).repeat(1, share, 1)[:, None]
        mask = mask[..., : case.context]  # whose rows stay aligned to 16 elements

    def run() -> Tensor:
        for k, v in layers:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.unflatten(2, (share, num_new)).permute(0, 3, 1, 2, 4)
        return out.reshape(num_seqs, num_new, -1, size)

    return run


def _store(case: Case, inputs: Inputs) -> Runs:
    """Every token's KV to its slot; expected, in the blocks that torch writes."""
    dtype = DTYPES[case.dtype][0]
    k, v = inputs.dense[-1, :, :, : case.context].flatten(1, 2).to(dtype)
    token = torch.arange(case.context, device=k.device)
    block = inputs.block_tables[:, token // case.block_size].long()
    slots = (block * case.block_size + token % case.block_size).flatten()
    kv, expected = torch.zeros_like(inputs.kv), torch.zeros_like(inputs.kv[-1])

    def run() -> Tensor:
        for layer in kv:
            store_kv(k, v, layer, slots)
        return kv[-1]

    def in_torch() -> Tensor:
        store_kv_reference(k, v, expected, slots)
        return expected

    return Runs(run, None, None, lambda found: found, in_torch)


def _move(case: Case, inputs: Inputs) -> Runs:
    """Every block to its sequence's place in a cache without holes, in all layers at once."""
    target = torch.zeros_like(inputs.kv)
    num_blocks = inputs.dense.shape[3] // case.block_size
    columns = slice(num_blocks)
    tables = (inputs.block_tables[:, columns], inputs.dense_tables[:, columns])
    moves = torch.stack([table.flatten() for table in tables], 1).long()

    def run() -> Tensor:
        move_blocks(inputs.kv, target, moves)
        return target

    return Runs(run, None, None, lambda found: found, lambda: inputs.dense.view(target.shape))
