"""Golden runs: what a real scheduler decided, step by step, beside what kvsim's decides.

A case is a folder: `trace.csv` (request_id; arrival_step or arrival_time in s; prompt_tokens;
output_tokens; optional segments "label:length;..." for the head of the prompt, where `@id` quotes
the answer of a request), `config.yaml` (engine arguments under vLLM's names; optional `engine`: a
name in RULES) and `steps.jsonl` (one JSON object a step). The paper-era ones are in golden_groups.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvsim.config import yaml_text
from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.kv.paged import Paged
from kvsim.engine.request import Request, Sequence, Span, answer_stream, merged
from kvsim.engine.rules import LATEST, RULES, Admission
from kvsim.engine.scheduler import Scheduler
from kvsim.errors import UserError
from kvsim.golden_groups import GroupReplay, arrival_of
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor

NO_TIME = Linear(base_ms=1, per_seq_ms=0, per_context_token_us=0, per_prompt_token_ms=0)
SHARED_TEXT = 1 << 40  # labels of shared segments are streams from here on


class Comparison(NamedTuple):
    """Steps and columns compared, and the first step that differs: its columns, both sides."""

    name: str
    num_steps: int
    num_columns: int
    num_differences: int
    first: tuple[dict, dict] | None


def cases_in(folder: Path) -> list[Path]:
    """The case that a folder is, or those in it. Raises UserError if there is none."""
    if (folder / "steps.jsonl").is_file():
        return [folder]
    cases = sorted(path.parent for path in folder.glob("*/steps.jsonl"))
    if not cases:
        raise UserError(f"{folder}: no golden runs here: no steps.jsonl in it or one level below")
    return cases


def compare(case: Path) -> Comparison:
    """Every column of every step. Raises UserError where the case cannot be read."""
    try:
        expected = [json.loads(line) for line in (case / "steps.jsonl").read_text().splitlines()]
        config, _ = yaml_text.parse((case / "config.yaml").read_text())
        with (case / "trace.csv").open(newline="") as file:
            trace = list(csv.DictReader(file))
        is_v0 = str(config.get("oracle", "v1")).startswith("v0")
        replay = (GroupReplay if is_v0 else Replay)(config, trace)
    except (OSError, ValueError, KeyError, yaml_text.YamlFault) as error:
        raise UserError(f"{case}: not a golden run that kvsim can replay: {error}") from None
    first, num_columns, num_differences = None, 0, 0
    for told in expected:
        row = replay.step(told)
        told = {name: value for name, value in told.items() if name != "t"}
        if "tables" not in told:
            row.pop("tables", None)
        names = told.keys() | row.keys()
        num_columns += len(names)
        wrong = [name for name in names if told.get(name) != row.get(name)]
        num_differences += len(wrong)
        if wrong and first is None:
            first = told, row
    return Comparison(case.name, len(expected), num_columns, num_differences, first)


class Replay:
    """A case on kvsim's scheduler, one step at a time, in the golden columns."""

    def __init__(self, config: dict, trace: list[dict]) -> None:
        rules = RULES[config["engine"]] if "engine" in config else LATEST
        if not config.get("scheduler_reserve_full_isl", True):
            rules = rules._replace(admission=Admission.CHUNK)
        # vLLM keeps block 0 for itself, and takes its watermark of all blocks
        usable = config["num_gpu_blocks"] - 1
        self.kv = Paged(
            usable,
            config["block_size"],
            prefix_caching=config.get("enable_prefix_caching", False),
            watermark=config.get("watermark", 0.0) * config["num_gpu_blocks"] / usable,
            rules=rules,
        )
        self.scheduler = Scheduler(
            self.kv,
            CONTINUOUS,
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            chunked_prefill=config.get("enable_chunked_prefill", True),
            long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
            rules=rules,
        )
        limit = config.get("max_model_len")
        outputs = [int(row["output_tokens"]) for row in trace]
        if limit is not None:
            room = [limit - int(row["prompt_tokens"]) for row in trace]
            outputs = [min(wanted, left) for wanted, left in zip(outputs, room, strict=True)]
        self.executor = SimulatedExecutor(NO_TIME, outputs)
        self.ids = [row["request_id"] for row in trace]
        labels: dict[str, int] = {}
        requests = [_request(number, row, self.ids, labels) for number, row in enumerate(trace)]
        self.coming = sorted(
            zip(map(arrival_of, trace), requests, strict=True), key=lambda pair: pair[0]
        )

    def step(self, told: dict) -> dict:
        now = told.get("t", told["step"])
        arrived = []
        while self.coming and self.coming[0][0] <= now:
            request = self.coming.pop(0)[1]
            arrived.append(self.ids[request.index])
            self.scheduler.submit(Sequence(request, num_tokens=request.prompt_tokens))
        row = {"step": told["step"], **self._planned()}
        if arrived:
            row["arr"] = arrived
        return row

    def _planned(self) -> dict:
        scheduler, kv, pool = self.scheduler, self.kv, self.kv.pool
        evicted = pool.num_evicted
        resumed = {id(seq) for seq in scheduler.waiting if seq.num_preemptions}
        plan = scheduler.plan()
        work = sorted(plan.work, key=lambda one: one.seq.order)
        start = {one.seq: one.start for one in work}
        prefills = [one for one in work if not one.is_decode or one.seq in plan.admitted]
        decodes = [one.seq for one in work if one not in prefills]
        decodes += [seq for seq in plan.decodes.members() if seq not in start]
        partial = [one for one in work if one.seq.joined_at < 0]
        row: dict = {
            "pre": [[self._name(one.seq), one.num_new] for one in prefills],
            "dec": [self._name(seq) for seq in sorted(decodes, key=lambda seq: seq.order)],
            "run": len(scheduler.running),
            "wait": len(scheduler.waiting),
            "used": kv.num_blocks - pool.num_free,
            "free": pool.num_free,
            "tok": scheduler.num_computed_tokens
            + plan.decodes.num_seqs
            + sum(one.num_new for one in partial),
            "tables": {
                self._name(seq): [block + 1 for block in seq.blocks]
                for seq in scheduler.running.values()
            },
        }
        if plan.admitted:
            row["adm"] = [
                [self._name(seq), start[seq], "resumed" if id(seq) in resumed else "new"]
                for seq in plan.admitted
            ]
        if plan.preempted:
            row["prm"] = [self._name(seq) for seq in plan.preempted]
        if kv.is_caching:
            row["evict"] = pool.num_evicted - evicted
        done = scheduler.commit(plan, 1, self.executor.execute(plan, 1).finished)
        if done.ended:
            row["fin"] = [self._name(seq) for seq in done.ended]
        row["free_end"] = pool.num_free
        return row

    def _name(self, seq: Sequence) -> str:
        return self.ids[seq.request.index]


