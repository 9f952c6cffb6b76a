"""kvsim with jumps, kvsim step by step, and the plain twin tell one story, in every column."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.engine.batching import CONTINUOUS, STATIC
from kvsim.engine.kv.contiguous import Contiguous, reserve_max, reserve_oracle, reserve_pow2
from kvsim.engine.kv.hash_chain import HashChain
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.placement import Buddy, Fit, best_fit, first_fit
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.engine.kv.radix import Radix
from kvsim.engine.request import answer_stream
from kvsim.engine.rules import LATEST, RULES, Rules
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import Outcome, round_robin
from kvsim.sim.run import Engine, simulate
from kvsim.study.tables import Run, expand
from kvsim.workload.workload import Workload, columns
from tests.twin import MAX_NUM_BATCHED_TOKENS, SLOTS, Setup, Story, tell

MS = 1_000_000
NUM_CASES = 250  # for each family
SAME_CASES_EVERY_TIME = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def simulated(
    workload: Workload,
    setup: Setup,
    *,
    jump: bool,
    rules: Rules = LATEST,
    threshold: int = 0,
    is_by_priority: bool = False,
) -> dict[str, Run]:
    """kvsim's run of a setup, under both bookings."""
    latency = Linear(
        setup.base_ms,
        setup.per_seq_ms,
        setup.per_context_token_us,
        setup.per_prompt_token_ms,
        setup.prompt_step_ms,
    )
    engine = Engine(
        make_kv=partial(policy_of, setup, workload.output_tokens.tolist(), rules),
        make_executor=partial(SimulatedExecutor, latency),
        batching=STATIC if setup.is_static else CONTINUOUS,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        chunked_prefill=setup.chunked_prefill,
        long_prefill_token_threshold=threshold,
        is_by_priority=is_by_priority,
        rules=rules,
        jump=jump,
    )
    log = simulate(
        workload,
        engine,
        num_replicas=setup.num_replicas,
        route=round_robin(),
        stop_ns=setup.stop_ns,
    )
    return {"paper": expand(log, "paper"), "common": expand(log, "common")}


