"""The kernels' tests run in Triton's interpreter, or compiled on a GPU where there is one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests import kernels_interpreted  # noqa: F401

if find_spec("torch"):
    import torch

    torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """Triton 3.6's interpreter cannot loop up to a loaded number under later NumPys."""
    if find_spec("torch") and not torch.cuda.is_available():
        import numpy

        if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
            pytest.skip(f"Triton's interpreter needs numpy<2.4, not {numpy.__version__}")


@pytest.fixture
def plain_torch(monkeypatch):
    """The wrappers as they are on a CPU outside the interpreter."""
    from gpu_backend.kernels import layout

    monkeypatch.setattr(layout, "INTERPRETED", False)
