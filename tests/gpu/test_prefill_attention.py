from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.kernels import contiguous_prefill_attention, prefill_attention
from gpu_backend.kernels.layout import DTYPES, FP8, HEAD_DIMS
from gpu_backend.kernels.prefill_attention import prefill_attention_reference
from tests.gpu.batches import (
    DEVICE,
    NAN,
    TOLERANCE,
    draw,
    make_batch,
    normal,
    worst,
)

PADDING = 3  # rows behind the last sequence


def chunks(random, num_new, num_heads, head_dim, dtype):
    """q, as a fused projection leaves it, and where each sequence's rows begin."""
    starts = torch.tensor([0, *num_new]).cumsum(0).to(DEVICE, torch.int32)
    q = normal(random, sum(num_new) + PADDING, num_heads + 2, head_dim, dtype=dtype)
    return q[:, :num_heads], starts


def run_prefill(q, starts, batch, *, max_num_new, prefill=prefill_attention, **options):
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=DEVICE)
    kv, tables, lengths, _ = batch
    scale = q.shape[2] ** -0.5
    got = prefill(
        q, kv, starts, tables, lengths, scale, max_num_new=max_num_new, out=out, **options
    )
    assert got is out and out[-PADDING:].isnan().all()
    return out[:-PADDING]


def exact(q, starts, batch, **options):
    kv, tables, lengths, _ = batch
    scale = q.shape[2] ** -0.5
    return prefill_attention_reference(q.double(), kv, starts, tables, lengths, scale, **options)[
        :-PADDING
    ]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_agrees_with_float64(dtype, head_dim, record_property):
    random = torch.Generator().manual_seed(head_dim)
    num_kv_heads, share = draw(random, 1, 2), draw(random, 1, 8)
    num_new = [draw(random, 2, 40), 0, 1, draw(random, 60, 90), 0]
    cached = [draw(random, 1, 150), 20, draw(random, 1, 100), 0, 0]
    batch = make_batch(
        random,
        [new + old for new, old in zip(num_new, cached, strict=True)],
        dtype,
        block_size=[1, 8, 16, 32, 128, 24][draw(random, 0, 5)],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    q, starts = chunks(random, num_new, num_kv_heads * share, head_dim, dtype)
    out = run_prefill(q, starts, batch, max_num_new=max(num_new) + 30)
    record_property("error", worst(out, exact(q, starts, batch)))
    assert worst(out, exact(q, starts, batch)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_any_block_size_will_do(block_size):
    random = torch.Generator().manual_seed(block_size)
    batch = make_batch(
        random, [130, 33], torch.float16, block_size=block_size, num_kv_heads=1, head_dim=64
    )
    q, starts = chunks(random, [9, 33], 3, 64, torch.float16)
    out = run_prefill(q, starts, batch, max_num_new=33)
    assert worst(out, exact(q, starts, batch)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("window", [1, 16, 70])
def test_a_window_slides_with_the_query_and_needs_no_block_before_it(window):
    random = torch.Generator().manual_seed(window)
    num_new, lengths = [50, 40, 1], [190, 40, 90]
    batch = make_batch(
        random,
        lengths,
        torch.float32,
        block_size=16,
        num_kv_heads=2,
        head_dim=64,
        num_gone=[max(0, lengths[s] - num_new[s] - window + 1) for s in range(3)],
    )
    q, starts = chunks(random, num_new, 4, 64, torch.float32)
    out = run_prefill(q, starts, batch, max_num_new=50, window=window)
    assert worst(out, exact(q, starts, batch, window=window)) <= TOLERANCE[torch.float32]


def test_contiguous_kv_gives_the_same_bits_and_reads_no_table():
    random = torch.Generator().manual_seed(3)
    batch = make_batch(
        random,
        [150, 33, 9],
        torch.float16,
        block_size=16,
        num_kv_heads=2,
        head_dim=80,
        is_contiguous=True,
    )
    q, starts = chunks(random, [40, 33, 1], 4, 80, torch.float16)
    paged = run_prefill(q, starts, batch, max_num_new=40)
    batch.block_tables[:, 1:] = -1
    out = run_prefill(q, starts, batch, max_num_new=40, prefill=contiguous_prefill_attention)
    assert torch.equal(out, paged)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_kv_is_scaled_back(dtype):
    random = torch.Generator().manual_seed(4)
    batch = make_batch(random, [70, 9], dtype, block_size=8, num_kv_heads=1, head_dim=64)
    batch = batch._replace(kv=batch.kv.float().to(FP8))
    q, starts = chunks(random, [30, 9], 2, 64, dtype)
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    out = run_prefill(q, starts, batch, max_num_new=30, **scales)
    assert worst(out, exact(q, starts, batch, **scales)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [0, 7])
def test_the_reference_is_dense_attention(window):
    random = torch.Generator().manual_seed(5)
    batch = make_batch(random, [20, 9], torch.float32, block_size=3, num_kv_heads=2, head_dim=64)
    q, starts = chunks(random, [8, 9], 4, 64, torch.float64)
    got = exact(q, starts, batch, window=window)
    for seq, (k, v) in enumerate(batch.dense):
        rows = slice(*starts[seq : seq + 2].tolist())
        k, v = (x.double().movedim(0, 1).repeat_interleave(2, 0) for x in (k, v))
        num_new, length = rows.stop - rows.start, k.shape[1]
        seen = torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new)
        if window:
            seen &= ~torch.ones_like(seen).tril(length - num_new - window)
        dense = torch.nn.functional.scaled_dot_product_attention(
            q[rows].movedim(0, 1), k, v, attn_mask=seen.to(DEVICE)
        )
        assert torch.allclose(got[rows], dense.movedim(0, 1))


def test_a_prompt_in_chunks_is_the_prompt_at_once():
    random = torch.Generator().manual_seed(6)
    batch = make_batch(random, [61], torch.float32, block_size=16, num_kv_heads=1, head_dim=64)
    q = normal(random, 61 + PADDING, 2, 64, dtype=torch.float32)
    at_once = run_prefill(
        q, torch.tensor([0, 61], dtype=torch.int32, device=DEVICE), batch, max_num_new=61
    )
    for begin, end in ((0, 16), (16, 45), (45, 61)):
        so_far = batch._replace(context_lens=torch.full_like(batch.context_lens, end))
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        out = run_prefill(q[begin : end + PADDING], starts, so_far, max_num_new=end - begin)
        assert torch.allclose(out, at_once[begin:end], atol=1e-6)


@pytest.mark.parametrize("prefill", [prefill_attention, contiguous_prefill_attention])
def test_the_cpu_path_computes_the_same(prefill, plain_torch):
    random = torch.Generator().manual_seed(7)
    batch = make_batch(
        random,
        [20, 0, 9],
        torch.float32,
        block_size=4,
        num_kv_heads=2,
        head_dim=64,
        is_contiguous=True,
    )
    batch = batch._replace(
        kv=batch.kv.cpu(),
        block_tables=batch.block_tables.cpu(),
        context_lens=batch.context_lens.cpu(),
    )
    q, starts = (x.cpu() for x in chunks(random, [6, 0, 9], 4, 64, torch.float32))
    kv, tables, lengths, _ = batch
    out = prefill(q, kv, starts, tables, lengths, 0.125, max_num_new=9)
    assert worst(out[:-PADDING], exact(q, starts, batch)) <= TOLERANCE[torch.float32]
    assert (out[-PADDING:] == 0).all()


def test_other_shapes_and_dtypes_are_refused():
    kv = torch.zeros(2, 3, 16, 2, 64, device=DEVICE)
    q = torch.zeros(5, 4, 64, device=DEVICE)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((2,), 9, dtype=torch.int32, device=DEVICE)
    for bad in (
        (q[:, :3], kv, starts, tables, lengths),
        (q.half(), kv, starts, tables, lengths),
        (q, kv, starts.long(), tables, lengths),
        (q, kv, starts[:2], tables, lengths),
        (q, kv, starts, tables.long(), lengths),
        (q, kv, starts, tables, lengths[:1]),
    ):
        with pytest.raises(ValueError):
            prefill_attention(*bad, 1.0, max_num_new=3)
