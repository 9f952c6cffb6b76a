from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.kernels import (
    contiguous_decode_attention,
    decode_attention,
    decode_scratch,
)
from gpu_backend.kernels.decode_attention import decode_attention_reference
from gpu_backend.kernels.layout import DTYPES, FP8, HEAD_DIMS
from tests.gpu.batches import (
    DEVICE,
    NAN,
    TOLERANCE,
    draw,
    make_batch,
    normal,
    worst,
)


def run_decode(q, batch, *, num_splits=1, decode=decode_attention, **options):
    """decode into NaN, over scratch full of NaN for more sequences than there are."""
    num_seqs, num_heads, head_dim = q.shape
    scratch = None
    if num_splits > 1:
        scratch = decode_scratch(num_seqs + 1, num_heads, head_dim, num_splits, DEVICE)
        for room in scratch:
            room.fill_(NAN)
    out = torch.full((num_seqs, num_heads, head_dim), NAN, dtype=q.dtype, device=DEVICE)
    kv, tables, lengths, _ = batch
    got = decode(q, kv, tables, lengths, head_dim**-0.5, scratch=scratch, out=out, **options)
    assert got is out
    return out


def exact(q, batch, **options):
    return decode_attention_reference(
        q.double(), batch.kv, batch.block_tables, batch.context_lens, q.shape[2] ** -0.5, **options
    )


