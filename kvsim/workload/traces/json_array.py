"""The elements of one large JSON array, one at a time, in memory of a few elements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from kvsim.errors import TraceError
from kvsim.workload.traces.json_rows import DECODER
from kvsim.workload.traces.ledger import Ledger
from kvsim.workload.traces.source import Source, text_blocks

PIECE_BYTES = 1 << 20
SPACE = " \t\n\r"
MARKS = ("true", "false", "null", "-")  # begun at the end of a file, they are cut, not wrong
LONGEST_MARK = 7  # characters of a mark or an escape that an error can point at


class Element(NamedTuple):
    """A decoded value and the line it starts on."""

    line: int
    value: object


def array_elements(source: Source, ledger: Ledger) -> Iterator[Element]:
    """Decodes element by element.

    A file that ends too early is an error that says where and how many elements came before; with
    skip_bad_rows those are used, and the cut is noted. Other faults of the JSON are errors.
    """
    return _Array(source, ledger).elements()


class _Array:
    """The text not yet decoded, with where it starts in the file."""

    def __init__(self, source: Source, ledger: Ledger) -> None:
        self.source = source
        self.ledger = ledger
        self.blocks = text_blocks(source, PIECE_BYTES)
        self.text = ""
        self.at = 0  # what of `text` is done with
        self.line = 1
        self.num_bytes = 0  # before `text`
        self.is_over = False

    def elements(self) -> Iterator[Element]:
        self._expect("[", "an array")
        count = 0
        if self._peek() == "]":
            self._skip(1)
        else:
            while True:
                try:
                    element = self._element()
                except _Cut:
                    self._cut(count)
                    return
                yield element
                count += 1
                mark = self._peek()
                if mark == "":
                    self._cut(count)
                    return
                if mark not in ",]":
                    self._fail(self.at, f"expected ',' or ']', got {mark!r}")
                self._skip(1)
                if mark == "]":
                    break
                if self._peek() == "]":
                    self._fail(self.at, "a comma with no element behind it")
        if self._peek() != "":
            self._fail(self.at, "more text behind the array")

    def _element(self) -> Element:
        if self._peek() == "":
            raise _Cut
        while True:
            line = self.line + self.text.count("\n", 0, self.at)
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                near_end = len(self.text) - error.pos <= LONGEST_MARK
                is_open = error.msg.startswith("Unterminated")
                if (near_end or is_open) and self._more(len(self.text)):
                    continue
                if is_open or _is_begun(self.text[error.pos :], error.msg):
                    raise _Cut from None
                self._fail(error.pos, error.msg)
            except RecursionError:
                self._fail(self.at, "nested too deeply")
            except ValueError:
                self._fail(self.at, "a number with thousands of digits")
            else:
                if end == len(self.text) and self._more(1):
                    continue  # a number may go on
                self._skip(end - self.at)
                return Element(line, value)

    def _peek(self) -> str:
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in SPACE:
                    return self.text[self.at]
                self.at += 1
            if not self._more(1):
                return ""

    def _skip(self, num_chars: int) -> None:
        self.at += num_chars
        if self.at > PIECE_BYTES:
            self._forget()

    def _forget(self) -> None:
        done = self.text[: self.at]
        self.line += done.count("\n")
        self.num_bytes += len(done.encode("utf-8", "surrogatepass"))
        self.text, self.at = self.text[self.at :], 0

    def _more(self, at_least: int) -> bool:
        """Reads on, at least that many characters if the file has them."""
        pieces, size = [], 0
        while size < at_least and not self.is_over:
            piece = next(self.blocks, None)
            if piece is None:
                self.is_over = True
                break
            pieces.append(piece)
            size += len(piece)
        self.text += "".join(pieces)
        return size > 0

    def _expect(self, mark: str, what: str) -> None:
        if self._peek() != mark:
            self._fail(self.at, f"expected {what}")
        self._skip(1)

    def _fail(self, at: int, reason: str) -> None:
        line = self.line + self.text.count("\n", 0, at)
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        raise TraceError(f"{self.source.name}:{line}: column {column}: not JSON: {reason}")

    def _cut(self, count: int) -> None:
        end = self.num_bytes + len(self.text.encode("utf-8", "surrogatepass"))
        where = f"truncated at byte {end}: {count} complete records before it"
        if not self.ledger.skip_bad_rows:
            raise TraceError(f"{self.source.name}: {where} (skip_bad_rows: true uses those)")
        self.ledger.note(where)


def _is_begun(rest: str, message: str) -> bool:
    """Whether the text behind an error may be the beginning of something right."""
    rest = rest.strip(SPACE)
    if message.startswith("Invalid \\"):  # an escape cut short
        return len(rest) <= LONGEST_MARK
    return any(mark.startswith(rest) for mark in MARKS)


class _Cut(Exception):
    """The file ends inside an element."""
