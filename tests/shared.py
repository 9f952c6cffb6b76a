"""Where the published data stand that tests compare with; it is not part of the repository."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("KVSIM_SHARED", Path(__file__).resolve().parents[2] / "shared"))

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"needs the published data, not found at {SHARED} (KVSIM_SHARED)"
)
