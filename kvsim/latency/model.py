"""Step-time models: what a step computes in, nanoseconds out."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove

PS_PER_NS, PS_PER_US, PS_PER_MS = 1_000, 1_000_000, 1_000_000_000


class LatencyModel(Protocol):
    def step_ns(
        self,
        num_prompt_tokens: int,
        num_seqs: int,
        context: int,
        num_chunks: int,
        num_pairs: int,
        num_decodes: int,
        num_steps: int,
        moves: list[BlockMove] | tuple[()] = (),
    ) -> list[int]:
        """Durations of num_steps repeats of a step with this load (the first five: plan.load_of),
        whose context grows by num_decodes in each. Moves go with a single step, which makes them
        first."""
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
        self._block_ps = block_ps(swap_in_block_us, swap_out_block_us, copy_block_us)

    def step_ns(
        self,
        num_prompt_tokens: int,
        num_seqs: int,
        context: int,
        num_chunks: int,
        num_pairs: int,
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


class Tabulated:
    """A table of times by the tokens that a step computes: one for steps of decodes alone, one for
    steps with prompts, decodes and prompts counted together; straight lines between entries and on
    from the last two, but no lower than the last. Then + per_seq * sequences + per_context_token *
    context of the decodes + per_chunk * chunks of prompts + per_pair * pairs of a prompt token and
    one that it attends to; and blocks moved, as in Linear.

    The tables are what linear layers cost: they choose other kernels at other sizes, and are
    neither linear nor always rising; and on a GPU decodes alone may be launched as a graph. The
    rest is attention, which goes sequence by sequence. Tokens rise from 1 in both. Whole
    picoseconds and rounding as in Linear. Not modelled: attention whose cost depends on how a
    step's context is spread over its sequences, moves that overlap.
    """

    def __init__(
        self,
        tokens: list[int],
        ms: list[float],
        prompt_tokens: list[int],
        prompt_ms: list[float],
        per_seq_ms: float,
        per_context_token_us: float,
        per_chunk_ms: float,
        per_pair_us: float,
        *,
        swap_in_block_us: float = 0.0,
        swap_out_block_us: float = 0.0,
        copy_block_us: float = 0.0,
    ) -> None:
        self._decodes = tokens, [round(entry * PS_PER_MS) for entry in ms]
        self._prompts = prompt_tokens, [round(entry * PS_PER_MS) for entry in prompt_ms]
        self._per_seq_ps = round(per_seq_ms * PS_PER_MS)
        self._per_context_token_ps = round(per_context_token_us * PS_PER_US)
        self._per_chunk_ps = round(per_chunk_ms * PS_PER_MS)
        self._per_pair_ps = round(per_pair_us * PS_PER_US)
        self._block_ps = block_ps(swap_in_block_us, swap_out_block_us, copy_block_us)

    def step_ns(
        self,
        num_prompt_tokens: int,
        num_seqs: int,
        context: int,
        num_chunks: int,
        num_pairs: int,
        num_decodes: int,
        num_steps: int,
        moves: list[BlockMove] | tuple[()] = (),
    ) -> list[int]:
        slope = self._per_context_token_ps
        first = self._per_seq_ps * num_seqs + slope * context + PS_PER_NS // 2
        if num_chunks:
            first += self._per_chunk_ps * num_chunks + self._per_pair_ps * num_pairs
            first += _looked_up(*self._prompts, num_prompt_tokens + num_seqs - num_chunks)
        elif num_seqs:  # or else it only moves blocks
            first += _looked_up(*self._decodes, num_seqs)
        if num_steps == 1 and moves:
            first += sum(self._block_ps[move.kind] for move in moves)
        rise = slope * num_decodes
        return [max((first + rise * n) // PS_PER_NS, 1) for n in range(num_steps)]


def _looked_up(tokens: list[int], table_ps: list[int], num_tokens: int) -> int:
    place = min(bisect_right(tokens, num_tokens), len(tokens) - 1)
    low, high = tokens[place - 1], tokens[place]
    rise = table_ps[place] - table_ps[place - 1]
    if num_tokens > high and rise < 0:  # further down it would become a time below 0
        return table_ps[place]
    return table_ps[place - 1] + rise * (num_tokens - low) // (high - low)


def block_ps(swap_in_us: float, swap_out_us: float, copy_us: float) -> dict[str, int]:
    """Picoseconds for a block moved, by kind of move."""
    times = {SWAP_IN: swap_in_us, SWAP_OUT: swap_out_us, COPY: copy_us}
    return {kind: round(us * PS_PER_US) for kind, us in times.items()}
