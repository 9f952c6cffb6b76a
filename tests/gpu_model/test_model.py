"""The decoder against transformers, built from the same weights; and its refusals."""

from __future__ import annotations

from copy import deepcopy

import pytest

torch = pytest.importorskip("torch")

from gpu_backend.attention import TorchAttention, segment
from gpu_backend.load import load_decoder
from gpu_backend.model import Batch, Decoder
from tests.gpu_model.dense import dense_logits
from tests.gpu_model.families import FAMILIES, drawn_by_transformers

TIE = 1e-4  # two best logits nearer than this may come in either order in float32
PROMPT = [(7 * place * place + 3 * place + 5) % 96 for place in range(37)]


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """A model of transformers, and the folder it is saved in."""
    folder = tmp_path_factory.mktemp("model")
    return drawn_by_transformers(request.param, folder), folder


every_family = pytest.mark.parametrize("theirs", FAMILIES, indirect=True)


def generate(decoder: Decoder, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """A greedy answer over scattered blocks of a poisoned pool, its prompt in two chunks; and by
    how much the best logit of each token stood above the second."""
    block_size, num_blocks, shape = 4, 40, decoder.shape
    size = (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_size)
    kv = torch.full(size, torch.nan, dtype=decoder.dtype)
    table = torch.randperm(num_blocks)
    tokens, margins, start = list(prompt), [], 0
    for end in (len(prompt) // 3, *range(len(prompt), len(prompt) + count)):
        positions = torch.arange(start, end)
        slots = table[positions // block_size] * block_size + positions % block_size
        held = table[: -(-end // block_size)]
        one = segment(0, end - start, end, held, held.device)
        attend = TorchAttention(slots, [one])
        last = torch.tensor([end - start - 1])
        batch = Batch(torch.tensor(tokens[start:end]), positions, last, attend)
        values, places = decoder.logits(batch, kv)[0].topk(2)
        start = end
        if end >= len(prompt):
            tokens.append(int(places[0]))
            margins.append(float(values[0] - values[1]))
    return tokens[len(prompt) :], margins


@every_family
def test_greedy_answers_are_those_of_transformers(theirs):
    model, folder = theirs
    ours = load_decoder(str(folder), dtype="float32", device="cpu")
    answer, margins = generate(ours, PROMPT, 40)
    told = model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)
    for mine, other, margin in zip(answer, told[0, len(PROMPT) :].tolist(), margins, strict=True):
        if mine != other:
            assert margin < TIE
            break


@every_family
def test_logits_are_those_of_transformers(theirs):
    model, folder = theirs
    ours = load_decoder(str(folder), dtype="float32", device="cpu")
    with torch.inference_mode():
        told = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(dense_logits(ours, PROMPT), told, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_family
def test_16_bit_logits_are_as_near_to_the_exact_ones_as_those_of_transformers(theirs, dtype):
    """Teacher-forced: rounding differs with the order of sums, so each is measured against the
    float64 logits of the same 16-bit weights; ours may be at most 1.5 times as far."""
    model, folder = theirs
    kind = getattr(torch, dtype)
    ours = load_decoder(str(folder), dtype=dtype, device="cpu")
    exact = Decoder(ours.shape, {name: one.double() for name, one in ours.weights.items()})
    with torch.inference_mode():
        told = deepcopy(model).to(kind)(torch.tensor([PROMPT])).logits[0].double()
    wanted = dense_logits(exact, PROMPT)
    mine = (dense_logits(ours, PROMPT).double() - wanted).pow(2).mean().sqrt()
    other = (told - wanted).pow(2).mean().sqrt()
    assert mine < 1.5 * other
