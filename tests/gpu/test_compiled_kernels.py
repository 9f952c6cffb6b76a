from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

KERNELS = {f"_{name}_kernel" for name in ("store", "move", "decode", "combine", "prefill")}


def test_the_warm_up_compiles_all_that_any_step_needs():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.compiled_kernels"]
    out = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(out)
    at_first, later = found["paged"]
    assert at_first.keys() == KERNELS and not later
    at_first, later = found["contiguous"]  # the other three are there already
    assert at_first.keys() == {"_decode_kernel", "_prefill_kernel"} and not later
