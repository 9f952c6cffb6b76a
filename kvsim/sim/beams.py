"""Which beams survive a step: a stated process, in the place of a model's scores."""

from __future__ import annotations

import numpy as np

from kvsim.engine.plan import Fork
from kvsim.engine.request import Sequence
from kvsim.workload.chance import rng_of


class BeamSurvival:
    """Beam search without a model. The prompt forks into K beams; after each later step each beam
    is dropped with probability `refork_probability`, independently, and forks anew from one of the
    beams kept in that step, drawn uniformly (where all would be dropped, one drawn uniformly is
    kept). All beams end with the request's recorded length; their last step drops none.

    Every request draws from a generator of its own, so what happens to its beams depends on
    nothing else in the run. Not modelled: scores, so survival does not depend on the past, and
    beams that end early.
    """

    def __init__(self, seed: int, refork_probability: float) -> None:
        self._seed = seed
        self._refork_probability = refork_probability
        self._generators: dict[int, np.random.Generator] = {}  # of requests under way

    def forks(self, beams: list[Sequence]) -> list[Fork]:
        """Who is dropped after a step of all beams of one request, and whom it continues."""
        if self._refork_probability == 0:
            return []
        index = beams[0].request.index
        generator = self._generators.get(index)
        if generator is None:
            generator = self._generators[index] = rng_of(self._seed, "beams", index)
        is_kept = (generator.random(len(beams)) >= self._refork_probability).tolist()
        if not any(is_kept):
            is_kept[generator.integers(len(beams))] = True
        kept = [beam for beam, stays in zip(beams, is_kept, strict=True) if stays]
        return [
            Fork(kept[generator.integers(len(kept))], beam)
            for beam, stays in zip(beams, is_kept, strict=True)
            if not stays
        ]

    def ended(self, index: int) -> None:
        """Request `index` has made its last token."""
        self._generators.pop(index, None)
