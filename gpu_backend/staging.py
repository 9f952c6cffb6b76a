"""What the host tells the device in a step: one buffer, one copy."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for a pointer that is not a multiple
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


class Field(NamedTuple):
    """An array in the buffer; its dtype is a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]


class Fields(NamedTuple):
    """Arrays one behind the other: where the host writes them, and where the device reads them."""

    host: list[np.ndarray]
    device: list[Tensor]
    end: int  # in bytes


class Staging:
    """A buffer of the device and its twin on the host, pinned where the device is a GPU. Fields of
    the same dtypes and shapes, laid from the same byte on, always lie at the same addresses."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.num_bytes = num_bytes
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def lay(self, fields: list[Field], start: int = 0) -> Fields:
        """Room for fields from byte `start` on, a multiple of ALIGNMENT. They must fit."""
        host, device, end = [], [], start
        for dtype, shape in fields:
            part = slice(end, end + prod(shape) * DTYPES[dtype].itemsize)
            host.append(self._host[part].view(DTYPES[dtype]).view(shape).numpy())
            device.append(self._device[part].view(DTYPES[dtype]).view(shape))
            end = _aligned(part.stop)
        assert end <= self.num_bytes, "what a step sends fits its buffer"
        return Fields(host, device, end)

    def send(self, end: int) -> None:
        """Copy all up to byte `end`. The host must not write again before the device has read."""
        self._device[:end].copy_(self._host[:end], non_blocking=True)


def size_of(fields: list[Field]) -> int:
    """Bytes that fields take, from a multiple of ALIGNMENT to the next."""
    return sum(_aligned(prod(shape) * DTYPES[dtype].itemsize) for dtype, shape in fields)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