def _request(index: int, row: dict, ids: list[str], labels: dict[str, int]) -> Request:
    spans = []
    for segment in filter(None, (row.get("segments") or "").split(";")):
        label, length = segment.rsplit(":", 1)
        if label.startswith("@"):
            stream = answer_stream(ids.index(label[1:]))
        else:
            stream = SHARED_TEXT + labels.setdefault(label, len(labels))
        spans.append(Span(stream, 0, int(length)))
    prompt = int(row["prompt_tokens"])
    spans.append(Span(index, 0, prompt - sum(span.length for span in spans)))
    return Request(index, merged(tuple(spans)), prompt)


def report(comparisons: list[Comparison]) -> Iterator[str]:
    """Lines of a table, and the first difference of each case that has one."""
    width = max(len(one.name) for one in comparisons)
    yield f"{'case':<{width}} {'steps':>7} {'values':>9} {'differences':>11}"
    for name, num_steps, num_columns, num_differences, _ in comparisons:
        yield f"{name:<{width}} {num_steps:>7,} {num_columns:>9,} {num_differences:>11,}"
    for one in comparisons:
        if one.first is not None:
            told, row = one.first
            yield f"\n{one.name}, step {told['step']}, the first that differs (golden | kvsim):"
            for name in sorted(told.keys() | row.keys()):
                mark = " " if told.get(name) == row.get(name) else "*"
                yield f" {mark} {name}: {told.get(name)} | {row.get(name)}"
