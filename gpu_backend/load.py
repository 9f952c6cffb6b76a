"""From what a user names to a decoder and its KV pool, everything checked before it is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_backend.model import Decoder
from gpu_backend.shape import SMALL, Shape, read_shape
from gpu_backend.weights import Weights, checked, drawn, loaded, num_parameters
from kvsim.errors import UserError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
MIB, GIB = 1 << 20, 1 << 30


class Pools(NamedTuple):
    """Blocks to make room for beside the weights, on the device and on the host."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0

    def kv_size(self, shape: Shape, num_blocks: int) -> tuple[int, ...]:
        """[L, 2, N, B, G, D]"""
        heads = (shape.num_kv_heads, shape.head_size)
        return (shape.num_layers, 2, num_blocks, self.block_size, *heads)


def load_decoder(
    model: str,
    *,
    dtype: str,
    device: str,
    seed: int = 0,
    max_model_len: int = 0,
    pools: Pools | None = None,
    check: Callable[[Shape, torch.dtype, torch.device], None] | None = None,
) -> Decoder:
    """The decoder that `model` names: `small`; a folder with config.json and safetensors; or a
    config.json, whose weights are then drawn. Raises UserError, before anything is allocated, for
    what is wrong with it, for sequences of max_model_len tokens that it has no positions for, where
    weights and `pools` need more memory than is there, and for what `check` refuses."""
    place, kind = device_of(device), dtype_of(dtype, device)
    path = Path(model)
    if model == "small":
        shape, stored = SMALL, None
    elif os.path.isdir(model):
        shape = read_shape(path / "config.json")
        stored = checked(shape, path)
    elif os.path.isfile(model):
        shape, stored = read_shape(path), None
    else:
        raise UserError(f"model {model!r}: neither `small` nor a folder nor a config.json")
    if max_model_len > shape.num_positions:
        raise UserError(
            f"engine.max_model_len: {max_model_len:,} is more than the {shape.num_positions:,} "
            f"positions of model {model}"
        )
    if check is not None:
        check(shape, kind, place)
    _check_memory(shape, kind, place, pools or Pools(0, 1))
    weights: Weights
    if stored is None:
        weights = drawn(shape, seed, kind, place)
    else:
        weights = loaded(shape, stored, kind, place)
    return Decoder(shape, weights)


def device_of(name: str) -> torch.device:
    """The device of this name. Raises UserError where it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is not one of cpu, cuda, cuda:N") from None
    if name == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(f"device {name!r} is not one of cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UserError(f"device {name!r} is not there: torch sees {count} GPUs")
    return device


def dtype_of(name: str, device: str) -> torch.dtype:
    """The dtype of this name. Raises UserError where the device lacks it."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if name == "bfloat16" and device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        if major < 8:
            raise UserError(
                f"dtype bfloat16 is not on device {device!r} (compute capability "
                f"{major}.{minor}, it takes 8.0): use float16 or float32"
            )
    return DTYPES[name]


def make_pool(decoder: Decoder, pools: Pools) -> tuple[Tensor, Tensor]:
    """KV of the pool on the device and of the swap space on the host, zeroed."""
    shape, is_cuda = decoder.shape, decoder.device.type == "cuda"
    size, host = (pools.kv_size(shape, n) for n in (pools.num_blocks, pools.num_host_blocks))
    kv = torch.zeros(size, dtype=decoder.dtype, device=decoder.device)
    return kv, torch.zeros(host, dtype=decoder.dtype, pin_memory=is_cuda)


def _check_memory(shape: Shape, dtype: torch.dtype, device: torch.device, pools: Pools) -> None:
    block = shape.kv_elements() * pools.block_size * dtype.itemsize
    weights, host = num_parameters(shape) * dtype.itemsize, pools.num_host_blocks * block
    free, host_room = free_bytes(device), free_bytes(torch.device("cpu"))
    room = free - weights
    if room < block * min(pools.num_blocks, 1):
        raise UserError(
            f"model: {_size(weights)} of weights leave no room for one block of KV "
            f"({_size(block)}): {_size(free)} are free on {device}"
        )
    if device.type == "cpu":
        host_room = room
        room -= host
    if host > host_room:
        raise UserError(
            f"kv.num_host_blocks: {pools.num_host_blocks:,} blocks take {_size(host)}, and the "
            f"host has room for {host_room // block:,}"
        )
    if room < pools.num_blocks * block:
        raise UserError(
            f"kv.num_blocks: {pools.num_blocks:,} blocks take {_size(pools.num_blocks * block)}, "
            f"and {device} has room for {room // block:,} beside {_size(weights)} of weights"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(num_bytes: int) -> str:
    if num_bytes < GIB:
        return f"{num_bytes / MIB:,.2f} MiB"
    return f"{num_bytes // GIB:,} GiB" if num_bytes > 100 * GIB else f"{num_bytes / GIB:,.2f} GiB"
