"""A golden run as files: what was asked of a scheduler, and what it did in every step.

A case is a folder: `trace.csv` (request_id; arrival_step or arrival_time in s; prompt_tokens;
output_tokens, "a|b|c" for one length each of parallel answers; optional `n` (answers or beams),
`beam` (1: beams) and `segments` "label:length;..." for the head of the prompt, where `@id` quotes
the answer of a request), `config.yaml` (engine arguments under vLLM's names; `oracle`: v1 or
v0.2.0; optional `engine`, a name of engine.rules, which goes before it) and `steps.jsonl` (one
JSON object a step).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsim.config import yaml_text
from kvsim.engine.request import Request, Span, answer_stream, merged
from kvsim.engine.rules import RULES
from kvsim.errors import UserError

PAPER_ERA = ("vllm-0.2", "paper")
SHARED_TEXT = 1 << 40  # labels of shared segments are streams from here on
Count = Annotated[int, Field(ge=1, le=1 << 40)]
Blocks = Annotated[int, Field(ge=1, le=10_000_000)]


class CaseConfig(BaseModel):
    """config.yaml, under vLLM's names; other keys (description, time_model) change no decision."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    oracle: Literal["v1", "v0.2.0"] = "v1"
    engine: str | None = None
    num_gpu_blocks: Blocks
    block_size: Annotated[int, Field(ge=1, le=1_000_000)]
    max_num_batched_tokens: Count
    max_num_seqs: Count = 256
    max_model_len: Count = 1 << 40
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, Field(ge=0, lt=1)] | None = None
    num_cpu_blocks: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    preemption_mode: Literal["recompute", "swap"] | None = None

    @property
    def rules(self) -> str:
        """The name of the rules that the run follows."""
        return self.engine or {"v1": "vllm-0.33", "v0.2.0": "vllm-0.2"}[self.oracle]


class Asked(NamedTuple):
    """A request of the trace: when it comes (steps or s) and how long its answers are."""

    request: Request
    arrival: float
    outputs: tuple[int, ...]


class Case(NamedTuple):
    """`ids` by index of request; `coming` in order of arrival; `steps` as told."""

    name: str
    config: CaseConfig
    ids: list[str]
    coming: list[Asked]
    steps: list[dict]


def read_case(folder: Path) -> Case:
    """Raises UserError, naming file and fault, where the case cannot be read."""
    config = _config(folder / "config.yaml")
    ids, coming = _trace(folder / "trace.csv")
    return Case(folder.name, config, ids, coming, _steps(folder / "steps.jsonl"))


def _config(path: Path) -> CaseConfig:
    try:
        config = CaseConfig.model_validate(yaml_text.parse(_text(path))[0])
    except yaml_text.YamlFault as fault:
        raise UserError(f"{path}: {fault}") from None
    except ValidationError as error:
        faults = [
            ": ".join([*map(str, one["loc"]), one["msg"].replace("CaseConfig", "of keys")])
            for one in error.errors()
        ]
        raise UserError("\n".join(f"{path}: {fault}" for fault in faults)) from None
    known = [*RULES, *PAPER_ERA]
    if config.rules not in known:
        raise UserError(f"{path}: engine: {config.engine!r} is not one of {', '.join(known)}")
    if config.rules in RULES and config.num_gpu_blocks == 1:
        raise UserError(f"{path}: num_gpu_blocks: 1 is the null block alone; at least 2")
    return config


def _trace(path: Path) -> tuple[list[str], list[Asked]]:
    try:
        rows = list(csv.DictReader(_text(path).splitlines()))
    except csv.Error as fault:
        raise UserError(f"{path}: not CSV: {fault}") from None
    ids = [row.get("request_id") or "" for row in rows]
    if len(set(ids)) < len(ids):
        raise UserError(f"{path}: request_id: two rows have the same")
    labels: dict[str, int] = {}
    asked = []
    for index, row in enumerate(rows):
        try:
            asked.append(_asked(index, row, ids, labels))
        except (ValueError, KeyError, TypeError) as fault:
            raise UserError(f"{path}: row {index + 1}: {fault}") from None
    return ids, sorted(asked, key=lambda one: one.arrival)


def _asked(index: int, row: dict, ids: list[str], labels: dict[str, int]) -> Asked:
    if None in row.values():
        raise ValueError("has fewer cells than the header")
    prompt, width = int(row["prompt_tokens"]), int(row.get("n") or 1)
    outputs = tuple(map(int, row["output_tokens"].split("|")))
    if prompt < 1 or width < 1 or min(outputs) < 1:
        raise ValueError("prompt_tokens, output_tokens and n must be at least 1")
    spans = []
    for segment in filter(None, (row.get("segments") or "").split(";")):
        label, _, length = segment.rpartition(":")
        if label.startswith("@"):
            stream = answer_stream(ids.index(label[1:]))
        else:
            stream = SHARED_TEXT + labels.setdefault(label, len(labels))
        spans.append(Span(stream, 0, int(length)))
    own = prompt - sum(span.length for span in spans)
    if own < 0 or any(span.length < 0 for span in spans):
        raise ValueError("segments must have lengths >= 0 that fit into prompt_tokens")
    spans.append(Span(index, 0, own))
    is_beam = row.get("beam") == "1"
    request = Request(index, merged(tuple(spans)), prompt, width, is_beam=is_beam)
    arrival = row.get("arrival_step", row.get("arrival_time"))
    if arrival is None:
        raise ValueError("there is neither arrival_step nor arrival_time")
    return Asked(request, float(arrival), outputs)


def _steps(path: Path) -> list[dict]:
    steps = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as fault:
            raise UserError(f"{path}:{number}: not JSON: {fault}") from None
        if not isinstance(told, dict) or not _is_step(told):
            raise UserError(
                f"{path}:{number}: not a step: an object with a whole number `step`, and where "
                'there are some a number `t`, whole numbers `arr_seq`, and `ops` ["F", parent, '
                'child] or ["X", sequence]'
            )
        steps.append(told)
    if not steps:
        raise UserError(f"{path}: has no steps")
    return steps


def _is_step(told: dict) -> bool:
    ops, numbers = told.get("ops", []), told.get("arr_seq", [])
    if not isinstance(ops, list) or not isinstance(numbers, list):
        return False
    lengths = {"F": 3, "X": 2}
    return (
        type(told.get("step")) is int
        and type(told.get("t", 0)) in (int, float)
        and all(type(number) is int for number in numbers)
        and all(isinstance(op, list) and op and isinstance(op[0], str) for op in ops)
        and all(len(op) == lengths.get(op[0]) for op in ops)
        and all(type(number) is int for op in ops for number in op[1:])
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, at byte {error.start}") from None
