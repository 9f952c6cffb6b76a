"""What a user asked (Request) and one generation of it (Sequence)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Span(NamedTuple):
    """`length` tokens of token stream `stream`, from position `start` on."""

    stream: int
    start: int
    length: int


def answer_stream(index: int) -> int:
    """The token stream that the (first) answer of request `index` writes; always below -1, since
    Python hashes -1 as it hashes -2."""
    return -(index + 2)


def merged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same tokens in as few spans as possible: one way to write a prompt, so keys can agree."""
    out: list[Span] = []
    for span in spans:
        if span.length == 0:
            continue
        if out and out[-1].stream == span.stream and out[-1].start + out[-1].length == span.start:
            out[-1] = Span(span.stream, out[-1].start, out[-1].length + span.length)
        else:
            out.append(span)
    return tuple(out)


class Request(NamedTuple):
    """What a user asked. It holds no answer length: nothing that schedules may know it.

    `index` is the row of the workload and `prompt` its text as merged spans, `num_samples` the
    parallel answers wanted, or the beams of a beam search (`is_beam`), `max_tokens` the client's
    limit of each. Lower `priority` goes first.
    """

    index: int
    prompt: tuple[Span, ...]
    prompt_tokens: int
    num_samples: int = 1
    max_tokens: int = 1
    priority: int = 0
    is_beam: bool = False


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation of a request, as the engine sees it.

    `num_tokens` are known (prompt and generated), `num_computed` of them have their KV in the
    cache; a step closes part of the gap. While a sequence stands in the decode set (`joined_at`
    >= 0) both are the values of the moment it joined, and the set knows how far it has come since.

    Writers: counts and state, the scheduler and its decode set; `blocks`, `num_sealed`, `keys`,
    the KV policy; `run_start`, `run_end`, the recorder.
    """

    request: Request
    sample: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    state: State = State.WAITING
    order: int = -1  # position in the running batch: rises with every admission, or arrival
    joined_at: int = -1  # clock of the decode set when it joined; -1 outside of it
    num_lost: int = 0  # tokens whose KV the last preemption threw away
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_hit: int = 0  # tokens found in the prefix cache when it was first admitted
    num_resumed_hit: int = 0  # and when it came back from preemptions
    rank: tuple[int, int, int] = (0, 0, 0)  # by priority, submission, sample: lower goes first
    width: int = 1  # seats it takes: the answers that will fork from it
    blocks: list[int] = field(default_factory=list)  # the block table
    host_blocks: list[int] = field(default_factory=list)  # where its KV is while it is swapped
    num_sealed: int = 0  # leading blocks already offered to the prefix index
    keys: list[int] | None = None  # prefix keys of leading full blocks, as far as computed
    key_source: Iterator[int] | None = None
    admitted_ns: int = -1
    run_start: int = -1  # first step of the current run of tokens, one a step
    run_end: int = -1

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.request.prompt_tokens
