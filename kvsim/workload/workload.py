"""A workload: requests as columns, with shared prompt text as spans of token streams."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvsim.engine.request import Span, answer_stream


@dataclass(frozen=True, slots=True)
class Workload:
    """N requests in order of arrival (rows with `after` stand anywhere behind their predecessor).

    arrival_ns, prompt_tokens, output_tokens, num_samples, after, think_ns, session, max_tokens,
    priority: int64 [N]. `output_tokens` are the true answer lengths: they go to the executor and to
    the oracle reservations, never to a scheduler. A row with `after[i] = j >= 0` is closed-loop: it
    arrives `think_ns[i]` after request j has finished, and its `arrival_ns` is not used. `session`
    is -1 where the source has none. `max_tokens` is the client's limit of an answer, which ends
    there (-1: the model's maximum); lower `priority` goes first where the engine heeds it.

    `spans` int64 [M, 3] are (stream, start, length) and `span_offsets` int64 [N + 1] cut them into
    prompts; a prompt's spans add up to its `prompt_tokens`. Streams >= 0 are prompt text; the
    answer of request j is the stream `answer_stream(j)`. Both are None when no prompt shares text.

    With `is_beam` the num_samples of a request are the beams of a beam search, all of its answer's
    length.

    `notes` are sentences for the user: what was counted, estimated, dropped or assumed.
    """

    arrival_ns: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    num_samples: np.ndarray
    after: np.ndarray
    think_ns: np.ndarray
    session: np.ndarray
    max_tokens: np.ndarray
    priority: np.ndarray
    request_ids: list[str] | None = None
    spans: np.ndarray | None = None
    span_offsets: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)
    is_beam: bool = False

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def prompt(self, index: int) -> tuple[Span, ...]:
        """The spans of prompt `index`; a private stream of its own where no text is shared."""
        if self.spans is None or self.span_offsets is None:
            return (Span(index, 0, int(self.prompt_tokens[index])),)
        rows = self.spans[self.span_offsets[index] : self.span_offsets[index + 1]].tolist()
        return tuple(Span(*row) for row in rows)

    def answer_tokens(self) -> np.ndarray:
        """Answer lengths int64 [N], cut at max_tokens."""
        limit = np.where(self.max_tokens < 0, self.output_tokens, self.max_tokens)
        return np.minimum(self.output_tokens, limit)

    def request_id(self, index: int) -> str:
        return self.request_ids[index] if self.request_ids is not None else str(index)


def columns(
    arrival_ns: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray, **rest: object
) -> Workload:
    """A Workload whose columns left out hold their neutral value: one sample, open loop."""
    n = len(prompt_tokens)
    neutral: dict[str, object] = {
        "num_samples": np.ones(n, np.int64),
        "after": np.full(n, -1, np.int64),
        "think_ns": np.zeros(n, np.int64),
        "session": np.full(n, -1, np.int64),
        "max_tokens": np.full(n, -1, np.int64),
        "priority": np.zeros(n, np.int64),
    }
    return Workload(
        np.asarray(arrival_ns, np.int64),
        np.asarray(prompt_tokens, np.int64),
        np.asarray(output_tokens, np.int64),
        **(neutral | rest),  # type: ignore[arg-type]
    )


__all__ = ["Workload", "answer_stream", "columns"]
