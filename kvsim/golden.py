"""Golden runs: what a real scheduler decided, step by step, beside what kvsim's decides.

Cases are folders (golden_case); those of the paper's time are replayed in golden_groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.kv.host import HostFull
from kvsim.engine.kv.paged import Paged
from kvsim.engine.request import Sequence
from kvsim.engine.rules import RULES, Admission
from kvsim.engine.scheduler import Scheduler
from kvsim.errors import UserError
from kvsim.golden_case import PAPER_ERA, Case, read_case
from kvsim.golden_groups import GroupReplay
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor

NO_TIME = Linear(base_ms=1, per_seq_ms=0, per_context_token_us=0, per_prompt_token_ms=0)


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


def compare(folder: Path) -> Comparison:
    """Every column of every step. Raises UserError where the case cannot be read or replayed."""
    case = read_case(folder)
    replay = (GroupReplay if case.config.rules in PAPER_ERA else Replay)(case)
    first, num_columns, num_differences = None, 0, 0
    for told in case.steps:
        try:
            row = replay.step(told)
        except HostFull as error:
            raise UserError(f"{folder}: step {told['step']}: num_cpu_blocks: {error}") from None
        except (LookupError, ValueError, AttributeError) as error:
            if "ops" not in told and not getattr(replay, "has_beams", False):
                raise
            fault = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{folder}: step {told['step']}: its ops cannot be followed here ({fault})"
            ) from None
        told = {name: value for name, value in told.items() if name != "t"}
        if "tables" not in told:
            row.pop("tables", None)
        names = told.keys() | row.keys()
        num_columns += len(names)
        wrong = [name for name in names if told.get(name) != row.get(name)]
        num_differences += len(wrong)
        if wrong and first is None:
            first = told, row
    return Comparison(case.name, len(case.steps), num_columns, num_differences, first)


class Replay:
    """A case on kvsim's scheduler, one step at a time, in the golden columns."""

    def __init__(self, case: Case) -> None:
        config = case.config
        rules = RULES[config.rules]
        if not config.scheduler_reserve_full_isl:
            rules = rules._replace(admission=Admission.CHUNK)
        # vLLM keeps block 0 for itself, and takes its watermark of all blocks
        watermark = config.watermark if rules.has_watermark and config.watermark else 0.0
        self.kv = Paged(
            config.num_gpu_blocks - 1,
            config.block_size,
            prefix_caching=config.enable_prefix_caching,
            watermark_blocks=int(watermark * config.num_gpu_blocks),
            rules=rules,
        )
        self.scheduler = Scheduler(
            self.kv,
            CONTINUOUS,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            rules=rules,
        )
        outputs = [0] * len(case.ids)
        for request, _, (wanted, *_) in case.coming:
            # an answer also stops where it reaches max_model_len, after one token at the earliest
            room = config.max_model_len - request.prompt_tokens
            outputs[request.index] = max(min(wanted, room), 1)
        self.executor = SimulatedExecutor(NO_TIME, outputs)
        self.ids = case.ids
        self.coming = [(asked.arrival, asked.request) for asked in case.coming]

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


def report(comparisons: list[Comparison]) -> Iterator[str]:
    """Lines of a table, and the first difference of each case that has one."""
    width = max((len(one.name) for one in comparisons), default=4)
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
