"""Bounded robust least squares in logarithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CORNER = 0.05  # errors above count linearly: some rows have uneven lengths or other kernels
STEP = 1e-4
MAX_ROUNDS, MAX_TRIES = 60, 12


class Unknown(NamedTuple):
    """A constant to fit: where it starts, its bounds, and how far it is likely off, as a factor
    (in logarithms): what the rows cannot tell stays at the start."""

    start: float
    low: float
    high: float
    spread: float = 1.0


def solve(
    predicted: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    unknowns: list[Unknown],
    row_weights: np.ndarray,
) -> np.ndarray:
    """Values of the unknowns, all positive, for which predicted(values) is nearest to measured:
    Huber's loss of log(predicted / measured), so of relative errors, with a normal prior of the
    logarithms, minimised by Levenberg and Marquardt's method with numerical derivatives inside the
    bounds. The same input gives the same values."""
    start, low, high = (
        np.log([getattr(u, name) for u in unknowns]) for name in Unknown._fields[:3]
    )
    pull = (CORNER / np.array([u.spread for u in unknowns])) ** 2
    target = np.log(measured)

    def residuals(at: np.ndarray) -> np.ndarray:
        return np.log(predicted(np.exp(at))) - target

    def cost(errors: np.ndarray, at: np.ndarray) -> float:
        size = np.abs(errors)
        huber = np.where(size < CORNER, size**2 / 2, CORNER * (size - CORNER / 2))
        return float(np.sum(row_weights * huber) + np.sum(pull * (at - start) ** 2) / 2)

    at, damping = np.clip(start, low, high), 1e-2
    errors = residuals(at)
    best = cost(errors, at)
    for _ in range(MAX_ROUNDS):
        slopes = _slopes(residuals, errors, at, high)
        weights = row_weights * np.minimum(1, CORNER / np.maximum(np.abs(errors), 1e-12))
        curve = slopes.T @ (weights[:, None] * slopes) + np.diag(pull)
        down = -slopes.T @ (weights * errors) - pull * (at - start)
        free = ~(((at <= low) & (down < 0)) | ((at >= high) & (down > 0)))
        gain = 0.0
        for _ in range(MAX_TRIES):
            move = np.zeros(len(at))
            kept = curve[np.ix_(free, free)]
            move[free] = np.linalg.solve(kept + damping * np.diag(np.diag(kept)), down[free])
            tried = np.clip(at + np.clip(move, -1, 1), low, high)
            then = residuals(tried)
            if (total := cost(then, tried)) < best:
                gain, at, errors, best = best - total, tried, then, total
                damping = max(damping / 5, 1e-6)
                break
            damping *= 4
        if gain < 1e-7 * best:
            break
    return np.exp(at)


def _slopes(
    residuals: Callable[[np.ndarray], np.ndarray],
    errors: np.ndarray,
    at: np.ndarray,
    high: np.ndarray,
) -> np.ndarray:
    """Derivatives [rows, unknowns]."""
    columns = []
    for place in range(len(at)):
        moved = at.copy()
        step = STEP if at[place] + STEP <= high[place] else -STEP
        moved[place] += step
        columns.append((residuals(moved) - errors) / step)
    return np.array(columns).T
