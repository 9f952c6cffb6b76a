from __future__ import annotations

import csv
import itertools
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu_backend import aot


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What a pairwise cover of cases compiles to, in a process where nothing is interpreted."""
    path = tmp_path_factory.mktemp("aot") / "aot.csv"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "gpu_backend.aot", path, "--cover"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    return done, list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.slow
def test_every_kernel_is_compiled_for_every_target(done):
    names = {"store", "move", "decode", "combine", "prefill"}
    compiled = {(row["kernel"], int(row["target"])) for row in done[1]}
    assert compiled == {(f"{name}_kernel", target) for name in names for target in aot.TARGETS}


@pytest.mark.slow
def test_no_kernel_spills_and_each_fits_its_target(done):
    shared_kib = {80: 163, 90: 227, 100: 227}
    for row in done[1]:
        assert int(row["stack_bytes"]) == 0, row
        assert int(row["registers"]) <= 255, row
        assert int(row["shared_bytes"]) <= 1024 * shared_kib[int(row["target"])], row
    assert done[0].returncode == 0, done[0].stderr


@pytest.mark.slow
def test_the_table_printed_is_the_most_of_each_kernel(done):
    header, *lines = done[0].stdout.splitlines()
    assert header.split() == ["kernel", "target", "variants", "registers", "stack", "B", "shared",
                              "KiB"]  # fmt: skip
    assert len(lines) == 5 * len(aot.TARGETS)
    for line in lines:
        kernel, target, variants, registers, _, limit, stack, shared, _, most = line.split()
        rows = [
            row for row in done[1] if (row["kernel"], f"sm_{row['target']}") == (kernel, target)
        ]
        assert int(variants) == len(rows)
        assert int(registers) == max(int(row["registers"]) for row in rows)
        assert float(shared) == pytest.approx(
            max(int(row["shared_bytes"]) for row in rows) / 1024, abs=0.05
        )
        assert (limit, stack) == ("255", "0") and most in ("163", "227")


def test_a_variant_that_spills_or_does_not_fit_is_told():
    fits = aot.Resources("decode_kernel", 80, "bf16", 128, 16, 4, "split", 255, 0, 163 * 1024)
    assert aot.is_within_limits(fits)
    assert not aot.is_within_limits(fits._replace(stack_bytes=8))
    assert not aot.is_within_limits(fits._replace(shared_bytes=163 * 1024 + 1))
    assert aot.is_within_limits(fits._replace(target=90, shared_bytes=227 * 1024))


def test_the_cover_has_every_pair_that_can_be_and_every_tile():
    cover = aot.cover()
    assert all(map(aot.can_be, cover))
    possible = list(filter(aot.can_be, aot.product()))
    for i, j in itertools.combinations(range(len(aot.Case._fields)), 2):
        assert {(c[i], c[j]) for c in cover} == {(c[i], c[j]) for c in possible}
    assert {c[:3] for c in cover} == {c[:3] for c in possible}
    assert len(cover) <= 80
