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


def draw(logits: Tensor, luck: list[float]) -> list[int]:
    """A token for each row of logits [R, V], at temperature 1: the first whose cumulated
    probability, in float64, exceeds the row's luck."""
    heights = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    at = torch.tensor(luck, dtype=torch.float64, device=logits.device)[:, None]
    places = torch.searchsorted(heights, at * heights[:, -1:], right=True)
    return places.squeeze(1).clamp_(max=logits.shape[1] - 1).tolist()


class Candidate(NamedTuple):
    """A token that continues beam `parent`, and the summed log-probability of all it has said."""

    parent: int
    token: int
    score: float


def best_beams(logits: Tensor, scores: list[float], width: int) -> list[Candidate]:
    """The `width` likeliest continuations, best first, of beams with logits [K, V] and scores."""
    steps = logits.log_softmax(dim=-1, dtype=torch.float64)
    known = torch.tensor(scores, dtype=torch.float64, device=logits.device)
    values, places = (steps + known[:, None]).flatten().topk(width)
    vocab_size = logits.shape[1]
    return [
        Candidate(place // vocab_size, place % vocab_size, value)
        for place, value in zip(places.tolist(), values.tolist(), strict=True)
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
