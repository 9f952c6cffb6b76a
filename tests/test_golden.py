"""Step for step, kvsim decides what vLLM 0.33 and 0.2 decided."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvsim.golden import compare
from tests.shared import SHARED, needs_shared

GOLDEN = SHARED / "data" / "golden"
CASES = [
    "v0_beam",
    "v0_ignored",
    "v0_parallel",
    "v0_recompute",
    "v0_swap",
    "v1_block8",
    "v1_boundaries",
    "v1_chunked_long",
    "v1_copies",
    "v1_no_reserve",
    "v1_over_budget",
    "v1_plentiful",
    "v1_reserve",
    "v1_shared_prefix",
    "v1_tight_preempt",
    "v1_tight_watermark",
    "v1_timed",
]


@needs_shared
@pytest.mark.parametrize("case", CASES)
def test_every_column_of_every_golden_step_is_equal(case):
    comparison = compare(GOLDEN / case)
    assert (
        comparison.num_steps
        == json.loads((GOLDEN / case / "summary.json").read_text())["num_steps"]
    )
    assert comparison.first is None
    assert comparison.num_differences == 0


@needs_shared
def test_the_first_difference_is_shown_with_both_sides(tmp_path):
    """A run of 65 blocks is not that of 64."""
    case = tmp_path / "case"
    case.mkdir()
    for name in ("steps.jsonl", "trace.csv"):
        (case / name).write_bytes((GOLDEN / "v1_tight_preempt" / name).read_bytes())
    config = (GOLDEN / "v1_tight_preempt" / "config.yaml").read_text()
    (case / "config.yaml").write_text(config.replace("num_gpu_blocks: 65", "num_gpu_blocks: 64"))
    command = [sys.executable, "-m", "kvsim", "golden", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "case, step 0, the first that differs" in done.stdout
    assert " * free: 59 | 58" in done.stdout and "   used: 5 | 5" in done.stdout
