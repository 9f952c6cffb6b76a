"""How engines with an iteration-level scheduler differ, as data: versions of vLLM V1, TensorRT-LLM.
What is not named here is the same in all of them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Unchunked(Enum):
    """What becomes of a prompt above the token budget when chunked prefill is off."""

    STOP = "it waits at the head, and so does everyone behind it"
    SKIP = "it is passed over; all passed over go back to the front in reverse order"
    CHUNK = "the switch is ignored: it is chunked"


class Admission(Enum):
    """The room that a request must find to enter."""

    CHUNK = "chunk"  # its first chunk: what follows may preempt
    FULL_PROMPT = "full_prompt"  # all its known tokens, a test only: nothing is set aside
    FULL_PROMPT_AND_MAX_OUTPUT = "full_prompt+max_output"  # until max_tokens, beside what all who
    # run may still take: nobody is ever preempted


class Rules(NamedTuple):
    """keyless_first: freed blocks without a prefix key are reused first, the last freed foremost;
    else all freed blocks queue up, tails first (`is_head_first`: heads first with caching off).
    has_watermark: admission can leave a share of the pool free.
    spares_lone_prefill: long_prefill_token_threshold is ignored while one request is there."""

    keyless_first: bool
    is_head_first: bool
    admission: Admission
    has_watermark: bool
    unchunked: Unchunked
    spares_lone_prefill: bool


RULES = {
    "vllm-0.33": Rules(True, False, Admission.FULL_PROMPT, True, Unchunked.STOP, True),
    "vllm-0.26": Rules(True, False, Admission.FULL_PROMPT, True, Unchunked.STOP, False),
    "vllm-0.20": Rules(False, False, Admission.FULL_PROMPT, False, Unchunked.STOP, False),
    "vllm-0.11": Rules(False, False, Admission.CHUNK, False, Unchunked.SKIP, False),
    "vllm-0.8": Rules(False, True, Admission.CHUNK, False, Unchunked.CHUNK, False),
    "trtllm-guaranteed-no-evict": Rules(
        True, False, Admission.FULL_PROMPT_AND_MAX_OUTPUT, False, Unchunked.STOP, False
    ),
    "trtllm-max-utilization": Rules(
        True, False, Admission.FULL_PROMPT, False, Unchunked.STOP, False
    ),
}
"""vLLM's were seen by running 0.33.0, 0.26.0, 0.20.2, 0.11.0 and 0.8.5 on the same cases.
TensorRT-LLM's are its two capacity policies (its performance guide, "Useful runtime options"): one
never pauses who has started, the other fills the pool and pauses the newest. The rest of the
iteration is vLLM's; TensorRT-LLM's own order of reuse is not modelled."""

LATEST = RULES["vllm-0.33"]
