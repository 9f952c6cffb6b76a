"""Every figure against a brute force over the time of each token, told by the plain twin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvsim.engine.plan import LIMITS
from kvsim.study.metrics import Slo, Window, summarize, window_of
from kvsim.study.tables import Run
from kvsim.workload.workload import Workload
from tests.test_twin import FAMILIES, MS, Row, own, simulated, workload_of
from tests.twin import SLOTS, Setup, Story, tell

ROWS = [
    Row(
        5 + 6 * n + 400 * (n // 20),
        [(900 + n % 2, 0, 5), *own(n, 2 + 5 * n % 7)],
        2 + 7 * n % 15,
        num_samples=1 + (n % 5 == 0),
    )
    for n in range(40)
] + [Row(1200, own(40, 100), 3), Row(1300, own(41, 3), 1)]
TIMES = {"base_ms": 2, "per_seq_ms": 0.25, "per_prompt_token_ms": 0.125}
SETUPS = {
    "two replicas": Setup(num_blocks=12, num_replicas=2, **TIMES),
    "pow2": Setup(num_blocks=12, memory="contiguous", reserve="pow2", **TIMES),
    "stopped": Setup(num_blocks=8, stop_ns=151 * MS + 1, **TIMES),
} | {
    family: Setup(num_blocks=20 if "memory" in options else 9, **options, **TIMES)
    for family, options in FAMILIES.items()
}
WINDOWS = {"all": (0.0, 0.0), "warm": (0.05, 0.0), "cut": (0.06, 0.05)}
CASES = [(name, window) for name in SETUPS for window in WINDOWS]


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[Workload, dict[str, Run], Story]]:
    workload = workload_of(ROWS)
    return {
        name: (workload, simulated(workload, setup, jump=True), tell(workload, setup))
        for name, setup in SETUPS.items()
    }


def window_told(story: Story, warmup_s: float, cooldown_s: float) -> Window:
    arrivals = [r["arrival_ns"] for r in story.requests if r["arrival_ns"] >= 0]
    start = round(warmup_s * 1e9) or min(arrivals)
    return Window(start, story.end_ns - round(cooldown_s * 1e9))


def completed(story: Story, window: Window) -> list[dict]:
    """Requests that finished in the window, with each answer's token times."""
    found = []
    for row, request in enumerate(story.requests):
        if request["outcome"] <= 1 and window.start_ns < request["finish_ns"] <= window.end_ns:
            times = [ns for (r, _), ns in story.token_ns.items() if r == row]
            found.append(request | {"row": row, "times": times})
    return found


def assert_spread(figures: dict, name: str, values_ms: list[float]) -> None:
    told = {
        "mean": np.mean(values_ms),
        "median": np.median(values_ms),
        "std": np.std(values_ms),
        **{f"p{p}": np.percentile(values_ms, p) for p in (90, 95, 99)},
    }
    for key, value in told.items():
        assert figures[f"{key}_{name}_ms"] == pytest.approx(value, rel=1e-12, abs=1e-12), (
            key,
            name,
        )


