"""Paged attention against the sum written down, and moves against one after the other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend.attention import attention, copy_blocks, segment, write_kv


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_ragged_rows_attend_to_their_own_blocks(num_heads, num_kv_heads):
    generator = torch.Generator().manual_seed(1)
    block_size, size, num_blocks = 4, 8, 40
    kv = torch.full((2, num_blocks, block_size, num_kv_heads, size), torch.nan)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    segments, texts, row = [], [], 0
    for context, num_new in ((1, 1), (9, 1), (16, 1), (7, 7), (13, 5), (8, 4)):
        blocks = torch.tensor([free.pop() for _ in range(-(-context // block_size))])
        keys, values = torch.randn(2, context, num_kv_heads, size, generator=generator)
        places = torch.arange(context)
        slots = blocks[places // block_size] * block_size + places % block_size
        write_kv(kv, slots, keys, values)
        segments.append(segment(row, num_new, context, blocks, kv.device))
        texts.append((row, num_new, context, keys, values))
        row += num_new
    q = torch.randn(row + 2, num_heads, size, generator=generator)  # two rows of padding
    out = attention(q, kv, segments, 0.3)
    assert not out[row:].any()
    group = num_heads // num_kv_heads
    for first, num_new, context, keys, values in texts:
        for place in range(num_new):
            seen = context - num_new + place + 1
            for head in range(num_heads):
                scores = keys[:seen, head // group] @ q[first + place, head] * 0.3
                wanted = scores.softmax(0) @ values[:seen, head // group]
                torch.testing.assert_close(out[first + place, head], wanted, atol=1e-6, rtol=1e-5)


def test_a_contiguous_region_is_read_where_it_lies_with_the_same_answer():
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(2, 20, 4, 2, 8, generator=generator)
    q = torch.randn(6, 4, 8, generator=generator)
    listed, lying = (
        [segment(0, 1, 18, one, kv.device), segment(1, 5, 14, two, kv.device)]
        for one, two in ((torch.arange(3, 8), torch.arange(9, 13)), (slice(3, 8), slice(9, 13)))
    )
    with Calls() as paged:
        wanted = attention(q, kv, listed, 0.3)
    with Calls() as contiguous:
        found = attention(q, kv, lying, 0.3)
    assert torch.equal(found, wanted)
    gathers = {"index_select", "index", "gather", "take"}
    assert paged.names & gathers and not contiguous.names & gathers


class Calls(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_rows_of_padding_are_not_written():
    kv = torch.zeros(2, 2, 2, 1, 1)
    write_kv(kv, torch.tensor([3]), torch.ones(3, 1, 1), torch.ones(3, 1, 1))
    assert kv.flatten(1)[0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_moves_are_made_as_if_one_after_the_other(seed):
    """Chains, swaps of places, targets written twice."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(2, 2, 6, 1, 1, 1, generator=generator)
    wanted = pool.clone()
    pairs = torch.randint(0, 6, (8, 2), generator=generator).tolist()
    for source, target in pairs:
        wanted[:, :, target] = wanted[:, :, source]
    copy_blocks(pool, pool, [tuple(pair) for pair in pairs])
    assert torch.equal(pool, wanted)
