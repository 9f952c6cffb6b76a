"""One thread, as the executor runs on a CPU: two would wait for each other on a busy machine. The
model's kernels are plain torch there, also in a process that interprets them for tests/gpu."""

import sys

import pytest

from tests import kernels_interpreted  # noqa: F401


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    if layout := sys.modules.get("gpu_backend.kernels.layout"):
        monkeypatch.setattr(layout, "INTERPRETED", False)
