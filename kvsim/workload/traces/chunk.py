"""Some rows of a trace as columns, before the whole is known: what readers yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsim.engine.request import Span

NO_TIME = np.iinfo(np.int64).min  # the source gives this row no arrival
PRIVATE = -(1 << 62)  # PRIVATE - j: text that only request j, or a later turn quoting it, has


@dataclass(slots=True)
class Chunk:
    """n rows in file order; a column left out is neutral (see Workload).

    `lines` are line numbers in the file `name` (records for JSON arrays). `arrival_ns` is on the
    source's own clock, NO_TIME where it has none. `after` and answer streams count the rows kept
    since the start of the reading. `spans` int64 [m, 3] hold `span_counts[i]` spans for row i;
    streams are hash ids made dense, answers (negative) or PRIVATE - row.
    """

    name: str
    lines: np.ndarray
    arrival_ns: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    num_samples: np.ndarray | None = None
    after: np.ndarray | None = None
    think_ns: np.ndarray | None = None
    session: np.ndarray | None = None
    max_tokens: np.ndarray | None = None
    priority: np.ndarray | None = None
    ids: list[str] | None = None
    spans: np.ndarray | None = None
    span_counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def head(self, num_rows: int) -> Chunk:
        """The first rows only."""

        def cut(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[:num_rows]

        spans = self.spans
        if spans is not None and self.span_counts is not None:
            spans = spans[: int(self.span_counts[:num_rows].sum())]
        return Chunk(
            self.name,
            self.lines[:num_rows],
            self.arrival_ns[:num_rows],
            self.prompt_tokens[:num_rows],
            self.output_tokens[:num_rows],
            cut(self.num_samples),
            cut(self.after),
            cut(self.think_ns),
            cut(self.session),
            cut(self.max_tokens),
            cut(self.priority),
            None if self.ids is None else self.ids[:num_rows],
            spans,
            cut(self.span_counts),
        )


def private(index: int) -> int:
    """The stream of text that belongs to request `index`."""
    return PRIVATE - index


@dataclass(slots=True)
class Rows:
    """Rows added one at a time, for formats whose rows lean on each other."""

    name: str
    index: int = 0  # rows added since the reading began
    lines: list[int] = field(default_factory=list)
    numbers: list[tuple[int, ...]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    span_counts: list[int] = field(default_factory=list)

    def add(
        self,
        line: int,
        arrival_ns: int,
        prompt_tokens: int,
        output_tokens: int,
        *,
        after: int = -1,
        think_ns: int = 0,
        session: int = -1,
        request_id: str | None = None,
        spans: Sequence[Span] = (),
    ) -> int:
        """Adds a row and returns its index. Long: it has every column of a row, once."""
        self.lines.append(line)
        self.numbers.append((arrival_ns, prompt_tokens, output_tokens, after, think_ns, session))
        if request_id is not None:
            self.ids.append(request_id)
        self.spans.extend(spans)
        self.span_counts.append(len(spans))
        self.index += 1
        return self.index - 1

    def __len__(self) -> int:
        return len(self.lines)

    def take(self) -> Chunk:
        """The rows added since the last take, as a chunk."""
        table = np.array(self.numbers, np.int64).reshape(-1, 6)
        has_spans = bool(self.spans)
        chunk = Chunk(
            self.name,
            np.array(self.lines, np.int64),
            *table.T[:3],
            after=table[:, 3],
            think_ns=table[:, 4],
            session=table[:, 5],
            ids=self.ids or None,
            spans=np.array(self.spans, np.int64).reshape(-1, 3) if has_spans else None,
            span_counts=np.array(self.span_counts, np.int64) if has_spans else None,
        )
        self.lines, self.numbers, self.ids = [], [], []
        self.spans, self.span_counts = [], []
        return chunk
