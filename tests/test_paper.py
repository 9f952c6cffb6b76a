"""Published figures that a right simulation reproduces: the paper's Figure 2, Mooncake's hits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.config.loading import points_of, read_source
from kvsim.study.runs import run_point
from tests.shared import SHARED, needs_shared

ROOT = Path(__file__).resolve().parents[1]

# Kwon et al. 2023, Figure 2, printed labels: % of KV memory
FIGURE_2 = {
    "Orca (Max)": {"token": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "Orca (Pow2)": {"token": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "Orca (Oracle)": {"token": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
    "vLLM": {"token": 96.3},
}


@pytest.fixture(scope="module")
def figure_2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figure2")
    lengths = SHARED / "data" / "paper" / "sharegpt_opt_lengths.csv"
    script = ROOT / "experiments" / "paper_trace.py"
    subprocess.run([sys.executable, script, lengths, folder / "trace.csv"], check=True)
    source = read_source(
        ROOT / "experiments" / "figure2.yaml", [f"workload.path={folder / 'trace.csv'}"]
    )
    return {
        variant: run_point(point, folder / str(number))["waste"]
        for number, (variant, _, point) in enumerate(points_of(source))
    }


@needs_shared
@pytest.mark.parametrize("system", FIGURE_2)
def test_figure_2_is_met_within_a_point_in_every_kind(figure_2, system):
    shares = {kind: 100 * figure_2[system][kind] for kind in FIGURE_2[system]}
    assert shares == pytest.approx(FIGURE_2[system], abs=1.0)


@needs_shared
@pytest.mark.parametrize(("block_size", "hit_tokens"), [(512, 10_734_080), (16, 10_739_808)])
def test_an_unlimited_cache_hits_what_vllms_rule_says_of_mooncake(tmp_path, block_size, hit_tokens):
    trace = SHARED / "data" / "traces" / "mooncake_conversation_trace.jsonl"
    overrides = [
        f"workload.path={trace}",
        "kv.policy.kind=paged_sharing",
        f"kv.block_size={block_size}",
        f"kv.num_blocks={40_000_000 // block_size}",
    ]
    source = read_source(ROOT / "experiments" / "mooncake.yaml", overrides)
    assert run_point(source, tmp_path / "out")["hit_tokens"] == hit_tokens
