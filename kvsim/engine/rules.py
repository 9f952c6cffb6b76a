"""How versions of vLLM V1 differ, as data. What is not named here is the same in all of them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Unchunked(Enum):
    """What becomes of a prompt above the token budget when chunked prefill is off."""

    STOP = "it waits at the head, and so does everyone behind it"
    SKIP = "it is passed over; all passed over go back to the front in reverse order"
    CHUNK = "the switch is ignored: it is chunked"


class Rules(NamedTuple):
    """keyless_first: freed blocks without a prefix key are reused first, the last freed foremost;
    else all freed blocks queue up, tails first (`is_head_first`: heads first with caching off).
    reserves_full_prompt: admission asks room for all known tokens; else for the first chunk.
    has_watermark: admission can leave a share of the pool free.
    spares_lone_prefill: long_prefill_token_threshold is ignored while one request is there."""

    keyless_first: bool
    is_head_first: bool
    reserves_full_prompt: bool
    has_watermark: bool
    unchunked: Unchunked
    spares_lone_prefill: bool


RULES = {
    "vllm-0.33": Rules(True, False, True, True, Unchunked.STOP, True),
    "vllm-0.26": Rules(True, False, True, True, Unchunked.STOP, False),
    "vllm-0.20": Rules(False, False, True, False, Unchunked.STOP, False),
    "vllm-0.11": Rules(False, False, False, False, Unchunked.SKIP, False),
    "vllm-0.8": Rules(False, True, False, False, Unchunked.CHUNK, False),
}
"""Seen by running 0.33.0, 0.26.0, 0.20.2, 0.11.0 and 0.8.5 on the same cases."""

LATEST = RULES["vllm-0.33"]
