"""Sharing must never change an answer: however requests are served, each gets the tokens that it
gets alone in memory of its own."""

from __future__ import annotations

from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")

from kvsim.engine.batching import STATIC
from kvsim.engine.groups import PaperEra
from kvsim.engine.kv.contiguous import Contiguous, reserve_max
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.placement import Buddy, Fit, best_fit
from kvsim.engine.kv.radix import Radix
from kvsim.engine.plan import Fork, StepPlan, StepResult
from kvsim.engine.rules import RULES
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import Outcome, round_robin
from kvsim.sim.run import RunLog, simulate
from kvsim.study.tables import expand
from tests.gpu_model.cases import (
    BLOCK_SIZE,
    SHAPE,
    Answers,
    Poisoned,
    Serving,
    dense_answers,
    mixed_beams,
    mixed_workload,
    run_for_real,
    tiny_decoder,
)
from tests.gpu_model.dense import dense_logits
from tests.test_twin import assert_same_runs

AMPLE, TIGHT, TIGHT_FOR_GROUPS, TIGHT_FOR_BEAMS = 300, 26, 72, 56  # blocks


def paged(num_blocks: int, **options: object) -> partial:
    return partial(Paged, num_blocks, BLOCK_SIZE, **options)


def era(num_blocks: int, **options: object) -> dict:
    """Serving of groups: whole prompts, forks, swap."""
    return {
        "make_kv": paged(num_blocks, can_fork=True),
        "paper_era": PaperEra(60, 0.01, mixes_prompts=bool(options.pop("mixes", False))),
        "chunked_prefill": False,
        "max_num_batched_tokens": 200,
        "max_num_seqs": 24,
        **options,
    }


def registered(num_blocks: int, **options: object) -> dict:
    prefixes = {0: 5, 1: 3}  # blocks of the streams that prompts begin with
    serving = era(num_blocks, **options)
    return serving | {
        "make_kv": paged(num_blocks, can_fork=True, registered=prefixes),
        "registered": prefixes,
    }


shared = partial(paged, can_fork=True, prefix_caching=True)
radix = partial(shared, prefix_index=Radix)
CHUNKS = {"max_num_batched_tokens": 11}
WHOLE = {"chunked_prefill": False, "max_num_batched_tokens": 200}
SERVINGS = {
    "paged": Serving(paged(AMPLE)),
    "paged, chunks": Serving(paged(AMPLE), **CHUNKS),
    "paged, threshold": Serving(paged(AMPLE), threshold=6),
    "paged, whole prompts": Serving(paged(AMPLE), **WHOLE),
    "paged, preempted": Serving(paged(TIGHT), happens=("preempted",)),
    "paged, preempted, chunks": Serving(paged(TIGHT), **CHUNKS, happens=("preempted",)),
    "chain": Serving(shared(AMPLE), happens=("hit",)),
    "chain, chunks": Serving(shared(AMPLE), **CHUNKS, happens=("hit",)),
    "chain, preempted": Serving(shared(TIGHT), happens=("hit", "preempted")),
    "chain, preempted, chunks": Serving(shared(TIGHT), **CHUNKS, happens=("hit", "preempted")),
    "chain, 0.11": Serving(shared(TIGHT), rules=RULES["vllm-0.11"], happens=("hit", "preempted")),
    "chain, 0.8": Serving(shared(TIGHT), rules=RULES["vllm-0.8"], happens=("hit", "preempted")),
    "radix": Serving(radix(AMPLE), happens=("hit", "hit copy")),
    "radix, chunks": Serving(radix(AMPLE), **CHUNKS, happens=("hit", "hit copy")),
    "radix, preempted": Serving(radix(TIGHT), happens=("hit", "hit copy", "preempted")),
    "radix, preempted, chunks": Serving(
        radix(TIGHT), **CHUNKS, happens=("hit", "hit copy", "preempted")
    ),
    "priority": Serving(paged(TIGHT), is_by_priority=True, happens=("preempted",)),
    "priority, chain": Serving(shared(TIGHT), is_by_priority=True, happens=("hit", "preempted")),
    "priority, radix": Serving(radix(TIGHT), is_by_priority=True, happens=("hit", "preempted")),
    "max, buddy": Serving(
        lambda: Contiguous(256, BLOCK_SIZE, Buddy(256, 50), reserve=reserve_max(200), limit=200)
    ),
    "static": Serving(
        lambda: Contiguous(
            AMPLE, BLOCK_SIZE, Fit(AMPLE, best_fit), reserve=reserve_max(200), limit=200
        ),
        batching=STATIC,
    ),
    "groups": Serving(**era(AMPLE)),
    "groups, preempted": Serving(**era(TIGHT, happens=("preempted",))),
    "paper, preempted": Serving(**era(TIGHT, mixes=True, happens=("preempted",))),
    "groups, registered": Serving(**registered(TIGHT + 6), happens=("hit", "preempted")),
    "paper, registered": Serving(**registered(TIGHT + 6, mixes=True), happens=("hit",)),
}
PARALLEL = {
    "own blocks": Serving(paged(AMPLE)),
    "own blocks, preempted": Serving(paged(TIGHT), happens=("preempted",)),
    "forks": Serving(shared(AMPLE), happens=("fork", "copy")),
    "forks, chunks": Serving(shared(AMPLE), **CHUNKS, happens=("fork", "copy")),
    "forks, preempted": Serving(shared(TIGHT), happens=("fork", "copy", "preempted")),
    "forks, radix, preempted": Serving(radix(TIGHT), happens=("fork", "copy", "preempted")),
    "groups": Serving(**era(AMPLE, happens=("fork", "copy"))),
    "groups, swapped": Serving(**era(TIGHT_FOR_GROUPS, happens=("fork", "copy", "swap"))),
    "paper, swapped": Serving(
        **era(TIGHT_FOR_GROUPS, mixes=True, happens=("fork", "copy", "swap"))
    ),
}
BEAMS = {
    "beams": Serving(**era(AMPLE, happens=("fork", "copy", "refork"))),
    "beams, swapped": Serving(**era(TIGHT_FOR_BEAMS, happens=("fork", "copy", "refork", "swap"))),
    "beams, paper": Serving(**era(TIGHT_FOR_BEAMS, mixes=True, happens=("fork", "refork", "swap"))),
}
WORKLOADS = {
    "single": mixed_workload,
    "parallel": partial(mixed_workload, num_samples=(3, 1, 2)),
    "beams": mixed_beams,
}
ALL = [
    pytest.param(kind, serving, id=f"{kind}: {name}")
    for kind, servings in (("single", SERVINGS), ("parallel", PARALLEL), ("beams", BEAMS))
    for name, serving in servings.items()
]


