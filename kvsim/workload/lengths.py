"""How long prompts and answers are, together: pairs drawn from a joint distribution or a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from kvsim.workload.discrete import Discrete, normal_cdf
from kvsim.workload.workload import Workload

LAST_RANK = 1.0 - 1e-12  # so that no sum with a small number rounds up into the next row or cell


class Lengths(NamedTuple):
    """prompt_tokens and output_tokens, int64 [n] each: row i is request i."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray


# (n, generator) -> n pairs. The first k pairs are the same for every n >= k.
Sampler = Callable[[int, np.random.Generator], Lengths]


@dataclass(frozen=True, slots=True, eq=False)
class Coupling:
    """How the rank of an answer's length goes with the rank of its prompt's: a checkerboard copula.

    Ranks are in [0, 1). cells float64 [K, K]: cells[a, b] = P(output rank in the b-th K-th, given
    the prompt rank in the a-th K-th); inside a cell both are uniform and independent. Rows and
    columns add up to 1, so a coupling moves neither marginal. [[1.0]] is independence.
    """

    cells: np.ndarray

    @classmethod
    def from_weights(cls, weights: np.ndarray) -> Coupling:
        """The coupling nearest to weights [K, K] >= 0: rows and columns scaled in turn to sum 1."""
        cells = np.asarray(weights, float)
        for _ in range(50):
            cells = cells / cells.sum(axis=0, keepdims=True)
            cells = cells / cells.sum(axis=1, keepdims=True)
        return cls(cells)

    def output_ranks(self, prompt_ranks: np.ndarray, luck: np.ndarray) -> np.ndarray:
        """Ranks of the answers; `luck` is uniform in [0, 1) and independent of the prompts."""
        size = len(self.cells)
        row = (prompt_ranks * size).astype(np.int64)
        climb = row + np.minimum(luck, LAST_RANK)  # row a climbs from a to a + 1
        knots = (np.cumsum(self.cells, axis=1) + np.arange(size)[:, None]).ravel()
        cell = np.searchsorted(knots, climb, side="right")
        inside = 1.0 - (knots[cell] - climb) / self.cells.ravel()[cell]
        return (cell - row * size + np.clip(inside, 0.0, LAST_RANK)) / size


def gaussian(rank_correlation: float, num_cells: int = 32) -> Coupling:
    """The Gaussian copula with this Spearman correlation, in (-1, 1), cut into cells.

    Its Pearson correlation is 2 sin(pi rank_correlation / 6).
    """
    pearson = 2.0 * math.sin(math.pi * rank_correlation / 6.0)
    normal = NormalDist()
    points = (np.arange(num_cells * 16) + 0.5) / (num_cells * 16)
    x = np.array([normal.inv_cdf(p) for p in points])
    edges = np.array([normal.inv_cdf(b / num_cells) for b in range(1, num_cells)])
    z = (edges[None, :] - pearson * x[:, None]) / math.sqrt(1.0 - pearson**2)
    cells = np.diff(normal_cdf(z), axis=1, prepend=0.0, append=1.0)
    return Coupling.from_weights(cells.reshape(num_cells, 16, num_cells).mean(axis=1))


