"""ServeGen's distributions of lengths: Python dicts in strings, parsed and never evaluated."""

from __future__ import annotations

import ast
import math
from typing import NamedTuple

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload.traces.json_rows import decoded
from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.numbers import MAX_TOKENS
from kvsim.workload.traces.source import Source, text_blocks

INPUTS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")
TOLERANCE = 0.01  # upstream's sums are 1 to rounding
SECOND = 10**9


class Pdf(NamedTuple):
    """Token counts, rising, and how likely each is."""

    values: np.ndarray
    chances: np.ndarray


class Lengths(NamedTuple):
    """From `start_ns` on: a prompt is the sum of one draw of each of `inputs`."""

    start_ns: int
    inputs: list[Pdf]
    outputs: Pdf


def read_lengths(source: Source, ledger: Ledger) -> list[Lengths]:
    """The windows of a data set file by time; a window that cannot be read is a bad row."""
    try:
        windows = decoded("".join(text_blocks(source)))
    except BadRow as fault:
        raise TraceError(f"{source.name}: {fault.rule}") from None
    if not isinstance(windows, dict):
        raise TraceError(f"{source.name}: not a JSON object of windows")
    found = []
    ledger.read += len(windows)
    for key, window in windows.items():
        try:
            found.append(_lengths(key, window))
        except BadRow as fault:
            ledger.bad(source.name, f"window {key[:20]!r}", fault)
    if any(len(lengths.inputs) > 1 for lengths in found):
        ledger.note("prompts are the sum of text, image, audio and video tokens")
    return sorted(found, key=lambda lengths: lengths.start_ns)


def _lengths(key: str, window: object) -> Lengths:
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise BadRow("window", None, "does not start at a whole number of seconds")
    if not isinstance(window, dict):
        raise BadRow("window", None, "is not an object")
    inputs = [(name, window[name]) for name in INPUTS if name in window]
    if not inputs or "output_tokens" not in window:
        raise BadRow("window", None, "has no input_tokens (or text_tokens) and output_tokens")
    pdfs = [pdf for name, text in inputs if (pdf := _pdf(name, text)) is not None]
    outputs = _pdf("output_tokens", window["output_tokens"])
    if outputs is None or len(pdfs) < len(inputs):
        pdfs, outputs = [], Pdf(np.zeros(0, np.int64), np.zeros(0))  # {}: no traffic
    return Lengths(int(key) * SECOND, pdfs, outputs)


def _pdf(name: str, text: object) -> Pdf | None:
    """None for `{}`, a window without traffic."""
    if not isinstance(text, str):
        raise BadRow(name, None, "is not a dict in a string")
    try:
        table = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRow(name, None, "is not a dict of numbers; nothing was evaluated") from None
    if not isinstance(table, dict):
        raise BadRow(name, None, "is not a dict of numbers")
    if not table:
        return None
    for value, chance in table.items():
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise BadRow(name, value, "is not a whole number of tokens >= 0")
        if type(chance) not in (int, float) or not 0 <= chance <= 1:
            raise BadRow(name, chance, "is not a probability")
    total = math.fsum(table.values())
    if abs(total - 1) > TOLERANCE:
        raise BadRow(
            name,
            None,
            f"its probabilities add up to {total:.6g}, not 1",
            reason="its probabilities do not add up to 1",
        )
    values = np.array(sorted(table), np.int64)
    chances = np.array([table[value] for value in sorted(table)]) / total
    return Pdf(values, chances)
