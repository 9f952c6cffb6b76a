"""Which tokens follow: the best, drawn ones for parallel answers, or a beam search's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_backend.texts import AnswerKey
from kvsim.workload.chance import rng_of


class Luck:
    """A number in [0, 1) for every token of every parallel answer. It depends on request, sample
    and place alone: neither batch nor preemption changes what is drawn."""

    def __init__(self, seed: int, output_tokens: list[int]) -> None:
        self._seed = seed
        self._output_tokens = output_tokens
        self._drawn: dict[AnswerKey, np.ndarray] = {}

    def of(self, key: AnswerKey, place: int) -> float:
        drawn = self._drawn.get(key)
        if drawn is None:
            index, sample = key
            generator = rng_of(self._seed, f"sample {sample}", index)
            drawn = self._drawn[key] = generator.random(self._output_tokens[index])
        return float(drawn[place])


def draw(logits: Tensor, luck: Tensor) -> Tensor:
    """A token int64 [R] for each row of logits [R, V], at temperature 1: the first whose cumulated
    probability, in float64, exceeds the row's luck, float64 [R]."""
    heights = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    places = torch.searchsorted(heights, luck[:, None] * heights[:, -1:], right=True)
    return places.squeeze(1).clamp_(max=logits.shape[1] - 1)


class Candidate(NamedTuple):
    """A token that continues beam `parent`, and the summed log-probability of all it has said."""

    parent: int
    token: int
    score: float


def best_beams(logits: Tensor, scores: Tensor, width: int) -> Tensor:
    """The `width` likeliest continuations, best first, of beams with logits [K, V] and scores
    float64 [K]: int64 [2 * width], their places among K * V and the bits of their scores."""
    steps = logits.log_softmax(dim=-1, dtype=torch.float64)
    values, places = (steps + scores[:, None]).flatten().topk(width)
    return torch.cat((places, values.view(torch.int64)))


def candidates(found: np.ndarray, vocab_size: int) -> list[Candidate]:
    """What `best_beams` found, read back."""
    places, values = found.reshape(2, -1)
    return [
        Candidate(place // vocab_size, place % vocab_size, value)
        for place, value in zip(places.tolist(), values.view(np.float64).tolist(), strict=True)
    ]


def seated(candidates: list[Candidate], num_beams: int) -> list[Candidate]:
    """The candidates in the beams' places: the best of each parent stays in its parent's place, the
    others take those of the beams that nobody continues, in order."""
    seats: list[Candidate | None] = [None] * num_beams
    others = []
    for candidate in candidates:
        if seats[candidate.parent] is None:
            seats[candidate.parent] = candidate
        else:
            others.append(candidate)
    rest = iter(others)
    return [next(rest) if seat is None else seat for seat in seats]
