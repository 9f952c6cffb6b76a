"""Step for step, kvsim decides what vLLM 0.33 decided."""

from __future__ import annotations

import pytest

from tests.golden import golden_rows, replayed_rows
from tests.shared import SHARED, needs_shared

CASES = [
    "v1_block8",
    "v1_boundaries",
    "v1_chunked_long",
    "v1_copies",
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
    folder = SHARED / "data" / "golden" / case
    for expected, row in zip(golden_rows(folder), replayed_rows(folder), strict=True):
        expected.pop("t", None)
        if "tables" not in expected:
            row.pop("tables")
        assert row == expected
