"""Tensors in safetensors files: where each lies, checked against the files before any is read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvsim.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
LONGEST_HEADER = 100_000_000


class Stored(NamedTuple):
    """A tensor in a file: `num_bytes` from byte `start` on."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def read(self) -> Tensor:
        dtype = DTYPES[self.dtype]
        count = self.num_bytes // dtype.itemsize
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        buffer = bytearray(self.num_bytes)  # tensors start at any byte: no mapping of the file
        with self.path.open("rb") as file:
            file.seek(self.start)
            file.readinto(buffer)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder, one file or an index of several. Raises UserError."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        places = _places(index)
        found: dict[str, Stored] = {}
        for name in sorted(set(places.values())):
            path = folder / name
            if not os.path.isfile(path):
                raise UserError(f"{path}: missing, and {index.name} names it")
            found |= _in_file(path)
        if absent := sorted(places.keys() - found.keys()):
            raise UserError(f"{index}: tensor {absent[0]} is in none of its files")
        return found
    if single.is_file():
        return _in_file(single)
    raise UserError(f"{folder}: neither {single.name} nor {index.name} is there")


def _places(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        value = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{index}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        value = None
    places = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(places, dict) or not all(map(_is_name, places.values())):
        raise UserError(f"{index}: not an index of safetensors files")
    return places


def _is_name(value: object) -> bool:
    """Whether it names a file beside the index."""
    return isinstance(value, str) and Path(value).name == value


def _in_file(path: Path) -> dict[str, Stored]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            num_header = int.from_bytes(file.read(8), "little")
            if size < 8 or num_header > min(LONGEST_HEADER, size - 8):
                raise UserError(f"{path}: truncated, or not a safetensors file")
            header = json.loads(file.read(num_header))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file")
    header.pop("__metadata__", None)
    found = {name: _stored(path, name, one, 8 + num_header) for name, one in header.items()}
    end = 8 + num_header
    for name, one in sorted(found.items(), key=lambda item: item[1].start):
        if one.start != end:
            raise UserError(f"{path}: tensor {name} does not begin where the one before it ends")
        end += one.num_bytes
        if end > size:
            raise UserError(f"{path}: truncated: tensor {name} lacks its last {end - size:,} bytes")
    if end < size:
        raise UserError(f"{path}: {size - end:,} bytes behind its last tensor")
    return found


def _stored(path: Path, name: str, one: object, data_start: int) -> Stored:
    """The header's entry of a tensor. Raises UserError unless it can be one."""
    dtype, shape, offsets = (
        one.get(key) if isinstance(one, dict) else None
        for key in ("dtype", "shape", "data_offsets")
    )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise UserError(f"{path}: not a safetensors file: tensor {name} has no shape or place")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{path}: tensor {name} is {dtype}, not one of {', '.join(DTYPES)}")
    num_bytes, wanted = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
    if wanted != num_bytes:
        raise UserError(f"{path}: tensor {name} has {num_bytes:,} bytes, not {wanted:,}")
    return Stored(path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
