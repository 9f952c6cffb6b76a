"""Importing this makes the kernels of this process run in Triton's interpreter, unless a GPU is
there. Triton decides once, when a kernel is defined, so it comes before any other import of them;
what this process starts decides for itself."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

if find_spec("torch") and find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        assert "gpu_backend.kernels" not in sys.modules, "the kernels are defined already"
        os.environ["TRITON_INTERPRET"] = "1"
        import triton

        import gpu_backend.kernels  # noqa: F401

        triton.knobs.runtime.interpret = True  # for the rest of this process, and for it alone
        del os.environ["TRITON_INTERPRET"]
