"""Compiles the kernels for GPUs that are not there, as the wrappers launch them, and reads back
what each needs: registers a thread, stack (which is where registers spill), shared memory.

    python -m gpu_backend.aot FILE            # every target, dtype, head size and block size: CSV
    python -m gpu_backend.aot FILE --cover    # a pairwise cover of them

and prints the worst of each kernel beside the target's limits. Exits 1 if any spills or is too big.

The wrappers run on tensors without memory, under a driver that launches nothing: one that read a
value on the host would fail here.
"""

from __future__ import annotations

import argparse
import csv
import errno
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gpu_backend.kernels import (
    contiguous_decode_attention,
    contiguous_prefill_attention,
    decode_attention,
    decode_scratch,
    move_blocks,
    prefill_attention,
    store_kv,
)
from gpu_backend.kernels.layout import FP8, HEAD_DIMS

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NUM_SEQS, NUM_TOKENS, NUM_KV_HEADS, NUM_SLOTS, TABLE_WIDTH = 64, 4096, 8, 2**21, 4096
NUM_SPLITS, WINDOW = 8, 1024

TARGETS = (80, 90, 100)
MAX_REGISTERS = 255  # a thread
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""A block; both: CUDA C++ Programming Guide, technical specifications per compute capability."""
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16, fp8 KV": (torch.float16, FP8),
    "bf16, fp8 KV": (torch.bfloat16, FP8),
}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SHARES = (1, 4, 7, 64)  # query heads a KV head
READS = ("split", "whole", "window", "contiguous")


class Case(NamedTuple):
    """What the wrappers are launched with."""

    target: int  # compute capability, 90 for 9.0
    dtype: str  # a key of DTYPES
    head_dim: int
    block_size: int
    share: int
    read: str  # how decode reads its KV; "window" and "contiguous" are also prefill's


class Resources(NamedTuple):
    """What one compiled kernel needs; its case is the first that launched it."""

    kernel: str
    target: int
    dtype: str
    head_dim: int
    block_size: int
    share: int
    read: str
    registers: int
    stack_bytes: int
    shared_bytes: int


class NoDriver:
    """Stands where Triton's CUDA driver does: compiles for `target`, keeps what would be loaded."""

    def __init__(self) -> None:
        self.target = 0
        self.utils = self
        self.loaded: list[tuple[str, bytes, int]] = []  # name, cubin, shared bytes

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target  # a device a target: Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": sys.maxsize}  # the reader of the table judges it

    def load_binary(
        self, name: str, cubin: bytes, shared_bytes: int, device: int
    ) -> tuple[None, None, int, int, int]:
        self.loaded.append((name, cubin, shared_bytes))
        return None, None, 0, 0, 1024  # module, function, registers, spills, threads

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        return lambda *args: None


def all_cases() -> Iterator[Case]:
    """Every target, dtype, head size and block size; shares and reads take turns."""
    turns = itertools.cycle(itertools.product(READS, SHARES))
    for target, dtype, head_dim, block_size in itertools.product(
        TARGETS, DTYPES, HEAD_DIMS, BLOCK_SIZES
    ):
        read, share = next(turns)
        case = Case(target, dtype, head_dim, block_size, share, read)
        if can_be(case):
            yield case


def product() -> Iterator[Case]:
    """Every target, dtype, head size, block size, share and read."""
    values = (TARGETS, DTYPES, HEAD_DIMS, BLOCK_SIZES, SHARES, READS)
    return itertools.starmap(Case, itertools.product(*values))


def cover() -> list[Case]:
    """Cases such that any two values of two fields that can meet do so in one of them, and any
    three of target, dtype and head size, by which tiles are chosen; greedy, so not quite the
    fewest."""
    meetings_of = {case: meetings(case) for case in product() if can_be(case)}
    to_meet = set().union(*meetings_of.values())
    cases = []
    while to_meet:
        cases.append(max(meetings_of, key=lambda case: len(meetings_of[case] & to_meet)))
        to_meet -= meetings_of[cases[-1]]
    return cases


def meetings(case: Case) -> set[tuple]:
    """Any two of case's fields, each with its value; and target, dtype and head size."""
    pairs = itertools.combinations(zip(case._fields, case, strict=True), 2)
    return {*pairs, (case.target, case.dtype, case.head_dim)}


def can_be(case: Case) -> bool:
    """Compute capability 8.0 has no e4m3."""
    return case.target >= 90 or DTYPES[case.dtype][1] != FP8


