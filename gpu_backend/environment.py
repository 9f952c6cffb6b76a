"""What a measurement was made on: hardware, versions, the clock."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import kvsim


def environment(device: torch.device) -> dict[str, object]:
    """By name, in the order to print it; None where the machine does not say."""
    is_cuda = device.type == "cuda"
    found: dict[str, object] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "clock": "wall clock, submit to tokens on the host"
        if is_cuda
        else "CPU time of one thread",
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvsim": kvsim.__version__,
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "triton": _version_of("triton"),
    }
    if is_cuda:
        found["cuda"] = torch.version.cuda
    return found


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    """As Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
