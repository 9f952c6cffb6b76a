"""The books of one reading: rows read, kept and dropped by reason, and what the user must hear."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvsim.errors import TraceError

MAX_FAULTS = 10  # bad rows named in one error


class BadRow(Exception):
    """Why one row cannot be used. `value` is shown to the user; `rule` is what it breaks.

    Rows are counted by `reason`: the rule, where that does not differ from row to row.
    """

    def __init__(
        self, field_name: str, value: object, rule: str, *, reason: str | None = None
    ) -> None:
        super().__init__(field_name, value, rule)
        self.field_name = field_name
        self.value = value
        self.rule = rule
        self.reason = f"{field_name}: {reason or rule}"

    def text(self) -> str:
        if self.value is None:
            return f"{self.field_name}: {self.rule}"
        return f"{self.field_name}: {shown(self.value)} {self.rule}"


def shown(value: object) -> str:
    """The value as an error text quotes it: on one line, and never a page long."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "backslashreplace").decode().replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(slots=True)
class Ledger:
    """Every row is `read` once and then either kept or `dropped`; readers are its only writers.

    Strict: a bad row is remembered, and the tenth, or the end of the file, raises TraceError.
    With skip_bad_rows it is counted instead. `facts` are counts that only one format has.
    """

    skip_bad_rows: bool
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    num_bad: int = 0

    def bad(self, name: str, line: int | str, fault: BadRow) -> None:
        """A row that breaks the format: an error unless bad rows are skipped."""
        self.num_bad += 1
        self.drop(fault.reason)
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{name}:{line}: {fault.text()}")
        if not self.skip_bad_rows and len(self.faults) == MAX_FAULTS:
            raise TraceError("\n".join([*self.faults, "(stopped at ten bad rows)"]))

    def drop(self, reason: str) -> None:
        """A row that the format allows but no simulation can use."""
        self.dropped[reason] += 1

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def close(self) -> None:
        """Ends the reading: raises the bad rows of a strict one, else says what was dropped."""
        if self.num_bad and not self.skip_bad_rows:
            raise TraceError("\n".join(self.faults))
        if self.dropped:
            total = sum(self.dropped.values())
            self.notes.append(f"read {self.read} rows: kept {self.read - total}, dropped {total}")
            for reason, count in sorted(self.dropped.items()):
                self.notes.append(f"dropped {count}: {reason}")
