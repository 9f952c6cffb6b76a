from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

KERNELS = {f"_{name}_kernel" for name in ("store", "move", "decode", "combine", "prefill")}


@pytest.fixture(scope="module")
def found():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.compiled_kernels"]
    out = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)


def test_the_warm_up_compiles_all_that_any_step_needs(found):
    assert found["paged"]["at first"].keys() == KERNELS and not found["paged"]["later"]
    others = found["contiguous"]  # the other three kernels are there already
    assert others["at first"].keys() == {"_decode_kernel", "_prefill_kernel"}
    assert not others["later"]


def test_a_step_is_one_copy_to_the_device(found):
    """Moves and what sampling needs included; a captured graph could hold no other."""
    assert [one["crossed"] for one in found.values()] == [{"1": 200}, {"1": 200}]
