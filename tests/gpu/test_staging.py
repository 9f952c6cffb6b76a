from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend.decode_bucket import bucket_sizes
from gpu_backend.staging import ALIGNMENT, Field, Staging, size_of
from tests.gpu.batches import DEVICE

FIELDS = [Field("int64", (3,)), Field("int32", (0,)), Field("int32", (5, 16)), Field("int32", (1,))]
BEHIND = [Field("float64", (2,)), Field("int64", (4, 2))]


def test_what_the_host_wrote_is_on_the_device_at_aligned_and_steady_addresses():
    staging = Staging(size_of(FIELDS) + size_of(BEHIND), torch.device(DEVICE))
    addresses = []
    for turn in range(2):
        front = staging.lay(FIELDS)
        behind = staging.lay(BEHIND, front.end)
        arrays = [*front.host, *behind.host]
        for number, array in enumerate(arrays):
            array[...] = 100 * turn + number + np.arange(array.size).reshape(array.shape) / 4
        staging.send(behind.end)
        tensors = [*front.device, *behind.device]
        for array, tensor in zip(arrays, tensors, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), array)
            assert tensor.data_ptr() % ALIGNMENT == 0
        addresses.append([tensor.data_ptr() for tensor in tensors])
    assert addresses[0] == addresses[1]


def test_fields_that_do_not_fit_are_not_laid():
    staging = Staging(size_of(FIELDS) - 1, torch.device(DEVICE))
    with pytest.raises(AssertionError):
        staging.lay(FIELDS)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 8, 100, 256, 300, 512, 100_000])
def test_every_batch_has_a_bucket_that_wastes_little(max_num_seqs):
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(max_num_seqs, 512)
    for num_seqs in range(1, sizes[-1] + 1):
        size = min(one for one in sizes if one >= num_seqs)
        assert size - num_seqs <= max(num_seqs / 16, 7)