def independent() -> Coupling:
    return Coupling(np.ones((1, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A joint distribution of (prompt, output) tokens: two marginals and their coupling; a Sampler.

    Where `max_total_tokens` is set an answer is cut to max_total_tokens - prompt, as a context
    limit cuts it; every prompt is shorter than it. `output` is the marginal before that cut;
    `output_as_cut()` after it.
    """

    prompt: Discrete
    output: Discrete
    coupling: Coupling = field(default_factory=independent)
    max_total_tokens: int | None = None

    def __call__(self, num_requests: int, generator: np.random.Generator) -> Lengths:
        ranks, luck = generator.random((num_requests, 2)).T
        prompt = self.prompt.at(ranks)
        output = self.output.at(self.coupling.output_ranks(ranks, luck))
        if self.max_total_tokens is not None:
            output = np.minimum(output, self.max_total_tokens - prompt)
        return Lengths(prompt, output)

    def output_as_cut(self) -> Discrete:
        """The exact marginal of the answers, the cut at max_total_tokens included."""
        if self.max_total_tokens is None:
            return self.output
        values = np.arange(1, self.output.high + 1)
        kept = np.zeros(len(values))
        for prompt, output in self._rows():
            # an answer is longer than y where it was and the prompt leaves room for more than y
            longer = (1.0 - output.up_to(values)) * prompt.up_to(self.max_total_tokens - values - 1)
            kept += longer / len(self.coupling.cells)
        return Discrete(1, 1.0 - kept)

    def total(self) -> Discrete:
        """The exact distribution of prompt + output."""
        low = self.prompt.low + self.output.low
        pmf = np.zeros(self.prompt.high + self.output.high - low + 1)
        for prompt, output in self._rows():
            sums = np.convolve(prompt.pmf(), output.pmf()) / len(self.coupling.cells)
            pmf[prompt.low + output.low - low :][: len(sums)] += sums
        cdf = np.cumsum(pmf)
        if self.max_total_tokens is not None:
            cdf = cdf[: self.max_total_tokens - low + 1]
        cdf[-1] = 1.0
        return Discrete(low, cdf)

    def spearman(self) -> float:
        """The exact rank correlation (ties by mid-ranks), before any cut."""
        x, y = _mid_ranks(self.prompt), _mid_ranks(self.output)
        rows = list(self._rows())
        size = len(rows)
        x_of_row = [row.pmf() @ x[row.low - self.prompt.low :][: len(row.cdf)] for row, _ in rows]
        y_of_row = [row.pmf() @ y[row.low - self.output.low :][: len(row.cdf)] for _, row in rows]
        covariance = float(np.dot(x_of_row, y_of_row)) / size - 0.25
        variances = [d.pmf() @ m**2 - 0.25 for d, m in ((self.prompt, x), (self.output, y))]
        return covariance / math.sqrt(variances[0] * variances[1])

    def _rows(self) -> list[tuple[Discrete, Discrete]]:
        """For each K-th of the prompt ranks: the prompts in it, the answers that go with them."""
        size = len(self.coupling.cells)
        prompts = [_slice(self.prompt, a, size) for a in range(size)]
        in_cell = np.clip(self.output.cdf[None, :] * size - np.arange(size)[:, None], 0.0, 1.0)
        answers = self.coupling.cells @ in_cell
        return [
            (prompt, Discrete(self.output.low, cdf))
            for prompt, cdf in zip(prompts, answers, strict=True)
        ]


def empirical(num_requests: int, generator: np.random.Generator, *, workload: Workload) -> Lengths:
    """Pairs of `workload`, drawn with replacement; a prompt keeps its own answer."""
    row = (generator.random(num_requests) * len(workload)).astype(np.int64)
    return Lengths(workload.prompt_tokens[row], workload.output_tokens[row])


def scaled(
    num_requests: int, generator: np.random.Generator, *, sampler: Sampler, scale: float
) -> Lengths:
    """The pairs of `sampler`, both lengths times `scale` and rounded up."""
    drawn = sampler(num_requests, generator)
    return Lengths(*(np.ceil(tokens * scale).astype(np.int64) for tokens in drawn))


def _slice(marginal: Discrete, index: int, size: int) -> Discrete:
    """`marginal` given that its rank is in the index-th of `size` equal parts; no zeros at ends."""
    cdf = np.clip(marginal.cdf * size - index, 0.0, 1.0)
    first, last = np.searchsorted(cdf, 0.0, side="right"), np.searchsorted(cdf, 1.0, side="left")
    return Discrete(marginal.low + int(first), cdf[first : last + 1])


def _mid_ranks(marginal: Discrete) -> np.ndarray:
    return marginal.cdf - marginal.pmf() / 2
