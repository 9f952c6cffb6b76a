"""Token counts and times of a trace, exactly: no float touches a number that came as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import NamedTuple

import numpy as np

from kvsim.workload.traces.ledger import BadRow

MAX_TOKENS = 2**31 - 1
MAX_NS = 2**63 - 1
DIGITS_BELOW = {"s": 9, "ms": 6, "us": 3, "ns": 0}  # decimal places down to a nanosecond
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
WIDE = Context(prec=2000, rounding=ROUND_HALF_UP)
NOT_TOKENS = "is not a whole number of tokens >= 0"


class Field(NamedTuple):
    """A column or key: `parse` reads one value or raises BadRow; `bulk` reads many at once, or
    answers None where a value needs the closer look that only `parse` gives."""

    name: str
    parse: Callable[[object], int]
    bulk: Callable[[Sequence[object]], np.ndarray | None]


class Missing:
    """Stands for a key or cell that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


def tokens_field(name: str) -> Field:
    """A count of tokens; a decimal or exponent is fine where the number is whole (100.0, 1e3)."""
    return Field(name, lambda value: tokens(value, name), bulk_tokens)


def time_field(name: str, unit: str, strings: bool = True) -> Field:
    """A time in `unit`, as nanoseconds rounded half up; `strings`: numbers may come quoted."""
    places = DIGITS_BELOW[unit]
    return Field(
        name,
        lambda value: nanoseconds(value, places, name, strings),
        lambda values: bulk_times(values, places),
    )


def tokens(value: object, name: str) -> int:
    if type(value) is not int:
        number = exact(value, name, NOT_TOKENS)
        if number.adjusted() > 18 or number != number.to_integral_value(context=WIDE):
            raise BadRow(name, value, NOT_TOKENS)
        value = int(number)
    if value < 0:
        raise BadRow(name, value, NOT_TOKENS)
    if value > MAX_TOKENS:
        raise BadRow(name, value, f"is more tokens than any prompt has (over {MAX_TOKENS})")
    return value


def nanoseconds(value: object, places: int, name: str, strings: bool = True) -> int:
    if type(value) is int:
        ns = value * 10**places
    else:
        if isinstance(value, str) and not strings:
            raise BadRow(name, value, "is text where a number belongs")
        number = exact(value, name, "is not a time")
        if number.adjusted() > 20:
            raise BadRow(name, value, "is outside the clock (int64 nanoseconds)")
        ns = int(number.scaleb(places, WIDE).to_integral_value(ROUND_HALF_UP, WIDE))
    if abs(ns) > MAX_NS:
        raise BadRow(name, value, "is outside the clock (int64 nanoseconds)")
    return ns


def exact(value: object, name: str, rule: str) -> Decimal:
    """The value as a decimal, nothing rounded; refuses what is not a finite number."""
    if value is MISSING or value is None or value == "":
        raise BadRow(name, None, "is missing" if value is MISSING else "is blank")
    if isinstance(value, Decimal | int) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, str):
        text = value.strip()
        if len(text) <= 100 and NUMBER.fullmatch(text):
            return Decimal(text)
    raise BadRow(name, value, rule)


def bulk_tokens(values: Sequence[object]) -> np.ndarray | None:
    whole = _whole_numbers(values, max_digits=9)
    if whole is None or (len(whole) and (whole.min() < 0 or whole.max() > MAX_TOKENS)):
        return None
    return whole


def bulk_times(values: Sequence[object], places: int) -> np.ndarray | None:
    whole = _whole_numbers(values, max_digits=18 - places)
    if whole is not None:
        limit = MAX_NS // 10**places
        if len(whole) and (whole.min() < -limit or whole.max() > limit):
            return None
        return whole * 10**places
    if set(map(type, values)) != {str}:
        return None
    joined = "".join(values)  # type: ignore[arg-type]
    if not joined.isascii() or not joined.replace(".", "").isdigit():
        return None
    try:
        ns = [_decimal_ns(text, places) for text in values]  # type: ignore[arg-type]
        return np.array(ns, np.int64)
    except (ValueError, OverflowError):
        return None


def _decimal_ns(text: str, places: int) -> int:
    whole, _, fraction = text.partition(".")
    ns = int(whole + fraction[:places].ljust(places, "0"))
    return ns + (fraction[places : places + 1] >= "5")  # half up; "" is below "5"


def _whole_numbers(values: Sequence[object], max_digits: int) -> np.ndarray | None:
    if isinstance(values, np.ndarray):
        return values
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return None
    if kinds != {str}:
        return None
    joined = "".join(values)  # type: ignore[arg-type]
    if not joined.isascii() or not joined.isdigit() or "" in values:
        return None
    if max(map(len, values)) > max_digits:  # type: ignore[arg-type]
        return None
    return np.array(list(map(int, values)), np.int64)  # type: ignore[arg-type]
