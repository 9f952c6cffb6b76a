"""The executor over the Triton kernels says what it says over plain torch, however it serves: in
the interpreter, or compiled and with decodes from CUDA graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from gpu_backend.load import Pools, make_pool
from gpu_backend.model import Decoder
from gpu_backend.rope import rope_of
from gpu_backend.sampling import best_beams, draw
from gpu_backend.shape import Shape
from gpu_backend.step import Chunk, Runner, Step
from gpu_backend.torch_runner import TorchRunner
from gpu_backend.triton_runner import Bounds, TritonRunner
from gpu_backend.weights import drawn
from kvsim.engine.batching import STATIC
from kvsim.engine.kv.contiguous import Contiguous, reserve_max
from kvsim.engine.kv.placement import Buddy, Fit, best_fit
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove
from kvsim.errors import UserError
from kvsim.sim.feed import Outcome
from tests.gpu.batches import DEVICE
from tests.gpu_model.cases import BLOCK_SIZE, Serving, mixed_workload, run_for_real
from tests.gpu_model.test_answers import (
    CHUNKS,
    TIGHT,
    as_sets,
    assert_happens,
    era,
    paged,
    radix,
    registered,
    shared,
)

SHAPE = Shape(
    vocab_size=61,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    ffn_size=48,
    num_positions=512,
    rope=rope_of({}, 64, ""),
)
SERVINGS = {
    "preempted": Serving(paged(TIGHT), **CHUNKS, happens=("preempted",)),
    "chain": Serving(shared(TIGHT), happens=("hit", "preempted")),
    "radix": Serving(radix(TIGHT), **CHUNKS, happens=("hit", "hit copy", "preempted")),
    "max, buddy": Serving(
        lambda: Contiguous(256, BLOCK_SIZE, Buddy(256, 50), reserve=reserve_max(200), limit=200)
    ),
    "static": Serving(
        lambda: Contiguous(
            300, BLOCK_SIZE, Fit(300, best_fit), reserve=reserve_max(200), limit=200
        ),
        batching=STATIC,
    ),
    "registered": Serving(**registered(TIGHT + 6, mixes=True), happens=("hit",)),
}
PARALLEL = {
    "forks": Serving(shared(TIGHT), happens=("fork", "copy", "preempted")),
    "swapped": Serving(**era(34, happens=("fork", "copy", "swap"))),
}
BEAMS = {
    "beams": Serving(**era(42, mixes=True, happens=("fork", "copy", "refork", "swap"))),
}
WORKLOADS = {
    "single": partial(mixed_workload, 9),
    "parallel": partial(mixed_workload, 8, num_samples=(3, 1, 2)),
    "beams": partial(mixed_workload, 8, num_samples=(3,), is_beam=True),
}
ALL = [
    pytest.param(kind, serving, id=f"{kind}: {name}")
    for kind, servings in (("single", SERVINGS), ("parallel", PARALLEL), ("beams", BEAMS))
    for name, serving in servings.items()
]


@cache
def decoder() -> Decoder:
    return Decoder(SHAPE, drawn(SHAPE, 3, torch.float32, torch.device(DEVICE)))


def triton_runner(serving: Serving) -> partial:
    bounds = Bounds(serving.max_num_seqs, serving.max_num_batched_tokens, 200)
    return partial(TritonRunner, bounds=bounds)


@pytest.mark.parametrize(("kind", "serving"), ALL)
def test_the_kernels_give_the_tokens_of_plain_torch(kind, serving):
    workload = WORKLOADS[kind]()
    answers = []
    for runner in (TorchRunner, triton_runner(serving)):
        log, executor = run_for_real(workload, serving, make_decoder=decoder, runner=runner)
        assert (log.outcome <= Outcome.LENGTH).all()
        assert_happens(log, serving.happens)
        found = executor.model.answers
        answers.append(as_sets(found) if kind == "beams" else found)
    assert answers[0] == answers[1]


POOLS, BOUNDS = Pools(300, 4, 8), Bounds(24, 128, 200)
MOVES = [BlockMove(SWAP_OUT, 0, 5), BlockMove(COPY, 1, 0), BlockMove(SWAP_IN, 5, 1)]


def runner_and_pools(make: Callable[..., Runner]) -> tuple[Runner, tuple[Tensor, Tensor]]:
    """Over pools of its own, full of the same random KV every time."""
    pools = make_pool(decoder(), POOLS)
    runner, random = make(decoder(), *pools), torch.Generator().manual_seed(4)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=random))
    return runner, pools


def triton_and_pools() -> tuple[TritonRunner, tuple[Tensor, Tensor]]:
    return runner_and_pools(partial(TritonRunner, bounds=BOUNDS))


def decodes(num_seqs: int, random: np.random.Generator, *, num_padding: int = 0) -> Step:
    """At contexts of up to 40 tokens, in scattered blocks."""
    tables = random.permutation(270)[: 10 * num_seqs].reshape(num_seqs, 10) + 22
    contexts = random.integers(1, 41, num_seqs)
    slots = tables[np.arange(num_seqs), (contexts - 1) // 4] * 4 + (contexts - 1) % 4
    tokens = random.integers(0, SHAPE.vocab_size, num_seqs)
    return Step(tokens, contexts - 1, slots, contexts, tables, [], np.arange(num_seqs), num_padding)


def with_chunk(step: Step, num_new: int, context: int) -> Step:
    """A chunk in blocks 2 and following, its last row wanted too."""
    positions = np.arange(context - num_new, context)
    return step._replace(
        tokens=np.concatenate([step.tokens, positions % SHAPE.vocab_size]),
        positions=np.concatenate([step.positions, positions]),
        slots=np.concatenate([step.slots, positions + 8]),
        chunks=[Chunk(num_new, context, [*range(2, 2 - (-context // 4))])],
        rows=np.append(step.rows, len(step.tokens) + num_new - 1),
    )


def test_a_step_of_any_size_has_the_logits_and_kv_of_plain_torch():
    """Of buckets full and not, with padding, chunks and moves; a bucket after larger ones."""
    plain, plain_pools = runner_and_pools(TorchRunner)
    triton, triton_pools = triton_and_pools()
    random = np.random.default_rng(5)
    steps = [decodes(count, random) for count in (24, 5, 1, 0)]
    steps += [decodes(3, random, num_padding=9), with_chunk(decodes(0, random), 7, 30)]
    steps += [with_chunk(decodes(2, random), 5, 5)._replace(num_padding=3)]
    for step in steps:
        wanted = plain.run(MOVES, step, [step.rows])
        for staging in (triton._decode_staging, triton._staging):
            staging._host.fill_(0x7F)  # what other steps leave there is of no meaning
        found = triton.run(MOVES, step, [step.rows])
        torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)
        assert (triton.read(found.sent[0]) == step.rows).all()
        assert (triton.read(found.likeliest) == plain.read(wanted.likeliest)).all()
        for mine, other in zip(triton_pools, plain_pools, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_a_decode_on_a_gpu_neither_waits_nor_allocates():
    triton, _ = triton_and_pools()
    random = np.random.default_rng(6)
    steps = [decodes(count, random) for count in (24, 7, 1)]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in steps:
        torch.cuda.set_sync_debug_mode("error")
        ran = triton.run(MOVES, step, [step.rows])
        torch.cuda.set_sync_debug_mode("default")
        triton.read(ran.likeliest)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_neither_chunks_nor_sampling_wait_on_a_gpu():
    triton, _ = triton_and_pools()
    step = with_chunk(decodes(2, np.random.default_rng(7)), 9, 50)
    luck = np.array([0.2, 0.4, 0.9])
    torch.cuda.set_sync_debug_mode("error")
    ran = triton.run([], step, [luck])
    drawn, found = draw(ran.logits, *ran.sent), best_beams(ran.logits, *ran.sent, 2)
    torch.cuda.set_sync_debug_mode("default")
    assert len(triton.read(ran.likeliest)) == 3
    on_host = ran.logits.cpu(), torch.from_numpy(luck)
    assert (triton.read(drawn) == draw(*on_host).numpy()).all()
    assert (triton.read(found)[:2] == best_beams(*on_host, 2)[:2].numpy()).all()


def test_a_pool_that_leaves_no_room_for_a_step_is_refused(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Decoder, "logits", full)
    with pytest.raises(UserError, match="300 blocks leave no room for steps of 128 tokens"):
        triton_and_pools()