@cache
def alone(kind: str) -> Answers:
    return dense_answers(WORKLOADS[kind](), partial(dense_logits, tiny_decoder()), SHAPE.vocab_size)


def assert_happens(log: RunLog, events: tuple[str, ...]) -> None:
    run = expand(log, "paper")
    (replica,) = log.replicas
    counts = {
        "preempted": run.steps["num_preempted"].sum(),
        "hit": run.requests["num_hit"].sum(),
        "hit copy": replica.num_hit_copies,
        "fork": replica.num_forked_blocks,
        "copy": replica.num_copies - replica.num_hit_copies,
        "swap": min(replica.num_swapped_in, replica.num_swapped_out),
        "refork": replica.num_reforks,
    }
    assert all(counts[event] for event in events), counts


def as_sets(answers: Answers) -> dict[int, list[list[int]]]:
    """The beams of each request: which place one ends in is of no meaning."""
    found: dict[int, list[list[int]]] = {}
    for (index, _), said in sorted(answers.items()):
        found.setdefault(index, []).append(said)
    return {index: sorted(beams) for index, beams in found.items()}


@pytest.mark.parametrize(("kind", "serving"), ALL)
def test_an_answer_is_what_it_is_alone(kind, serving):
    log, executor = run_for_real(WORKLOADS[kind](), serving)
    assert (log.outcome <= Outcome.LENGTH).all()
    assert_happens(log, serving.happens)
    answers = executor.model.answers
    if kind == "beams":
        assert as_sets(answers) == as_sets(alone(kind))
    else:
        assert answers == alone(kind)


class Replayed:
    """The simulated executor with the times of a real run, and the beams that its model dropped."""

    def __init__(self, real: Poisoned, output_tokens: list[int]) -> None:
        self._simulated = SimulatedExecutor(Linear(1, 0, 0, 0), output_tokens)
        self._durations_ns = [result.durations_ns[0] for result in real.results]
        self._forks = real.forks

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        clock = plan.decodes.clock  # counts the steps made
        simulated = self._simulated.execute(plan, max_steps)
        durations = self._durations_ns[clock : clock + len(simulated.durations_ns)]
        seqs = {(one.seq.request.index, one.seq.sample): one.seq for one in plan.work}
        forks = [
            Fork(seqs[index, parent], seqs[index, child])
            for index, parent, child in self._forks[clock]
        ]
        return StepResult(durations, simulated.finished, forks)


@pytest.mark.parametrize("jump", [False, True], ids=["steps", "jumps"])
@pytest.mark.parametrize(("kind", "serving"), ALL)
def test_a_simulation_with_the_measured_times_decides_the_same(kind, serving, jump):
    """Every column of every table, times included."""
    workload = WORKLOADS[kind]()
    real, executor = measured(kind, serving)
    simulated = simulate(
        workload, serving.engine(partial(Replayed, executor), jump=jump), route=round_robin()
    )
    assert_same_runs(expand(real, "paper"), expand(simulated, "paper"))


@cache
def measured(kind: str, serving: Serving) -> tuple[RunLog, Poisoned]:
    return run_for_real(WORKLOADS[kind](), serving, None)


def test_parallel_answers_differ():
    answers = alone("parallel")
    pairs = [(answers[index, 0], answers[index, 1]) for index, sample in answers if sample == 1]
    assert sum(left != right for left, right in pairs) > len(pairs) / 2
