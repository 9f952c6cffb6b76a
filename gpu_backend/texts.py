"""The tokens of a run: prompts drawn from their spans, answers as they were generated."""

from __future__ import annotations

import numpy as np

from kvsim.engine.request import Request, Sequence, Span, answer_stream
from kvsim.errors import UserError
from kvsim.workload.chance import rng_of
from kvsim.workload.workload import Workload

PAGE = 1024  # tokens of a stream that are drawn together

AnswerKey = tuple[int, int]
"""Request index and sample."""


class Texts:
    """Token ids by position. A token of a prompt depends on its place in its stream alone, so equal
    spans are equal tokens; a span of an answer's stream is what the answer's first sample has said.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.answers: dict[AnswerKey, list[int]] = {}
        self._seed = seed
        self._vocab_size = vocab_size
        self._prompts: dict[int, np.ndarray] = {}

    def tokens(self, seq: Sequence, start: int, count: int) -> np.ndarray:
        """Tokens int64 [count] of a sequence from position `start` on."""
        request, end = seq.request, start + count
        prompt = self._prompts.get(request.index)
        if prompt is None:
            prompt = self._prompts[request.index] = self.prompt(request)
        if end <= len(prompt):
            return prompt[start:end]
        answer = self.answers[request.index, seq.sample]
        said = answer[max(start - len(prompt), 0) : end - len(prompt)]
        tail = np.array(said, np.int64)
        return np.concatenate([prompt[start:], tail]) if start < len(prompt) else tail

    def forget(self) -> None:
        """Drop every prompt and answer, so that request indices may be used again."""
        self._prompts.clear()
        self.answers.clear()

    def prompt(self, request: Request) -> np.ndarray:
        return np.concatenate([self.span(span) for span in request.prompt])

    def span(self, span: Span) -> np.ndarray:
        stream, start, length = span
        if stream >= 0:
            return self._drawn("prompt", stream, start, length)
        index = answer_stream(0) - stream
        said = self.answers.get((index, 0), [])[start : start + length]
        missing = length - len(said)  # an answer that was cut short, or refused
        if not missing:
            return np.array(said, np.int64)
        rest = self._drawn("answer", index, start + len(said), missing)
        return np.concatenate([np.array(said, np.int64), rest])

    def _drawn(self, kind: str, stream: int, start: int, length: int) -> np.ndarray:
        first, last = start // PAGE, (start + length - 1) // PAGE
        pages = [
            rng_of(self._seed, f"{kind} tokens, page {page}", stream).integers(
                0, self._vocab_size, PAGE
            )
            for page in range(first, last + 1)
        ]
        begin = start - first * PAGE
        return np.concatenate(pages)[begin : begin + length]


def check_quotes(workload: Workload) -> None:
    """Raise UserError where a prompt quotes an answer that it does not wait for: its tokens may not
    be there yet."""
    if workload.spans is None or workload.span_offsets is None:
        return
    rows = np.flatnonzero(workload.spans[:, 0] < 0)
    requests = np.searchsorted(workload.span_offsets, rows, side="right") - 1
    for row, request in zip(rows.tolist(), requests.tolist(), strict=True):
        quoted = answer_stream(0) - int(workload.spans[row, 0])
        before = int(workload.after[request])
        while before not in (quoted, -1):
            before = int(workload.after[before])
        if before != quoted:
            raise UserError(
                f"workload: request {workload.request_id(request)} quotes the answer of request "
                f"{workload.request_id(quoted)} without waiting for it: a real run has to generate "
                "that first"
            )
