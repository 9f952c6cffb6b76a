"""How a trace is to be read: the choices a user can make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Strict by default: every leniency below is asked for, and what it did is in `notes`.

    skip_bad_rows leaves bad rows out and counts them by reason. sort orders by arrival where the
    file goes back in time (stable). rebase moves the clock so that the earliest arrival is 0.
    time_unit replaces the format's own unit of numeric time stamps. tokenizer names a tiktoken
    encoding or a Hugging Face tokenizer for formats that hold text; without one tokens are
    estimated. limit keeps the first N requests. block_size replaces the format's tokens a hash id.
    sessions: `closed` lets a turn arrive after the answer before it, `open` at its own stamp; None
    is the format's own way. subagents adds the requests of WEKA's nested agents. seed and
    duration_s (seconds of trace, from its start) are ServeGen's, which is sampled, not replayed.
    """

    skip_bad_rows: bool = False
    sort: bool = False
    rebase: bool = False
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    tokenizer: str | None = None
    limit: int | None = None
    block_size: int | None = None
    sessions: Literal["open", "closed"] | None = None
    subagents: bool = False
    seed: int = 0
    duration_s: float | None = None
