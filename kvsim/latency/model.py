"""Step-time models: what a step computes in, nanoseconds out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvsim.engine.plan import StepLoad

MS, US = 1e6, 1e3
FEW = 8  # up to here a loop is faster than numpy; both give the same bits


class LatencyModel(Protocol):
    def step_ns(self, load: StepLoad, num_decodes: int, num_steps: int) -> list[int]:
        """Durations of num_steps repeats of a step, whose context grows by num_decodes each."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """base + prompt_step (if any prompt) + per_prompt_token * prompt tokens + per_seq * sequences
    + per_context_token * context, the form that DistServe (Zhong et al. 2024) fits.

    base_ms is at least a nanosecond, so that time passes. Not modelled: quadratic attention of
    long prompts, kernel-choice steps, padding of graphs.
    """

    base_ms: float
    per_seq_ms: float
    per_context_token_us: float
    per_prompt_token_ms: float
    prompt_step_ms: float = 0.0

    def step_ns(self, load: StepLoad, num_decodes: int, num_steps: int) -> list[int]:
        fixed = self.base_ms * MS + self.per_seq_ms * MS * load.num_seqs
        if load.num_prompt_tokens:
            fixed += self.prompt_step_ms * MS
            fixed += self.per_prompt_token_ms * MS * load.num_prompt_tokens
        slope = self.per_context_token_us * US
        context = load.context
        if num_steps == 1:
            return [round(fixed + slope * context)]
        end = context + num_decodes * num_steps
        if num_steps <= FEW:
            return [round(fixed + slope * tokens) for tokens in range(context, end, num_decodes)]
        contexts = np.arange(context, end, num_decodes)
        return np.rint(fixed + slope * contexts).astype(np.int64).tolist()
