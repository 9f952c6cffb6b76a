"""One thread, as the executor runs on a CPU: two would wait for each other on a busy machine."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
