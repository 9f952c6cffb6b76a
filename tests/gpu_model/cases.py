"""Small workloads on a small model, and every way to serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from gpu_backend.executor import ModelExecutor
from gpu_backend.load import Pools
from gpu_backend.model import Decoder
from gpu_backend.rope import rope_of
from gpu_backend.sampling import Luck, draw
from gpu_backend.shape import Shape
from gpu_backend.step import Runner
from gpu_backend.texts import Texts
from gpu_backend.torch_runner import TorchRunner
from gpu_backend.weights import drawn
from kvsim.engine.batching import CONTINUOUS, Batching
from kvsim.engine.groups import PaperEra
from kvsim.engine.kv.contiguous import Contiguous
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.engine.plan import Executor, StepPlan, StepResult
from kvsim.engine.request import Request, merged
from kvsim.engine.rules import LATEST, Rules
from kvsim.sim.feed import round_robin
from kvsim.sim.run import Engine, RunLog, simulate
from kvsim.workload.workload import Workload, answer_stream, columns

SEED = 3
BLOCK_SIZE = 4
MS = 1_000_000
MOST_STEPS = 1_500
SHAPE = Shape(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_size=48,
    num_positions=512,
    rope=rope_of({}, 8, ""),
)
Answers = dict[tuple[int, int], list[int]]
LogitsOf = Callable[[list[int]], torch.Tensor]
"""Logits [T, V] of every position of a text."""


def tiny_decoder() -> Decoder:
    """In float64, so that no two logits tie however a batch is summed."""
    return Decoder(SHAPE, drawn(SHAPE, SEED, torch.float64, torch.device("cpu")))


@dataclass(frozen=True, eq=False)
class Serving:
    """A way to serve: cache, scheduler, limits; and what must happen for the case to be one."""

    make_kv: Callable[[], KVCachePolicy]
    batching: Batching = CONTINUOUS
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 48
    chunked_prefill: bool = True
    threshold: int = 0
    is_by_priority: bool = False
    rules: Rules = LATEST
    paper_era: PaperEra | None = None
    registered: dict[int, int] = field(default_factory=dict)
    happens: tuple[str, ...] = ()

    def engine(self, make_executor: Callable[[list[int]], Executor], *, jump: bool) -> Engine:
        return Engine(
            make_kv=self.make_kv,
            make_executor=make_executor,
            batching=self.batching,
            max_model_len=200,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunked_prefill=self.chunked_prefill,
            long_prefill_token_threshold=self.threshold,
            is_by_priority=self.is_by_priority,
            rules=self.rules,
            paper_era=self.paper_era,
            jump=jump,
        )


class Poisoned:
    """A model's executor whose pools begin as NaN. With `step_ns` steps take that long, whatever
    they took, so that a case is the same every time."""

    def __init__(self, executor: ModelExecutor, step_ns: int | None) -> None:
        executor.kv.fill_(torch.nan)
        executor.host_kv.fill_(torch.nan)
        self.model = executor
        self.results: list[StepResult] = []
        self.forks: dict[int, list[tuple[int, int, int]]] = {}  # by clock: request, parent, child
        self._step_ns = step_ns

    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        assert len(self.results) < MOST_STEPS, "the case does not end"
        result = self.model.execute(plan, max_steps)
        if self._step_ns is not None:
            result = result._replace(durations_ns=[self._step_ns])
        self.results.append(result._replace(durations_ns=list(result.durations_ns)))
        self.forks[plan.decodes.clock] = [
            (parent.request.index, parent.sample, child.sample) for parent, child in result.forks
        ]
        return result


def run_for_real(
    workload: Workload,
    serving: Serving,
    step_ns: int | None = 10 * MS,
    *,
    make_decoder: Callable[[], Decoder] = tiny_decoder,
    make_model: Callable[..., ModelExecutor] = ModelExecutor,
    runner: Callable[..., Runner] = TorchRunner,
) -> tuple[RunLog, Poisoned]:
    executors: list[Poisoned] = []
    kv = serving.make_kv()
    host = serving.paper_era.num_host_blocks if serving.paper_era else 0
    pools = Pools(kv.num_blocks, kv.block_size, host)

    def make(output_tokens: list[int]) -> Poisoned:
        registered = {stream: n * kv.block_size for stream, n in serving.registered.items()}
        model = make_model(
            make_decoder(),
            pools,
            output_tokens,
            seed=SEED,
            registered=registered,
            make_runner=partial(runner, is_contiguous=isinstance(kv, Contiguous)),
        )
        executors.append(Poisoned(model, step_ns))
        return executors[0]

    log = simulate(workload, serving.engine(make, jump=True), route=round_robin())
    return log, executors[0]


def requests_of(workload: Workload) -> list[Request]:
    return [
        Request(row, merged(workload.prompt(row)), int(workload.prompt_tokens[row]))
        for row in range(len(workload))
    ]


def dense_answers(workload: Workload, logits_of: LogitsOf, vocab_size: int) -> Answers:
    """Every answer by itself: its whole text computed anew for each token."""
    output_tokens = workload.answer_tokens().tolist()
    texts, luck = Texts(SEED, vocab_size), Luck(SEED, output_tokens)
    for request in requests_of(workload):
        index, width = request.index, int(workload.num_samples[request.index])
        prompt = texts.prompt(request).tolist()
        if workload.is_beam:
            for sample, said in enumerate(searched(logits_of, prompt, output_tokens[index], width)):
                texts.answers[index, sample] = said
            continue
        for sample in range(width):
            said = texts.answers[index, sample] = []
            for place in range(output_tokens[index]):
                logits = logits_of(prompt + said)[-1:]
                token = int(logits.argmax())
                if width > 1:
                    at = torch.tensor([luck.of((index, sample), place)], dtype=torch.float64)
                    token = int(draw(logits, at))
                said.append(token)
    return texts.answers


def searched(
    logits_of: LogitsOf, prompt: list[int], num_tokens: int, width: int
) -> list[list[int]]:
    """Beam search as written down: of all continuations of all beams the likeliest `width`."""
    beams = [(0.0, [])]
    for _ in range(num_tokens):
        found = []
        for score, said in beams:
            steps = logits_of(prompt + said)[-1].log_softmax(-1).tolist()
            found += [(score + step, [*said, token]) for token, step in enumerate(steps)]
        beams = sorted(found, reverse=True)[:width]
    return [said for _, said in beams]


def mixed_workload(
    num_requests: int = 14,
    *,
    num_samples: tuple[int, ...] = (1,),
    is_beam: bool = False,
    seed: int = 11,
) -> Workload:
    """Prompts that share heads of two streams, at whole blocks and inside of them, equal prompts,
    and every third a follow-up that quotes the answer before it."""
    generator = np.random.default_rng(seed)
    spans, prompt, output, after = [], [], [], []
    for row in range(num_requests):
        own = 1000 + row
        if row % 3 == 2 and not is_beam:
            quoted = row - 1
            parts = [*spans[quoted], (answer_stream(quoted), 0, output[quoted]), (own, 0, 5)]
            after.append(quoted)
        else:
            head = [(row % 2, 0, int(generator.integers(3, 30)))]
            parts = head if row % 5 == 0 else [*head, (own, 0, int(generator.integers(1, 14)))]
            after.append(-1)
        spans.append(parts)
        prompt.append(sum(length for _, _, length in parts))
        output.append(int(generator.integers(1, 18)))
    rows = [span for parts in spans for span in parts]
    samples = [num_samples[row % len(num_samples)] for row in range(num_requests)]
    return columns(
        np.arange(num_requests) * 2 * MS,
        np.array(prompt),
        np.array(output),
        after=np.array(after),
        think_ns=np.full(num_requests, 9 * MS),
        num_samples=np.array(samples),
        priority=np.arange(num_requests) * 5 % 3,
        spans=np.array(rows, np.int64),
        span_offsets=np.cumsum([0, *(len(parts) for parts in spans)]),
        is_beam=is_beam,
    )


mixed_beams = partial(mixed_workload, 16, num_samples=(3,), is_beam=True)
