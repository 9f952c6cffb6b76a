"""Mooncake rows written just as the published files write them, read in bulk.

A shortcut of mooncake's reader and never more lenient: any other way to write a row (another order
of keys, a fraction, a blank line, a number with a leading zero) is left to the JSON parser.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

HEAD = b'{"timestamp": , "input_length": , "output_length": , "hash_ids": ['  # without its digits
TAIL = b"]}"
DIGITS = b"0123456789"
NUMBERS_ONLY = bytes(set(range(256)) - set(DIGITS + b",\n"))
NEWLINE_IS_COMMA = bytes.maketrans(b"\n", b",")
POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


class PlainRows(NamedTuple):
    """int64 [n] columns; `ids` holds the hash ids of all rows end to end, `counts` how many."""

    timestamps: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    ids: np.ndarray
    counts: np.ndarray


def plain_rows(lines: list[str]) -> PlainRows | None:
    """The rows, or None where one is not written plainly or has no ids."""
    text = "\n".join(lines).encode()
    marks = text.translate(None, DIGITS)
    edge = TAIL + b"\n" + HEAD
    is_framed = marks.startswith(HEAD) and marks.endswith(TAIL)
    if not is_framed or marks.count(edge) != len(lines) - 1:
        return None
    commas = marks[len(HEAD) : -len(TAIL)].replace(edge, b"\n")  # ", " an id but the first
    if commas.replace(b", ", b"") != b"\n" * (len(lines) - 1):
        return None
    numbers = text.translate(NEWLINE_IS_COMMA, NUMBERS_ONLY)
    if b",," in numbers or numbers.startswith(b",") or numbers.endswith(b","):
        return None
    values = np.fromstring(numbers, np.int64, sep=",")
    counts = np.array([len(row) // 2 + 1 for row in commas.split(b"\n")], np.int64)
    num_digits = int((np.searchsorted(POWERS, values, side="right") + 1).sum())
    if len(values) != counts.sum() + 3 * len(lines) or num_digits != len(text) - len(marks):
        return None  # a gap, a leading zero, or more digits than an int64 has
    if values.max() >= POWERS[-1]:
        return None
    starts = np.cumsum(counts + 3) - (counts + 3)
    is_id = np.ones(len(values), bool)
    for place in range(3):
        is_id[starts + place] = False
    return PlainRows(values[starts], values[starts + 1], values[starts + 2], values[is_id], counts)