def policy_of(setup: Setup, output_tokens: list[int], rules: Rules) -> KVCachePolicy:
    num_blocks, size = setup.num_blocks, setup.block_size
    if setup.memory == "paged":
        return Paged(
            num_blocks,
            size,
            can_fork=setup.can_fork,
            prefix_caching=setup.prefix_caching,
            prefix_index={"hash_chain": HashChain, "radix": Radix}[setup.prefix_index],
            watermark_blocks=int(setup.watermark * num_blocks),
            rules=rules,
        )
    limit = setup.reserve_tokens if setup.reserve == "fixed" else setup.max_model_len
    placement = {
        "buddy": lambda: Buddy(num_blocks, -(-limit // size)),
        "first_fit": lambda: Fit(num_blocks, first_fit),
        "best_fit": lambda: Fit(num_blocks, best_fit),
    }[setup.placement]()
    reserve = {
        "max": reserve_max(setup.max_model_len),
        "pow2": reserve_pow2(output_tokens),
        "oracle": reserve_oracle(output_tokens),
        "fixed": None,
    }[setup.reserve]
    return Contiguous(num_blocks, size, placement, reserve=reserve, limit=limit)


def assert_same_runs(left: Run, right: Run) -> None:
    for name in ("steps", "requests", "gaps", "idle"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert list(ours) == list(theirs)
        for column in ours:
            assert ours[column].tolist() == theirs[column].tolist(), f"{name}.{column}"


def assert_tells(runs: dict[str, Run], story: Story, setup: Setup) -> None:
    """Every column of the tables is the twin's."""
    for booking, run in runs.items():
        told = [row["slots"][booking] for row in story.steps]
        assert slots_of(run.steps) == told, booking
    run = runs["paper"]
    columns_told = story.steps[0].keys() - {"slots"} if story.steps else set()
    for name in columns_told:
        assert run.steps[name].tolist() == [row[name] for row in story.steps], f"steps.{name}"
    is_finished = run.requests["outcome"] <= Outcome.LENGTH
    for name in story.requests[0]:
        told = np.array([request[name] for request in story.requests])
        seen = run.requests[name]
        if name not in ("outcome", "replica", "arrival_ns", "first_token_ns"):
            seen, told = seen[is_finished], told[is_finished]  # the others are not over
        assert seen.tolist() == told.tolist(), f"requests.{name}"
    assert sorted(listed_gaps(run)) == sorted(told_gaps(story))
    assert run.log.end_ns == story.end_ns


def assert_same_idle(runs: dict[str, Run], story: Story) -> None:
    for booking, run in runs.items():
        names = ("replica", "start_ns", "end_ns")
        spans = zip(*(run.idle[name].tolist() for name in names), strict=True)
        seen = [(*span, slots) for span, slots in zip(spans, slots_of(run.idle), strict=True)]
        assert seen == [(*span, slots[booking]) for *span, slots in story.idle]


def slots_of(table: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    return list(zip(*(table[f"{kind}_slots"].tolist() for kind in SLOTS), strict=True))


def listed_gaps(run: Run) -> list[tuple[int, int]]:
    """(end, length) of every gap between two tokens of an answer, one entry for each."""
    gaps = run.gaps
    pairs = zip(gaps["end_ns"].tolist(), gaps["itl_ns"].tolist(), strict=True)
    return [p for p, count in zip(pairs, gaps["count"], strict=True) for _ in range(count)]


def told_gaps(story: Story) -> list[tuple[int, int]]:
    return [(b, b - a) for times in story.token_ns.values() for a, b in pairwise(times)]


def check(workload: Workload, setup: Setup) -> None:
    jumping = simulated(workload, setup, jump=True)
    stepping = simulated(workload, setup, jump=False)
    for booking in jumping:
        assert_same_runs(jumping[booking], stepping[booking])
    story = tell(workload, setup)
    assert_tells(jumping, story, setup)
    if setup.stop_ns is None:  # a step in flight at the stop has copied already
        assert_same_idle(jumping, story)
        replicas = jumping["paper"].log.replicas
        assert sum(one.num_copies for one in replicas) == story.num_copies
        assert sum(one.num_forked_blocks for one in replicas) == story.num_forked_blocks


FAMILIES = {
    "paged": {},
    "paged, a watermark": {"watermark": 0.25},
    "forks": {"can_fork": True},
    "prefix cache": {"prefix_caching": True},
    "forks and prefix cache": {"can_fork": True, "prefix_caching": True},
    "forks, prefix cache, a watermark": {
        "can_fork": True,
        "prefix_caching": True,
        "watermark": 0.1,
    },
    "contiguous": {"memory": "contiguous"},
    "static": {"memory": "contiguous", "is_static": True},
}


def few(*values: object) -> st.SearchStrategy:
    return st.sampled_from(values)


@st.composite
def setups(draw: st.DrawFn, family: str) -> Setup:
    """Engines that a config may ask for, with pools that a few requests fill."""
    max_model_len, block_size = draw(few(12, 24, 40, 64)), draw(few(1, 2, 3, 4, 8, 16, 32))
    max_num_seqs, chunked = draw(st.integers(1, 8)), draw(few(True, True, False))
    reserve = draw(few("max", "pow2", "oracle", "fixed"))
    return Setup(
        **FAMILIES[family],
        num_blocks=draw(st.integers(1, max(2, 3 * max_model_len // block_size))),
        block_size=block_size,
        reserve=reserve,
        reserve_tokens=draw(st.integers(1, max_model_len + 4)) if reserve == "fixed" else 0,
        placement=draw(few("buddy", "first_fit", "best_fit")),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(few(0, 0, 1, 3, 9))
        + max(max_num_seqs, 0 if chunked else max_model_len),
        chunked_prefill=chunked,
        num_replicas=draw(few(1, 1, 1, 2, 3)),
        base_ms=draw(few(1, 2)),
        per_seq_ms=draw(few(0, 0, 1)),
        per_context_token_us=draw(few(0, 0, 125.0)),
        per_prompt_token_ms=draw(few(0, 0, 1)),
        prompt_step_ms=draw(few(0, 1)),
        stop_ns=draw(few(None, None, *(ms * MS for ms in (1, 7, 20, 55)))),
    )


@st.composite
def workloads(draw: st.DrawFn, setup: Setup) -> Workload:
    """Up to 14 requests on a grid of whole milliseconds; prompts quote shared text and answers."""
    longest = setup.max_model_len // 3
    rows: list[Row] = []
    time_ms = 0
    for number in range(draw(st.integers(1, 14))):
        time_ms += draw(few(0, 0, 1, 2, 3, 7, 30))
        spans: list[tuple[int, int, int]] = []
        if draw(st.booleans()):
            spans.append((1000 + draw(st.integers(0, 1)), 0, draw(st.integers(1, longest))))
        after = -1
        if number and draw(few(True, False, False)):
            quoted = draw(st.integers(0, number - 1))
            after = draw(few(quoted, quoted, -1))
            if draw(st.booleans()):
                length = draw(few(1, rows[quoted].num_answer_tokens))
                spans = [*rows[quoted].spans, (answer_stream(quoted), 0, length)]
        if not spans or draw(few(True, True, False)):
            spans.append((number, 0, draw(st.integers(1, longest))))
        num_samples = draw(few(1, 1, 2, 3, 4))
        think_ms = draw(few(0, 0, 1, 5))
        rows.append(
            Row(
                time_ms,
                spans,
                draw(few(1, 2, 3, 5, 8, 13, 20, 30)),
                num_samples,
                after,
                think_ms,
            )
        )
    return workload_of(rows)


class Row(NamedTuple):
    """A request in whole milliseconds."""

    time_ms: int
    spans: list[tuple[int, int, int]]
    num_answer_tokens: int
    num_samples: int = 1
    after: int = -1
    think_ms: int = 0


def workload_of(rows: list[Row]) -> Workload:
    return columns(
        np.array([row.time_ms for row in rows]) * MS,
        np.array([sum(length for _, _, length in row.spans) for row in rows]),
        np.array([row.num_answer_tokens for row in rows]),
        num_samples=np.array([row.num_samples for row in rows]),
        after=np.array([row.after for row in rows]),
        think_ns=np.array([row.think_ms for row in rows]) * MS,
        spans=np.array([span for row in rows for span in row.spans], np.int64).reshape(-1, 3),
        span_offsets=np.cumsum([0, *(len(row.spans) for row in rows)]),
    )


def own(number: int, length: int) -> list[tuple[int, int, int]]:
    return [(number, 0, length)]


TIGHT = Setup(num_blocks=4, block_size=4, max_num_seqs=4, max_num_batched_tokens=6)
CHAT = [
    Row(0, own(0, 7), 9),
    Row(0, own(1, 5), 6, num_samples=2),
    Row(1, [(0, 0, 7), (answer_stream(0), 0, 9), (2, 0, 3)], 4, after=0, think_ms=1),
    Row(1, [(0, 0, 7), (3, 0, 2)], 8),
    Row(2, [(0, 0, 7), (answer_stream(0), 0, 9), (4, 0, 1)], 5, num_samples=3),
]
GRID = {
    "decodes stall behind a chunked prompt": (
        [
            Row(0, own(0, 20), 4),
            *(Row(n, own(n, 2), 9) for n in range(1, 4)),
            Row(9, own(9, 30), 2),
        ],
        replace(TIGHT, num_blocks=40),
    ),
    "victims pile up and come back in order": (
        [Row(n // 3, own(n, 3 + n % 4), 6) for n in range(9)],
        TIGHT,
    ),
    "a stop in the middle of a jump": (
        [Row(0, own(0, 4), 40), Row(0, own(1, 4), 30)],
        Setup(stop_ns=17 * MS + 1),
    ),
    "a stop at the very end of a step": (
        [Row(0, own(0, 4), 40), Row(0, own(1, 4), 30)],
        Setup(stop_ns=17 * MS),
    ),
    "arrivals tie with step ends": ([Row(n, own(n, 1), 5) for n in range(12)], Setup()),
    "refusals in a chain": (
        [
            Row(0, own(0, 70), 1),
            Row(0, own(1, 2), 3, after=0),
            Row(0, own(2, 2), 3, num_samples=9, after=1),
            Row(1, own(3, 17), 3, after=2, think_ms=2),
            Row(1, own(4, 5), 3, after=3),
        ],
        replace(TIGHT, num_blocks=5),
    ),
    "uneven numbers": (
        [Row(3 * n, own(n, 1 + 7 * n % 11), 1 + 5 * n % 17) for n in range(30)],
        Setup(
            num_blocks=20,
            base_ms=10.3,
            per_seq_ms=0.05,
            per_context_token_us=0.34,
            per_prompt_token_ms=0.07,
            prompt_step_ms=0.9,
        ),
    ),
    "a head of the queue quotes an answer that is being written": (
        [
            Row(0, own(0, 6), 9),
            Row(1, [(0, 0, 6), (answer_stream(0), 0, 3), (1, 0, 4)], 2),
            Row(5, own(2, 1), 20),
            Row(5, [(0, 0, 6), (answer_stream(0), 0, 6), (3, 0, 4)], 2),
            Row(6, own(4, 4), 16),
            Row(8, [(0, 0, 6), (answer_stream(0), 0, 5), (5, 0, 3)], 4),
            Row(11, own(6, 2), 3),
        ],
        Setup(num_blocks=4, prefix_caching=True, max_num_seqs=3),
    ),
    "one seat": ([Row(n, own(n, 2), 3) for n in range(6)], Setup(max_num_seqs=1)),
} | {
    f"a chat, {family}, blocks of {size}, {kind}": (
        CHAT,
        Setup(
            num_blocks=32 // size,
            block_size=size,
            max_num_batched_tokens=11 if kind == "chunked" else 64,
            chunked_prefill=kind == "chunked",
            **options,
        ),
    )
    for family, options in FAMILIES.items()
    for size in (1, 2, 4, 8, 16, 32)
    for kind in ("chunked", "whole prompts")
}


@pytest.mark.parametrize("rows, setup", GRID.values(), ids=GRID)
def test_a_written_out_case_is_told_the_same(rows, setup):
    check(workload_of(rows), setup)


@pytest.mark.parametrize("family", FAMILIES)
def test_jumping_stepping_and_walking_tell_the_same(family):
    @settings(SAME_CASES_EVERY_TIME, max_examples=NUM_CASES)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        setup = data.draw(setups(family))
        check(data.draw(workloads(setup)), setup)

    compare()


@pytest.mark.parametrize("family", ["paged", "prefix cache", "forks and prefix cache"])
@pytest.mark.parametrize("version", RULES)
def test_jumping_and_stepping_tell_the_same_under_the_rules_of_each_version(version, family):
    @settings(SAME_CASES_EVERY_TIME, max_examples=80)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        setup = data.draw(setups(family))
        workload, threshold = data.draw(workloads(setup)), data.draw(few(0, 1, 2, 5))
        jumping, stepping = (
            simulated(workload, setup, jump=jump, rules=RULES[version], threshold=threshold)
            for jump in (True, False)
        )
        assert_same_runs(jumping["paper"], stepping["paper"])

    compare()


@pytest.mark.parametrize("version", ["vllm-0.20", "vllm-0.11", "vllm-0.8"])
def test_a_jump_tells_evictions_in_the_order_of_the_queue(version):
    """Freed are two cached blocks, then one without a key; the long answer takes blocks enough to
    reach the cached ones, and ends before it reaches the other."""
    workload = workload_of([Row(0, own(0, 8), 1), Row(0, own(1, 3), 1), Row(0, own(2, 1), 24)])
    setup = Setup(num_blocks=8, prefix_caching=True)
    jumping, stepping = (
        simulated(workload, setup, jump=jump, rules=RULES[version])["paper"]
        for jump in (True, False)
    )
    assert stepping.steps["cached_slots"].tolist()[-1] == 4
    assert_same_runs(jumping, stepping)


def test_a_follow_up_without_think_time_enters_another_replica_alike():
    rows = [Row(0, own(n, 1), 3 - n) for n in range(3)] + [Row(0, own(3, 1), 1, after=1)]
    workload, setup = workload_of(rows), Setup(num_replicas=3)
    jumping = simulated(workload, setup, jump=True)["paper"]
    assert_same_runs(jumping, simulated(workload, setup, jump=False)["paper"])


def test_a_static_batch_that_takes_all_names_no_token_budget():
    setup = Setup(memory="contiguous", reserve="oracle", is_static=True)
    run = simulated(workload_of([Row(0, own(0, 4), 3)]), setup, jump=True)["paper"]
    assert MAX_NUM_BATCHED_TOKENS not in run.steps["limit"]


def test_parallel_answers_of_one_token_are_all_made():
    setup = Setup(can_fork=True)
    run = simulated(workload_of([Row(0, own(0, 4), 1, num_samples=3)]), setup, jump=True)["paper"]
    assert run.requests["num_generated"].tolist() == [3]
    assert run.steps["num_tokens"].tolist() == [3]


def test_copies_of_one_block_are_published_in_batch_order():
    quote = [(0, 0, 7), (answer_stream(0), 0, 1)]
    rows = [Row(0, own(0, 7), 2), *(Row(0, [*quote, (n, 0, 1)], 1) for n in (1, 2))]
    setup = Setup(num_blocks=4, prefix_caching=True, max_num_seqs=3, max_num_batched_tokens=3)
    check(workload_of(rows), setup)


def test_a_step_in_flight_at_the_stop_is_not_idle_time():
    workload = workload_of([Row(2, own(0, 4), 1)])
    run = simulated(workload, Setup(base_ms=9, stop_ns=7 * MS), jump=True)["paper"]
    assert run.idle["end_ns"].tolist() == [2 * MS]
