"""Charts: the same bytes again, exact means over bins, and nothing drawn from nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.kv.contiguous import Contiguous, reserve_max, reserve_oracle
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.placement import Buddy
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.metrics import Slo, Window, summarize, window_of
from kvsim.study.plots import draw
from kvsim.study.plots.latency import MOST_POINTS, cumulative
from kvsim.study.plots.select import select
from kvsim.study.plots.style import wrapped
from kvsim.study.plots.timeline import (
    NEVER_USED,
    binned_mean,
    memory_shares,
    read_memory,
    replica_means,
    time_axis,
)
from kvsim.study.results import Point, write_points, write_run
from kvsim.study.tables import SLOT_KINDS, Run, expand
from kvsim.workload.workload import Workload, columns

MAX_MODEL_LEN, NUM_BLOCKS = 256, 64
LATENCY = Linear(base_ms=20, per_seq_ms=0.2, per_context_token_us=1, per_prompt_token_ms=0.1)
RATE = "workload.arrivals.rate_per_s"


def requests(num: int = 60, rate_per_s: float = 4, prompt: int = 40) -> Workload:
    chance = np.random.default_rng(3)
    arrival_ns = np.cumsum(chance.exponential(1e9 / rate_per_s, num)).astype(np.int64)
    return columns(
        arrival_ns - arrival_ns[:1].sum(),  # the first arrives at 0
        chance.integers(1, 2 * prompt, num),
        chance.integers(1, 80, num),
    )


def paged(workload: Workload, **options: bool) -> Callable[[], KVCachePolicy]:
    return lambda: Paged(NUM_BLOCKS, 16, **options)


def orca_max(workload: Workload) -> Callable[[], KVCachePolicy]:
    return contiguous(reserve_max(MAX_MODEL_LEN))


def orca_oracle(workload: Workload) -> Callable[[], KVCachePolicy]:
    return contiguous(reserve_oracle(workload.output_tokens.tolist()))


def contiguous(reserve: Callable) -> Callable[[], KVCachePolicy]:
    buddy = MAX_MODEL_LEN // 16
    return lambda: Contiguous(
        NUM_BLOCKS, 16, Buddy(NUM_BLOCKS, buddy), reserve=reserve, limit=MAX_MODEL_LEN
    )


def run_of(
    workload: Workload, make_kv: Callable, *, booking: str = "common", num_replicas: int = 1
) -> Run:
    engine = Engine(
        make_kv,
        lambda answers: SimulatedExecutor(LATENCY, answers),
        CONTINUOUS,
        MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        chunked_prefill=False,
    )
    log = simulate(workload, engine, num_replicas=num_replicas, route=round_robin())
    return expand(log, booking)


def write(folder: Path, run: Run) -> dict:
    summary = summarize(run, window_of(run, 0, 0), Slo())
    write_run(folder, "", run, summary)
    return summary


def write_sweep(folder: Path, variants: dict[str, Callable], rates: tuple[float, ...]) -> Path:
    folder.mkdir()
    points = []
    for variant, kv in variants.items():
        for rate in rates:
            workload = requests(rate_per_s=rate)
            below = folder / f"{len(points)}"
            summary = write(below, run_of(workload, kv(workload)))
            points.append(Point(variant, {RATE: rate}, below, summary))
    write_points(folder, "", points)
    return folder


def names(paths: list[Path]) -> set[str]:
    return {path.name for path in paths}


def both(*charts: str) -> set[str]:
    return {f"{chart}.{kind}" for chart in charts for kind in ("png", "svg")}


def test_a_sweep_of_variants_has_every_chart_and_the_same_bytes_again(tmp_path):
    variants = {"Orca (Max)": orca_max, "Orca (Oracle)": orca_oracle, "vLLM": paged}
    folder = write_sweep(tmp_path / "sweep", variants, (2, 20))
    paths = draw(folder)
    assert names(paths) == both("waste", "memory", "batch", "rate", "latency")
    assert all(path.parent == folder / "charts" for path in paths)
    first = {path: path.read_bytes() for path in paths}
    assert all(len(content) > 5000 for content in first.values())
    for path, content in first.items():
        start = b"\x89PNG" if path.suffix == ".png" else b"<?xml"
        assert content.startswith(start)
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True}):  # a user's own style
        assert {path: path.read_bytes() for path in draw(folder)} == first


def test_eight_variants_with_long_names_stay_small_files(tmp_path):
    kv = (orca_max, orca_oracle, paged, paged)
    variants = {f"a variant_{i} of which much is to be said " * 2: kv[i % 4] for i in range(8)}
    paths = draw(write_sweep(tmp_path / "eight", variants, (8,)))
    assert names(paths) == both("waste", "memory", "batch", "latency")
    assert max(path.stat().st_size for path in paths) < 1_000_000


def test_a_single_run_has_no_chart_of_rates(tmp_path):
    workload = requests()
    write(tmp_path, run_of(workload, paged(workload), num_replicas=2))
    assert names(draw(tmp_path)) == both("waste", "memory", "batch", "latency")


def test_without_requests_nothing_is_drawn(tmp_path):
    workload = requests(0)
    write(tmp_path, run_of(workload, paged(workload)))
    assert draw(tmp_path) == []
    assert not (tmp_path / "charts").exists()


def test_runs_that_refuse_every_request_draw_nothing(tmp_path):
    workload = columns(np.arange(3) * 10**9, np.full(3, 1000), np.full(3, 10))
    points = []
    for rate in (1, 2):
        summary = write(tmp_path / str(rate), run_of(workload, paged(workload)))
        points.append(Point("vLLM", {RATE: rate}, tmp_path / str(rate), summary))
    write_points(tmp_path, "", points)
    assert draw(tmp_path) == []


def test_answers_of_one_token_leave_out_only_their_tpot(tmp_path):
    workload = columns(np.arange(3) * 10**9, np.full(3, 20), np.full(3, 1))
    write(tmp_path, run_of(workload, paged(workload)))
    assert names(draw(tmp_path)) == both("waste", "memory", "batch", "latency")


def test_a_run_beside_one_that_refused_everything_is_still_drawn(tmp_path):
    good, bad = requests(), columns(np.zeros(2), np.full(2, 1000), np.full(2, 10))
    points = []
    for variant, workload in (("good", good), ("bad", bad)):
        summary = write(tmp_path / variant, run_of(workload, paged(workload)))
        points.append(Point(variant, {}, tmp_path / variant, summary))
    write_points(tmp_path, "", points)
    assert names(draw(tmp_path)) == both("waste", "memory", "batch", "latency")


def test_binned_means_equal_a_sum_over_every_nanosecond():
    chance = np.random.default_rng(0)
    bounds = np.unique(chance.integers(0, 1000, 80))
    start, end = bounds[:-1:2][:30], bounds[1::2][:30]  # with idle spans between
    values = chance.integers(0, 100, len(start))
    edges = np.linspace(0, 1003, 18)
    per_ns = np.zeros(1003)
    for low, high, value in zip(start, end, values, strict=True):
        per_ns[low:high] = value
    integral = np.interp(edges, np.arange(1004), np.concatenate([[0], np.cumsum(per_ns)]))
    expected = np.diff(integral) / np.diff(edges)
    assert binned_mean(start, end, values, edges) == pytest.approx(expected, abs=1e-9)


def test_a_step_longer_than_many_bins_fills_each_of_them():
    start, end = np.array([0, 10]), np.array([10, 1000])
    means = binned_mean(start, end, np.array([1, 3]), np.linspace(0, 1000, 101))
    assert means[0] == pytest.approx(1)
    assert means[1:] == pytest.approx(3)


def test_means_are_taken_over_replicas():
    steps = {
        "replica": np.array([0, 1, 1]),
        "start_ns": np.array([0, 0, 50]),
        "end_ns": np.array([100, 20, 100]),
        "num_running": np.array([4, 2, 6]),
    }
    means = replica_means(steps, "num_running", np.array([0.0, 50, 100]))
    assert means == pytest.approx([(4 + 2 * 20 / 50) / 2, (4 + 6) / 2])


@pytest.mark.parametrize("booking", ["paper", "common"])
@pytest.mark.parametrize("kv", [paged, orca_max, orca_oracle])
@pytest.mark.parametrize("rate_per_s", [0.3, 8])
def test_memory_over_time_has_the_means_of_the_summary(tmp_path, kv, booking, rate_per_s):
    workload = requests(rate_per_s=rate_per_s)
    run = run_of(workload, kv(workload), booking=booking, num_replicas=2)
    waste = summarize(run, Window(0, run.log.end_ns), Slo())["waste"]
    write_run(tmp_path, "", run, {})
    shares = memory_shares(read_memory(tmp_path), np.linspace(0, run.log.end_ns, 41))
    never_used = shares.pop(NEVER_USED)
    assert sum(shares.values()) == pytest.approx(np.ones(40))
    assert (np.diff(never_used) <= 1e-9).all() and never_used[-1] < 1
    means = {kind: shares[kind].mean() for kind in SLOT_KINDS}
    assert means == pytest.approx(waste, abs=1e-9)


def test_a_shared_time_axis_cuts_runs_that_drain_for_long(tmp_path):
    folders = [tmp_path / name for name in ("fast", "slow", "none")]
    for folder, prompt in zip(folders, (10, 60), strict=False):
        workload = requests(rate_per_s=1000, prompt=prompt)
        write(folder, run_of(workload, orca_max(workload) if prompt > 10 else paged(workload)))
    fast, slow = (time_axis([folder], "").end_ns for folder in folders[:2])
    assert slow > 1.5 * fast
    both_of = time_axis(folders, "at 4 req/s")
    assert both_of.end_ns == round(1.5 * fast)
    assert both_of.label == "Time (s), at 4 req/s; longer runs are cut"
    assert time_axis(folders[2:], "") is None


def test_a_distribution_keeps_its_ends_and_heights():
    at, percent = cumulative(np.array([3.0, np.nan, 1.0, 2.0, 2.0]))
    assert at.tolist() == [1, 2, 2, 3]
    assert percent.tolist() == [25, 50, 75, 100]
    at, percent = cumulative(np.arange(1.0, 10_001))
    assert len(at) == MOST_POINTS
    assert (at[0], at[-1], percent[-1]) == (1, 10_000, 100)
    assert at / 100 == pytest.approx(percent)


def test_a_sweep_shows_its_highest_rate_and_says_so():
    points = [
        Point(variant, {RATE: rate}, Path(), {}) for variant in ("a", "b") for rate in (1, 4, 2)
    ]
    shown = select(points)
    assert [(run.label, run.point.at[RATE]) for run in shown.runs] == [("a", 4), ("b", 4)]
    assert shown.note == "at 4 req/s (highest swept)"


def test_a_sweep_without_variants_shows_its_points():
    points = [Point("", {"engine.max_num_seqs": n}, Path(), {}) for n in range(1, 21)]
    shown = select(points)
    assert len(shown.runs) == 8
    assert (shown.runs[0].label, shown.runs[-1].label) == ("max_num_seqs 1", "max_num_seqs 20")
    assert shown.note == "8 of 20 swept points"


def test_long_names_lose_their_middle_and_stay_apart():
    one, two = (wrapped(f"paged with a long name that ends in {n} blocks", 14, 2) for n in (8, 16))
    assert one != two
    assert all(len(line) <= 14 for line in one.split("\n"))
    assert wrapped("vLLM", 14, 2) == "vLLM"
    assert wrapped("", 14, 2) == ""
