"""Tensors in safetensors files: where each lies, checked against the files before any is read."""

from __future__ import annotations

import json
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
            if not path.is_file():
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
    except ValueError:
        value = None
    places = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise UserError(f"{index}: not an index of safetensors files")
    return places


def _in_file(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        num_header = int.from_bytes(file.read(8), "little")
        if size < 8 or num_header > min(LONGEST_HEADER, size - 8):
            raise UserError(f"{path}: truncated, or not a safetensors file")
        try:
            header = json.loads(file.read(num_header))
            header.pop("__metadata__", None)
            found = {
                name: Stored(
                    path,
                    one["dtype"],
                    tuple(one["shape"]),
                    8 + num_header + one["data_offsets"][0],
                    one["data_offsets"][1] - one["data_offsets"][0],
                )
                for name, one in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: not a safetensors file") from None
    for name, one in found.items():
        if one.start + one.num_bytes > size:
            missing = one.start + one.num_bytes - size
            raise UserError(f"{path}: truncated: tensor {name} ends {missing:,} bytes behind it")
        if one.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UserError(f"{path}: tensor {name} is {one.dtype}, not one of {known}")
        wanted = DTYPES[one.dtype].itemsize
        for length in one.shape:
            wanted *= length
        if wanted != one.num_bytes:
            raise UserError(f"{path}: tensor {name} has {one.num_bytes:,} bytes, not {wanted:,}")
    return found
