"""Step-time models: what a step computes in, nanoseconds out."""

from __future__ import annotations

from typing import Protocol

from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove

PS_PER_NS, PS_PER_US, PS_PER_MS = 1_000, 1_000_000, 1_000_000_000


class LatencyModel(Protocol):
    def step_ns(
        self,
        num_prompt_tokens: int,
        num_seqs: int,
        context: int,
        num_decodes: int,
        num_steps: int,
        moves: list[BlockMove] | tuple[()] = (),
    ) -> list[int]:
        """Durations of num_steps repeats of a step with this load (plan.load_of), whose context
        grows by num_decodes in each. Moves go with a single step, which makes them first."""
        ...


class Linear:
    """base + prompt_step (if any prompt) + per_prompt_token * prompt tokens + per_seq * sequences
    + per_context_token * context, the form that DistServe (Zhong et al. 2024) fits; and a time for
    each block moved, swapped in, swapped out or copied, one after the other and before the work.

    Coefficients are kept in whole picoseconds, so that every sum is exact; a step is rounded to
    nanoseconds, and takes one at least. Not modelled: quadratic attention of long prompts,
    kernel-choice steps, padding of graphs, moves that overlap with work or with each other.
    """

    def __init__(
        self,
        base_ms: float,
        per_seq_ms: float,
        per_context_token_us: float,
        per_prompt_token_ms: float,
        prompt_step_ms: float = 0.0,
        *,
        swap_in_block_us: float = 0.0,
        swap_out_block_us: float = 0.0,
        copy_block_us: float = 0.0,
    ) -> None:
        self._base_ps = max(round(base_ms * PS_PER_MS), PS_PER_NS)
        self._per_seq_ps = round(per_seq_ms * PS_PER_MS)
        self._per_context_token_ps = round(per_context_token_us * PS_PER_US)
        self._per_prompt_token_ps = round(per_prompt_token_ms * PS_PER_MS)
        self._prompt_step_ps = round(prompt_step_ms * PS_PER_MS)
        self._block_ps = {
            SWAP_IN: round(swap_in_block_us * PS_PER_US),
            SWAP_OUT: round(swap_out_block_us * PS_PER_US),
            COPY: round(copy_block_us * PS_PER_US),
        }

    def step_ns(
        self,
        num_prompt_tokens: int,
        num_seqs: int,
        context: int,
        num_decodes: int,
        num_steps: int,
        moves: list[BlockMove] | tuple[()] = (),
    ) -> list[int]:
        slope = self._per_context_token_ps
        first = self._base_ps + self._per_seq_ps * num_seqs + slope * context + PS_PER_NS // 2
        if num_prompt_tokens:
            first += self._prompt_step_ps + self._per_prompt_token_ps * num_prompt_tokens
        if num_steps == 1:
            if moves:
                first += sum(self._block_ps[move.kind] for move in moves)
            return [first // PS_PER_NS]
        rise = slope * num_decodes
        if not rise:
            return [first // PS_PER_NS] * num_steps
        return [ps // PS_PER_NS for ps in range(first, first + rise * num_steps, rise)]