def launch(case: Case) -> None:
    """Launch every wrapper once."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype, kv_dtype = DTYPES[case.dtype]
    heads, dim = (NUM_KV_HEADS * case.share, NUM_KV_HEADS), case.head_dim
    num_blocks = NUM_SLOTS // case.block_size
    kv = empty(2, num_blocks, case.block_size, NUM_KV_HEADS, dim, dtype=kv_dtype)
    tables = empty(NUM_SEQS, TABLE_WIDTH, dtype=torch.int32)
    lengths = empty(NUM_SEQS, dtype=torch.int32)
    starts = empty(NUM_SEQS + 1, dtype=torch.int32)
    fused = empty(NUM_TOKENS, sum(heads) + NUM_KV_HEADS, dim, dtype=dtype)
    q, k, v = fused.split((*heads, NUM_KV_HEADS), 1)
    window = WINDOW if case.read == "window" else 0
    scratch = None
    if case.read != "whole":
        scratch = decode_scratch(NUM_SEQS, heads[0], dim, NUM_SPLITS, "meta")
    decode = contiguous_decode_attention if case.read == "contiguous" else decode_attention
    decode(q[:NUM_SEQS], kv, tables, lengths, 0.1, window=window, scratch=scratch)
    prefill = contiguous_prefill_attention if case.read == "contiguous" else prefill_attention
    prefill(q, kv, starts, tables, lengths, 0.1, max_num_new=NUM_TOKENS, window=window)
    store_kv(k, v, kv, empty(NUM_TOKENS, dtype=torch.int64))
    move_blocks(kv, kv, empty(8, 2, dtype=torch.int64))


def compile_cases(cases: Iterable[Case]) -> Iterator[Resources]:
    """What each kernel that the cases launch needs, as they are compiled."""
    driver.set_active(stand_in := NoDriver())
    for case in cases:
        stand_in.target = case.target
        launch(case)
        for name, cubin, shared_bytes in stand_in.loaded:
            yield Resources(name.strip("_"), *case, *_usage(cubin), shared_bytes)
        stand_in.loaded.clear()


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump says nothing of registers: {text}"
    return int(found[1]), int(found[2])


def is_within_limits(row: Resources) -> bool:
    """Whether it runs on its target without spilling a register."""
    fits = row.shared_bytes <= MAX_SHARED_BYTES[row.target] and row.registers <= MAX_REGISTERS
    return fits and row.stack_bytes == 0


def write_rows(path: Path, cases: Iterable[Case]) -> list[Resources]:
    """A row for each variant, in a file that has the name only when it is whole: until then it ends
    in .part, and grows row by row."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    part, rows = path.with_name(f"{path.name}.part"), []
    with part.open("w", newline="", encoding="utf-8") as file:
        try:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(Resources._fields)
            for row in compile_cases(cases):
                table.writerow(row)
                file.flush()
                rows.append(row)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return rows


def summary(rows: list[Resources]) -> Iterator[str]:
    """A line for each kernel and target: its variants, and the most that any of them needs."""
    head = f"{'kernel':<16}{'target':>7}{'variants':>10}"
    yield head + f"{'registers':>15}{'stack B':>9}{'shared KiB':>15}"
    for kernel in dict.fromkeys(row.kernel for row in rows):
        for target, limit in MAX_SHARED_BYTES.items():
            these = [row for row in rows if (row.kernel, row.target) == (kernel, target)]
            if not these:
                continue
            registers = max(row.registers for row in these)
            shared = max(row.shared_bytes for row in these) / 1024
            yield (
                f"{kernel:<16}{f'sm_{target}':>7}{len(these):>10,}"
                f"{f'{registers} of {MAX_REGISTERS}':>15}{max(row.stack_bytes for row in these):>9}"
                f"{f'{shared:.1f} of {limit >> 10}':>15}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where to write a row for each variant (CSV)")
    parser.add_argument("--cover", action="store_true", help="a pairwise cover only")
    arguments = parser.parse_args()
    try:
        rows = write_rows(arguments.file, cover() if arguments.cover else all_cases())
    except OSError as error:
        sys.exit(f"error: {arguments.file}: cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
    for line in summary(rows):
        print(line)
    if bad := [row for row in rows if not is_within_limits(row)]:
        print(f"{len(bad)} of {len(rows)} variants spill or do not fit:")
        for row in bad:
            print(f"  {row}")
        sys.exit(1)


if __name__ == "__main__":
    main()