def queries(random, num_seqs, num_heads, head_dim, dtype):
    """q as a fused projection leaves it: a view, rows apart."""
    return normal(random, num_seqs, num_heads + 2, head_dim, dtype=dtype)[:, :num_heads]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_agrees_with_float64(num_splits, dtype, head_dim, record_property):
    random = torch.Generator().manual_seed(head_dim + num_splits)
    num_kv_heads, share = draw(random, 1, 2), draw(random, 1, 8)
    lengths = [draw(random, 1, 300), 0, 1, draw(random, 1, 64)]
    batch = make_batch(
        random,
        lengths,
        dtype,
        block_size=[1, 8, 16, 32, 128, 24][draw(random, 0, 5)],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    q = queries(random, len(lengths), num_kv_heads * share, head_dim, dtype)
    out = run_decode(q, batch, num_splits=num_splits)
    record_property("error", worst(out, exact(q, batch)))
    assert worst(out, exact(q, batch)) <= TOLERANCE[dtype]
    assert (out[1] == 0).all()


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_any_block_size_will_do(block_size):
    random = torch.Generator().manual_seed(block_size)
    batch = make_batch(
        random, [130, 127], torch.float16, block_size=block_size, num_kv_heads=1, head_dim=64
    )
    q = queries(random, 2, 4, 64, torch.float16)
    assert worst(run_decode(q, batch), exact(q, batch)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("share, dtype", [(20, torch.float32), (71, torch.float16)])
def test_heads_beyond_one_tile_share_a_kv_head(share, dtype):
    random = torch.Generator().manual_seed(share)
    batch = make_batch(random, [40], dtype, block_size=16, num_kv_heads=2, head_dim=64)
    q = queries(random, 1, 2 * share, 64, dtype)
    assert worst(run_decode(q, batch), exact(q, batch)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window, num_splits", [(1, 1), (16, 1), (100, 1), (1, 4), (100, 8)])
def test_a_window_sees_its_last_tokens_and_needs_no_other_block(window, num_splits):
    random = torch.Generator().manual_seed(window)
    lengths = [200, 99, 3, 0]
    batch = make_batch(
        random,
        lengths,
        torch.float32,
        block_size=16,
        num_kv_heads=1,
        head_dim=64,
        num_gone=[max(0, length - window) for length in lengths],
    )
    q = queries(random, len(lengths), 3, 64, torch.float32)
    out = run_decode(q, batch, num_splits=num_splits, window=window)
    assert worst(out, exact(q, batch, window=window)) <= TOLERANCE[torch.float32]
    if window == 1:
        assert torch.allclose(out[0], batch.dense[0][1, -1].expand(3, 64), rtol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_contiguous_kv_gives_the_same_bits_and_reads_no_table(num_splits):
    random = torch.Generator().manual_seed(3)
    batch = make_batch(
        random,
        [150, 33, 0],
        torch.float16,
        block_size=16,
        num_kv_heads=2,
        head_dim=80,
        is_contiguous=True,
    )
    q = queries(random, 3, 4, 80, torch.float16)
    paged = run_decode(q, batch, num_splits=num_splits)
    batch.block_tables[:, 1:] = -1
    batch.block_tables[2] = 0
    out = run_decode(q, batch, num_splits=num_splits, decode=contiguous_decode_attention)
    assert torch.equal(out, paged)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_kv_is_scaled_back(dtype):
    random = torch.Generator().manual_seed(4)
    batch = make_batch(random, [70, 9], dtype, block_size=8, num_kv_heads=1, head_dim=64)
    batch = batch._replace(kv=batch.kv.float().to(FP8))
    q = queries(random, 2, 2, 64, dtype)
    out = run_decode(q, batch, num_splits=2, k_scale=0.5, v_scale=2.0)
    assert worst(out, exact(q, batch, k_scale=0.5, v_scale=2.0)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [0, 7])
def test_the_reference_is_dense_attention(window):
    random = torch.Generator().manual_seed(5)
    batch = make_batch(random, [20, 1], torch.float32, block_size=3, num_kv_heads=2, head_dim=64)
    q = normal(random, 2, 4, 64, dtype=torch.float64)
    for seq, (k, v) in enumerate(batch.dense):
        seen = slice(max(0, len(k) - window) if window else 0, None)
        k, v = (x[seen].double().movedim(0, 1).repeat_interleave(2, 0) for x in (k, v))
        dense = torch.nn.functional.scaled_dot_product_attention(q[seq][:, None], k, v)[:, 0]
        assert torch.allclose(exact(q, batch, window=window)[seq], dense)


@pytest.mark.parametrize("decode", [decode_attention, contiguous_decode_attention])
def test_the_cpu_path_computes_the_same(decode, plain_torch):
    random = torch.Generator().manual_seed(6)
    batch = make_batch(
        random,
        [20, 0, 9],
        torch.float32,
        block_size=4,
        num_kv_heads=2,
        head_dim=64,
        is_contiguous=True,
    )
    cpu = batch._replace(
        kv=batch.kv.cpu(),
        block_tables=batch.block_tables.cpu(),
        context_lens=batch.context_lens.cpu(),
    )
    q = normal(random, 3, 4, 64, dtype=torch.float32).cpu()
    out = decode(q, cpu.kv, cpu.block_tables, cpu.context_lens, 0.125)
    assert worst(out, exact(q, cpu)) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_a_captured_graph_stays_right_as_contexts_grow():
    random = torch.Generator().manual_seed(8)
    batch = make_batch(random, [300, 90], torch.float16, block_size=16, num_kv_heads=2, head_dim=64)
    q = queries(random, 2, 8, 64, torch.float16)
    out = torch.empty(2, 8, 64, dtype=torch.float16, device=DEVICE)
    scratch = decode_scratch(2, 8, 64, 4, DEVICE)
    kv, tables, lengths, _ = batch

    def step():
        decode_attention(q, kv, tables, lengths, 64**-0.5, scratch=scratch, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([300, 90], [17, 1], [150, 0]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        assert worst(out, exact(q, batch)) <= TOLERANCE[torch.float16]


def test_other_shapes_and_dtypes_are_refused():
    kv = torch.zeros(2, 3, 16, 2, 64, device=DEVICE)
    q = torch.zeros(2, 4, 64, device=DEVICE)
    tables = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    lengths = torch.ones(2, dtype=torch.int32, device=DEVICE)
    few = decode_scratch(1, 4, 64, 2, DEVICE)
    for bad, scratch in (
        ((q[:, :3], kv, tables, lengths), None),
        ((q[:, :, :32], kv, tables, lengths), None),
        ((q.half(), kv, tables, lengths), None),
        ((q, kv, tables[:1], lengths), None),
        ((q, kv, tables.long(), lengths), None),
        ((q, kv, tables[:, :5].contiguous(), lengths), None),
        ((q, kv, tables, lengths.long()), None),
        ((q, kv, tables, lengths), few),
        ((q, kv, tables, lengths), decode_scratch(2, 4, 64, 3, DEVICE)),
    ):
        with pytest.raises(ValueError):
            decode_attention(*bad, 1.0, scratch=scratch)
