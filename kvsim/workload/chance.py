"""One stream of random numbers for each source of chance."""

from __future__ import annotations

import numpy as np


def rng(seed: int, name: str) -> np.random.Generator:
    """The generator of source `name` under `seed`; a child of the seed, keyed by the name's bytes.

    The same pair gives the same numbers in every process, and what is drawn from one name never
    moves another. `seed` >= 0.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))


def rng_of(seed: int, name: str, index: int) -> np.random.Generator:
    """The generator that thing `index` of source `name` has for itself under `seed`."""
    key = (*name.encode(), 256 + index)  # 256 is no byte, so this is no other name's key
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
