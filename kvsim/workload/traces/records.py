"""Rows of a file as columns of raw values, and their numbers checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import MISSING, Field


@dataclass(slots=True)
class Records:
    """Rows with line numbers: `columns` by name for CSV, `objects` for JSON Lines."""

    name: str
    lines: np.ndarray
    columns: dict[str, list[Any]]  # text cells, or numbers where a file has types
    objects: list[dict[str, object]] | None = None

    def column(self, name: str) -> Sequence[object]:
        if self.objects is None:
            return self.columns[name]
        return [row.get(name, MISSING) for row in self.objects]

    def keep(self, rows: list[int]) -> None:
        """Narrows to the rows of these positions."""
        self.lines = self.lines[rows]
        self.columns = {name: [col[i] for i in rows] for name, col in self.columns.items()}
        if self.objects is not None:
            self.objects = [self.objects[i] for i in rows]


def checked(records: Records, fields: Sequence[Field], ledger: Ledger) -> list[np.ndarray]:
    """An int64 column a field; rows with a bad value are booked and leave `records` too."""
    raw = [records.column(field.name) for field in fields]
    done = [field.bulk(column) for field, column in zip(fields, raw, strict=True)]
    if all(column is not None for column in done):
        return done  # type: ignore[return-value]
    good: list[int] = []
    rows: list[list[int]] = []
    for i, values in enumerate(zip(*raw, strict=True)):
        try:
            rows.append([field.parse(value) for field, value in zip(fields, values, strict=True)])
            good.append(i)
        except BadRow as fault:
            ledger.bad(records.name, int(records.lines[i]), fault)
    if len(good) < len(records.lines):
        records.keep(good)
    return list(np.array(rows, np.int64).reshape(-1, len(fields)).T)
