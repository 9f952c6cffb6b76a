"""Reads a checkpoint's config.json: each value of the kind that it must be, or one line why not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.errors import UserError

LARGEST = 2**31 - 1  # of any whole number: a larger one is a mistake


class Config(NamedTuple):
    """A mapping of a config.json; `where` begins every line about it. A key that is null is taken
    as absent, and an absent one as its default; without a default it is missing. All raise
    UserError."""

    values: dict[str, Any]
    where: str

    def whole(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fault(key, f"not a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= LARGEST or not math.isfinite(value):
            raise self.fault(key, f"not a number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "neither true nor false")
        return value

    def mapping(self, key: str) -> Config:
        """Empty where it is absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.fault(key, "not a mapping")
        return Config(value, f"{self.where}: {key}")

    def fault(self, key: str, said: str) -> UserError:
        """What to raise for the value of key."""
        text = repr(self.values.get(key))
        return UserError(f"{self.where}: {key} is {text[:40]}{'…' * (len(text) > 40)}, {said}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise UserError(f"{self.where}: key {key!r} is missing")
        return default


def read_config(path: Path) -> Config:
    """Raises UserError unless path holds a mapping in JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a mapping")
    return Config(value, str(path))
