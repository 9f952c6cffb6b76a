"""The `spans` column of kvsim's own format: prompts as `stream:start:length` joined by `;`."""

from __future__ import annotations

import re

import numpy as np

from kvsim.engine.request import Span, answer_stream
from kvsim.errors import TraceError
from kvsim.workload.traces.chunk import Chunk
from kvsim.workload.traces.ledger import BadRow

SPAN = r"a?\d{1,18}:\d{1,18}:\d{1,10}"
SPANS = re.compile(f"{SPAN}(?:;{SPAN})*", re.ASCII)
GAPS = (b"::", b":;", b";:", b";;")  # a number missing between two marks


def add_spans(chunk: Chunk, texts: list[str], first_row: int) -> None:
    """Gives the chunk its prompts' spans; `first_row` rows came before it.

    Raises TraceError at the first bad text, even where bad rows are skipped: spans and `after`
    count rows, so one row less would change what the others mean.
    """
    plain = _plain_spans(texts, chunk.prompt_tokens)
    if plain is not None:
        chunk.spans, chunk.span_counts = plain
        return
    spans: list[Span] = []
    counts = np.zeros(len(chunk), np.int64)
    for i, text in enumerate(texts):
        if not text.strip():
            continue
        try:
            row = _row_spans(text.strip(), int(chunk.prompt_tokens[i]), first_row + i)
        except BadRow as fault:
            raise TraceError(f"{chunk.name}:{int(chunk.lines[i])}: {fault.text()}") from None
        counts[i] = len(row)
        spans += row
    if spans:
        chunk.spans = np.array(spans, np.int64).reshape(-1, 3)
        chunk.span_counts = counts


def _plain_spans(texts: list[str], prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """All spans at once where none quotes an answer; None where a closer look is needed."""
    joined = ";".join(filter(None, texts)).encode()
    marks = joined.translate(None, b"0123456789")
    num_spans = marks.count(b";") + 1
    is_plain = marks == b";".join([b"::"] * num_spans) and not any(gap in joined for gap in GAPS)
    if not is_plain or joined[:1] in b":;" or joined[-1:] in b":;":
        return None
    values = np.fromstring(joined.replace(b":", b";"), np.int64, sep=";")
    if len(values) != 3 * num_spans or values.max() >= 10**18:
        return None
    spans = values.reshape(-1, 3)
    counts = np.array([text.count(";") + 1 if text else 0 for text in texts], np.int64)
    ends = np.concatenate([[0], np.cumsum(spans[:, 2])])
    last = np.cumsum(counts)
    has = counts > 0
    if spans[:, 2].max() >= 2**31 or (ends[last] - ends[last - counts] != prompts)[has].any():
        return None
    return spans, counts


def _row_spans(text: str, prompt_tokens: int, row: int) -> list[Span]:
    if not SPANS.fullmatch(text):
        raise BadRow("spans", text, "is not stream:start:length joined by ;")
    spans = [_span(part, row) for part in text.split(";")]
    total = sum(span.length for span in spans)
    if total != prompt_tokens:
        raise BadRow("spans", total, f"tokens where prompt_tokens is {prompt_tokens}")
    return spans


def _span(text: str, row: int) -> Span:
    stream, start, length = text.split(":")
    if not stream.startswith("a"):
        return Span(int(stream), int(start), int(length))
    if int(stream[1:]) >= row:
        raise BadRow("spans", text, "quotes an answer that no earlier row gives")
    return Span(answer_stream(int(stream[1:])), int(start), int(length))
