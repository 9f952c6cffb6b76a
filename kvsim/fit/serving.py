"""Time per output token of a closed loop of clients, without simulating it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvsim.latency.demand import Load
from kvsim.latency.roofline import Machine, step_s

TOKEN_BUDGET = 8192  # max_num_batched_tokens of vllm serve on GPUs of 70 GiB and more


class Clients(NamedTuple):
    """Arrays over runs: `concurrency` clients, each of which sends a prompt of prompt_tokens once
    its last answer, of output_tokens, is whole."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    concurrency: np.ndarray


def tpot_s(machine: Machine, clients: Clients) -> np.ndarray:
    """Seconds of a mean step in the steady state, which is what a decoding client waits a token.

    All clients decode, half way through their answers in the mean. In a step concurrency /
    output_tokens of them start anew, so that this share of steps (or every one, of several prompts)
    has a prompt beside the decodes; one above the token budget is spread over more steps. Not
    modelled: clients that wait for memory, whose TTFT is long; arrivals in bunches.
    """
    prompt, output, n = clients
    started = n / output
    prompts = np.maximum(started, 1)
    parts = np.maximum(prompts * prompt / TOKEN_BUDGET, 1)
    new = prompts * prompt / parts
    share = np.minimum(np.minimum(started, 1) * parts, 1)
    context = n * (prompt + output / 2)
    decode = Load(n, n, context, 0 * n, 0 * n)
    mixed = Load(n + new, n, context, prompts, new * prompt / 2)
    return (1 - share) * step_s(machine, decode) + share * step_s(machine, mixed)
