"""What is served is what transformers says, built from the same weights, however it is served."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from gpu_backend.executor import ModelExecutor
from gpu_backend.load import load_decoder
from gpu_backend.model import Decoder
from gpu_backend.texts import Texts
from gpu_backend.torch_runner import TorchRunner
from kvsim.workload.workload import Workload
from tests.gpu_model.cases import SEED, Answers, LogitsOf, dense_answers, requests_of, run_for_real
from tests.gpu_model.dense import dense_logits
from tests.gpu_model.families import FAMILIES, drawn_by_transformers
from tests.gpu_model.test_answers import (
    BEAMS,
    PARALLEL,
    SERVINGS,
    WORKLOADS,
    as_sets,
    assert_happens,
)

TIE = 1e-4  # two best logits nearer than this may come in either order in float32
EVERY = 7  # of the served logits in 16 bits, every so many are computed anew
SERVED = {
    "single": (SERVINGS, ("chain, preempted, chunks", "radix, preempted", "paper, preempted")),
    "parallel": (PARALLEL, ("forks, preempted", "groups, swapped")),
    "beams": (BEAMS, ("beams, swapped",)),
}


def cases(*kinds: str) -> list:
    """The first family in every way, and every family in the ways that do most."""
    first, *others = FAMILIES
    found = []
    for kind in kinds:
        servings, chosen = SERVED[kind]
        pairs = [(first, name) for name in servings]
        pairs += [(family, name) for family in others for name in chosen]
        found += [
            pytest.param(family, kind, servings[name], id=f"{family}: {kind}: {name}")
            for family, name in pairs
        ]
    return found


SIXTEEN_BIT = [
    pytest.param(family, kind, SERVED[kind][0][name], id=f"{family}: {kind}: {name}")
    for family in FAMILIES
    for kind, name in (
        ("single", "radix, preempted"),
        ("parallel", "groups, swapped"),
        ("beams", "beams, swapped"),
    )
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A family's model of transformers, in float32, and the folder it is saved in."""

    @cache
    def build(family: str):
        folder = tmp_path_factory.mktemp("model")
        return drawn_by_transformers(family, folder), str(folder)

    return build


def told_by(model: torch.nn.Module, dtype: torch.dtype) -> LogitsOf:
    model = model.to(dtype)

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].clone()

    return logits


@pytest.mark.parametrize(("family", "kind", "serving"), cases("single"))
def test_greedy_answers_in_float32(built, family, kind, serving):
    model, folder = built(family)
    workload, logits_of = WORKLOADS[kind](), told_by(model, torch.float32)
    decoder = load_decoder(folder, dtype="float32", device="cpu")
    log, executor = run_for_real(workload, serving, make_decoder=lambda: decoder)
    assert_happens(log, serving.happens)
    assert_same_but_for_ties(workload, executor.model.answers, logits_of, decoder.shape.vocab_size)


def assert_same_but_for_ties(
    workload: Workload, answers: Answers, logits_of: LogitsOf, vocab_size: int
) -> None:
    """Every greedy answer is the model's, up to where its two best logits nearly tie; prompts that
    quote answers quote those that were served."""
    assert len(answers) == len(workload)
    texts = Texts(SEED, vocab_size)
    texts.answers = answers
    for request in requests_of(workload):
        said = answers[request.index, 0]
        text = [*texts.prompt(request).tolist(), *said]
        values, tokens = logits_of(text)[request.prompt_tokens - 1 : -1].topk(2)
        for token, best, (first, second) in zip(
            said, tokens.tolist(), values.tolist(), strict=True
        ):
            assert token == best[0] or first - second < TIE


@pytest.fixture(scope="module")
def wanted(built):
    """The answers of a family's model in float64, each by itself."""

    @cache
    def answers(family: str, kind: str) -> Answers:
        model, _ = built(family)
        logits_of = told_by(deepcopy(model), torch.float64)
        return dense_answers(WORKLOADS[kind](), logits_of, model.config.vocab_size)

    return answers


@pytest.mark.parametrize(("family", "kind", "serving"), cases("parallel", "beams"))
def test_drawn_answers_and_beams_in_float64(built, wanted, family, kind, serving):
    """No two cumulated probabilities or scores are near enough there to change places."""
    decoder = load_decoder(built(family)[1], dtype="float64", device="cpu")
    log, executor = run_for_real(WORKLOADS[kind](), serving, make_decoder=lambda: decoder)
    assert_happens(log, serving.happens)
    ours, theirs = executor.model.answers, wanted(family, kind)
    assert (as_sets(ours) == as_sets(theirs)) if kind == "beams" else (ours == theirs)


class Noting(ModelExecutor):
    """Keeps the logits of every token that it makes, with the text that they follow."""

    def __init__(self, *args, make_runner=TorchRunner, **options):
        self.served: list[tuple[list[int], torch.Tensor]] = []
        super().__init__(*args, make_runner=make_runner, **options)
        self._run, self._runner.run = self._runner.run, self._noting

    def _asked(self, seqs):
        self._following = [self._text(seq) for seq in seqs]
        return super()._asked(seqs)

    def _text(self, seq):
        prompt = self.texts.tokens(seq, 0, seq.request.prompt_tokens).tolist()
        return prompt + self.answers.get((seq.request.index, seq.sample), [])

    def _noting(self, moves, step, along):
        ran = self._run(moves, step, along)
        self.served += zip(self._following, ran.logits.double(), strict=True)
        return ran


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "kind", "serving"), SIXTEEN_BIT)
def test_16_bit_logits_as_served(built, family, kind, serving, dtype):
    """As near to the exact logits of the same weights and text as those of transformers are: at
    most 1.5 times as far, since rounding differs with the order of sums."""
    model, folder = built(family)
    decoder = load_decoder(folder, dtype=dtype, device="cpu")
    exact = Decoder(decoder.shape, {name: one.double() for name, one in decoder.weights.items()})
    logits_of = told_by(deepcopy(model), getattr(torch, dtype))
    log, executor = run_for_real(
        WORKLOADS[kind](), serving, make_decoder=lambda: decoder, make_model=Noting
    )
    assert_happens(log, serving.happens)
    ours, theirs = [], []
    for text, row in executor.model.served[::EVERY]:
        right = dense_logits(exact, text)[-1]
        ours.append(row - right)
        theirs.append(logits_of(text)[-1].double() - right)
    assert rms(ours) < 1.5 * rms(theirs)


def rms(errors: list[torch.Tensor]) -> float:
    return float(torch.stack(errors).pow(2).mean().sqrt())
