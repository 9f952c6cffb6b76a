"""Objects of a JSON Lines file; JSON's decimals stay exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

import numpy as np

from kvsim.workload.traces.ledger import BadRow, Ledger
from kvsim.workload.traces.records import Records
from kvsim.workload.traces.source import Lines, Source, line_blocks


def _no_float(text: str) -> str:
    return text  # NaN and Infinity are not JSON: a number field refuses the text


def _decimal(text: str) -> Decimal | str:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent no decimal holds
        return text


DECODER = json.JSONDecoder(parse_float=_decimal, parse_constant=_no_float)


def json_records(source: Source, ledger: Ledger) -> Iterator[Records]:
    """The objects of a JSON Lines file; blank lines count as lines, not as rows."""
    for block in line_blocks(source):
        records = json_block(source.name, block, ledger)
        if len(records.lines):
            yield records


def json_block(name: str, block: Lines, ledger: Ledger) -> Records:
    """The objects of some lines; a line that is none is booked as bad."""
    lines = block.lines
    numbers = [i for i, line in enumerate(lines) if line and not line.isspace()]
    texts = lines if len(numbers) == len(lines) else [lines[i] for i in numbers]
    try:
        objects = [DECODER.decode(text) for text in texts]
    except (ValueError, RecursionError):
        objects = None
    where = np.array(numbers, np.int64) + block.first
    if objects is None or set(map(type, objects)) - {dict}:
        where, objects = _odd_objects(name, where.tolist(), texts, ledger)
    ledger.read += len(objects)
    return Records(name, where, {}, objects)


def _odd_objects(
    name: str, numbers: list[int], texts: list[str], ledger: Ledger
) -> tuple[np.ndarray, list[dict[str, object]]]:
    kept: list[int] = []
    objects: list[dict[str, object]] = []
    for number, text in zip(numbers, texts, strict=True):
        try:
            row = decoded(text)
            if not isinstance(row, dict):
                raise BadRow("row", text[:60], "is not a JSON object")
        except BadRow as fault:
            ledger.read += 1
            ledger.bad(name, number, fault)
            continue
        kept.append(number)
        objects.append(row)
    return np.array(kept, np.int64), objects


def decoded(text: str) -> object:
    """One JSON value, its decimals exact; raises BadRow."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        rule = f"not JSON: {error.msg} (column {error.colno})"
        raise BadRow("row", None, rule, reason="not JSON") from None
    except RecursionError:
        raise BadRow("row", None, "not JSON: nested too deeply") from None
    except ValueError:
        raise BadRow("row", None, "not JSON: a number with thousands of digits") from None
