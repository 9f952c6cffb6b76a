from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu_backend import aot

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # a block, CUDA C guide
MAX_REGISTERS = 255  # a thread


@pytest.fixture(scope="module")
def table():
    """What a pairwise cover of cases compiles to, in a process where nothing is interpreted."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "gpu_backend.aot", "--cover"]
    out = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    return list(csv.DictReader(out.splitlines()))


@pytest.mark.slow
def test_every_kernel_is_compiled_for_every_target(table):
    names = {"store", "move", "decode", "combine", "prefill"}
    compiled = {(row["kernel"], int(row["target"])) for row in table}
    assert compiled == {(f"{name}_kernel", target) for name in names for target in aot.TARGETS}


@pytest.mark.slow
def test_no_kernel_spills_and_each_fits_its_target(table):
    for row in table:
        assert int(row["stack_bytes"]) == 0, row
        assert int(row["registers"]) <= MAX_REGISTERS, row
        assert int(row["shared_bytes"]) <= MAX_SHARED_BYTES[int(row["target"])], row


def test_the_cover_has_every_pair_that_can_be():
    cover = aot.cover()
    met = set().union(*map(aot.pairs, cover))
    every = set().union(*map(aot.pairs, filter(aot.can_be, aot.product())))
    assert met == every and all(map(aot.can_be, cover))
    assert len(cover) <= 45
