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


@pytest.mark.slow
def test_a_cover_compiles_for_every_target_without_spills_and_fits(tmp_path):
    """In a process where nothing is interpreted; one test, so that no two workers compile it."""
    path, shared_kib = tmp_path / "aot.csv", {80: 163, 90: 227, 100: 227}
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "gpu_backend.aot", path, "--cover"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    table = list(csv.DictReader(path.read_text().splitlines()))
    for row in table:
        assert int(row["stack_bytes"]) == 0, row
        assert int(row["registers"]) <= 255, row
        assert int(row["shared_bytes"]) <= 1024 * shared_kib[int(row["target"])], row
    assert done.returncode == 0, done.stderr
    compiled = {(row["kernel"], int(row["target"])) for row in table}
    names = {"store", "move", "decode", "combine", "prefill"}
    assert compiled == {(f"{name}_kernel", target) for name in names for target in shared_kib}

    header, *lines = done.stdout.splitlines()
    assert " ".join(header.split()) == "kernel target variants registers stack B shared KiB"
    assert len(lines) == len(compiled)
    for line in lines:
        kernel, target, variants, registers, _, limit, stack, shared, _, most = line.split()
        rows = [row for row in table if (row["kernel"], f"sm_{row['target']}") == (kernel, target)]
        assert int(variants) == len(rows)
        assert int(registers) == max(int(row["registers"]) for row in rows)
        largest = max(int(row["shared_bytes"]) for row in rows) / 1024
        assert float(shared) == pytest.approx(largest, abs=0.05)
        assert (limit, stack) == ("255", "0") and int(most) == shared_kib[int(target[3:])]


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
    assert len(cover) <= 70


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    for path, reason in ((tmp_path / "no/x.csv", "No such file"), (tmp_path, "Is a directory")):
        command = [sys.executable, "-m", "gpu_backend.aot", path, "--cover"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {path}: cannot be written: {reason}")
        assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