@pytest.mark.parametrize("name, window_name", CASES)
def test_latencies_and_rates_are_those_of_every_token(cases, name, window_name):
    workload, runs, story = cases[name]
    window = window_told(story, *WINDOWS[window_name])
    assert window_of(runs["paper"], *WINDOWS[window_name]) == window
    figures = summarize(runs["paper"], window, Slo())
    done = completed(story, window)
    first = [min(min(times) for times in one["times"]) for one in done]
    last = [max(max(times) for times in one["times"]) for one in done]
    if not SETUPS[name].is_static:  # there answers are returned when the batch is over
        assert last == [one["finish_ns"] for one in done]
    finish = [one["finish_ns"] for one in done]
    arrival = [one["arrival_ns"] for one in done]
    lengths = [len(one["times"][0]) for one in done]
    assert_spread(figures, "ttft", [(f - a) / 1e6 for f, a in zip(first, arrival, strict=True)])
    assert_spread(figures, "e2el", [(f - a) / 1e6 for f, a in zip(finish, arrival, strict=True)])
    assert_spread(figures, "queue", [(o["admitted_ns"] - o["arrival_ns"]) / 1e6 for o in done])
    tpot = [
        (end - begin) / (length - 1) / 1e6
        for begin, end, length in zip(first, finish, lengths, strict=True)
        if length > 1
    ]
    assert_spread(figures, "tpot", tpot)
    gaps = [
        (b - a) / 1e6
        for times in story.token_ns.values()
        for a, b in pairwise(times)
        if window.start_ns < b <= window.end_ns
    ]
    assert_spread(figures, "itl", gaps)
    normalized = [
        (end - begin) / 1e9 / length
        for begin, end, length in zip(arrival, finish, lengths, strict=True)
    ]
    assert figures["normalized_latency_s"] == pytest.approx(np.mean(normalized))
    assert figures["completed"] == len(done)
    seconds = (window.end_ns - window.start_ns) / 1e9
    made = [t for ns in story.token_ns.values() for t in ns if window.start_ns < t <= window.end_ns]
    asked = sum(int(workload.prompt_tokens[one["row"]]) for one in done)
    assert figures["duration"] == pytest.approx(seconds)
    assert figures["total_output_tokens"] == len(made)
    assert figures["total_input_tokens"] == asked
    assert figures["request_throughput"] == pytest.approx(len(done) / seconds)
    assert figures["output_throughput"] == pytest.approx(len(made) / seconds)
    assert figures["total_token_throughput"] == pytest.approx((len(made) + asked) / seconds)
    per_second = np.bincount([t // 1_000_000_000 for t in made])
    assert figures["max_output_tokens_per_s"] == per_second.max()
    outcomes = [one["outcome"] for one in story.requests]
    assert figures["failed"] == sum(outcome > 2 for outcome in outcomes)
    assert figures["unfinished"] + figures["not_arrived"] == outcomes.count(2)
    absent = [request for request in story.requests if request["arrival_ns"] < 0]
    assert figures["not_arrived"] == len(absent)


@pytest.mark.parametrize("name", SETUPS)
def test_requests_at_once_are_counted_between_arrival_and_finish(cases, name):
    _, runs, story = cases[name]
    come = [one for one in story.requests if one["arrival_ns"] >= 0 and one["outcome"] <= 2]
    most = 0
    for instant in {one["arrival_ns"] for one in come}:
        there = [
            one
            for one in come
            if one["arrival_ns"] <= instant and not 0 <= one["finish_ns"] <= instant
        ]
        most = max(most, len(there))
    run = runs["paper"]
    assert summarize(run, window_of(run, 0, 0), Slo())["max_concurrent_requests"] == most


@pytest.mark.parametrize("name, window_name", CASES)
@pytest.mark.parametrize("slo", [Slo(ttft_ms=12), Slo(tpot_ms=6), Slo(30, 8, 90), Slo(e2el_ms=1)])
def test_goodput_counts_who_met_every_limit(cases, name, window_name, slo):
    _, runs, story = cases[name]
    window = window_told(story, *WINDOWS[window_name])
    done = completed(story, window)
    num_met = 0
    for one in done:
        first = min(min(times) for times in one["times"])
        length = len(one["times"][0])
        ttft, e2el = first - one["arrival_ns"], one["finish_ns"] - one["arrival_ns"]
        tpot = (one["finish_ns"] - first) / (length - 1) if length > 1 else 0
        limits = [(ttft, slo.ttft_ms), (tpot, slo.tpot_ms), (e2el, slo.e2el_ms)]
        num_met += all(limit is None or value <= limit * 1e6 for value, limit in limits)
    figures = summarize(runs["paper"], window, slo)
    seconds = (window.end_ns - window.start_ns) / 1e9
    assert figures["request_goodput"] == pytest.approx(num_met / seconds)
    assert figures["slo_share"] == pytest.approx(num_met / len(done))


def inside_ns(start_ns: int, end_ns: int, window: Window) -> int:
    return max(min(end_ns, window.end_ns) - max(start_ns, window.start_ns), 0)


@pytest.mark.parametrize("booking", ["paper", "common"])
@pytest.mark.parametrize("name, window_name", [case for case in CASES if case[0] != "stopped"])
def test_memory_and_limits_are_weighted_by_time(cases, name, window_name, booking):
    _, runs, story = cases[name]
    setup, window = SETUPS[name], window_told(story, *WINDOWS[window_name])
    figures = summarize(runs[booking], window, Slo())
    whole = (window.end_ns - window.start_ns) * setup.num_replicas
    pool = setup.num_blocks * setup.block_size
    busy = [(inside_ns(s["start_ns"], s["end_ns"], window), s) for s in story.steps]
    busy = [(weight, step) for weight, step in busy if weight]
    idle = [(inside_ns(start, end, window), slots) for _, start, end, slots in story.idle]
    assert sum(w for w, _ in busy) + sum(w for w, _ in idle) == whole
    for place, kind in enumerate(SLOTS):
        slots = sum(w * step["slots"][booking][place] for w, step in busy)
        slots += sum(w * each[booking][place] for w, each in idle)
        assert figures["waste"][kind] == pytest.approx(slots / whole / pool)
    assert sum(figures["waste"].values()) == pytest.approx(1)
    shares = {
        limit: sum(w for w, step in busy if step["limit"] == code) / whole
        for code, limit in enumerate(LIMITS)
    }
    shares["arrivals"] += sum(w for w, _ in idle) / whole
    assert figures["limit_shares"] == pytest.approx(shares)
    assert figures["binding_limit"] == max(shares, key=shares.get)
    assert sum(figures["limit_shares"].values()) == pytest.approx(1)
    worked = sum(w for w, _ in busy)
    running = sum(w * step["num_running"] for w, step in busy)
    waiting = sum(w * step["num_waiting"] for w, step in busy)
    assert figures["batch_size_mean"] == pytest.approx(running / worked)
    assert figures["batch_size_peak"] == max(step["num_running"] for _, step in busy)
    assert figures["num_waiting_mean"] == pytest.approx(waiting / whole)
    assert figures["num_waiting_peak"] == max(step["num_waiting"] for _, step in busy)
    held = max(step["held_blocks"] for _, step in busy) * setup.block_size
    assert figures["kv_used_peak"] == pytest.approx(held / pool)
    token = sum(w * step["slots"][booking][0] for w, step in busy)
    logical = sum(w * step["logical_tokens"] for w, step in busy)
    assert figures["sharing_saving"] == pytest.approx(1 - token / logical)
    assert figures["num_steps"] == len(busy)
    assert figures["preemptions"] == sum(step["num_preempted"] for _, step in busy)


@pytest.mark.parametrize("name, window_name", CASES)
def test_sharing_and_recomputation_are_those_of_the_completed_requests(cases, name, window_name):
    _, runs, story = cases[name]
    window = window_told(story, *WINDOWS[window_name])
    figures = summarize(runs["paper"], window, Slo())
    done = completed(story, window)
    inside = [s for s in story.steps if window.start_ns < s["end_ns"] <= window.end_ns]
    hits = sum(one["num_hit"] for one in done)
    recomputed = sum(one["num_recomputed"] for one in done)
    prompt = sum(step["num_prompt_tokens"] for step in inside)
    computed = prompt + sum(step["num_decodes"] for step in inside)
    assert figures["preempted_requests"] == sum(one["num_preemptions"] > 0 for one in done)
    assert figures["hit_tokens"] == hits
    assert figures["recomputed_tokens"] == recomputed
    setup, requests = SETUPS[name], cases[name][1]["paper"].requests
    asked = sum(
        int(requests["prompt_tokens"][one["row"]])
        * (1 if setup.can_fork else int(requests["num_samples"][one["row"]]))
        for one in done
    )
    assert figures["hit_share"] == pytest.approx(hits / asked)
    resumed = sum(one["num_resumed_hit"] for one in done)
    assert figures["resumed_hit_tokens"] == resumed
    assert figures["recomputed_share"] == pytest.approx(recomputed / computed)
    if name != "stopped":
        assert figures["copies_made"] == story.num_copies
        assert figures["blocks_shared_at_forks"] == story.num_forked_blocks
        assert figures["copies_avoided"] == story.num_forked_blocks - story.num_copies


def test_the_cases_have_something_to_measure(cases):
    """Preemptions, hits, forks, refusals and idle time all occur."""
    stories = {name: story for name, (_, _, story) in cases.items()}
    assert sum(s["num_preempted"] for s in stories["paged"].steps) > 5
    assert sum(r["num_hit"] for r in stories["prefix cache"].requests) > 20
    assert stories["forks"].num_copies >= 3
    assert len(stories["paged"].idle) > 2
    assert any(r["outcome"] > 2 for r in stories["paged"].requests)
    assert any(r["outcome"] == 2 for r in stories["stopped"].requests)


def test_a_window_without_requests_has_no_figures_but_counts():
    run = simulated(workload_of([Row(1, own(0, 4), 3)]), Setup(), jump=True)["paper"]
    figures = summarize(run, Window(500 * MS, 500 * MS), Slo(ttft_ms=5))
    assert figures["completed"] == figures["total_output_tokens"] == 0
    for name in ("mean_ttft_ms", "p99_itl_ms", "request_throughput", "slo_share"):
        assert figures[name] is None
