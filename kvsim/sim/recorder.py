"""What happened, as columns: one record a promise and one a run of tokens while it runs, tables of
steps and requests afterwards."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np

from kvsim.engine.kv.policy import KVUsage
from kvsim.engine.plan import StepPlan
from kvsim.engine.request import Sequence
from kvsim.engine.scheduler import Commit, Scheduler

PLAN_COLUMNS = (
    "start_ns",
    "num_steps",
    "num_decodes",
    "num_prefills",
    "num_prompt_tokens",
    "num_padding_tokens",
    "num_running",
    "num_admitted",
    "num_preempted",
    "limit",
    "computed_tokens",
    "final_tokens",
    "held_slots",
    "granted_slots",
    "cached_slots",
    "overlap_slots",
    "largest_free_run",
    "untouched_slots",
)
IDLE_COLUMNS = ("before", "cached_slots", "largest_free_run", "untouched_slots")
ENDED_COLUMNS = (
    "index",
    "num_answers",
    "finish_ns",
    "admitted_ns",
    "num_generated",
    "num_preemptions",
    "num_recomputed",
    "num_hit",
    "num_resumed_hit",
)


# a third of the time of array.extend
_pack_plan = Struct(f"={len(PLAN_COLUMNS)}q").pack
_pack_ended = Struct(f"={len(ENDED_COLUMNS)}q").pack
_pack_run = Struct("=4q").pack


class RunOfTokens(NamedTuple):
    """Answer `sample` of request `index` made one token in each step from `first` to `last`."""

    index: int
    sample: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """The raw records of one replica: int64 columns by name, and per-step values in step order."""

    plans: dict[str, np.ndarray]
    durations_ns: np.ndarray
    blocks_taken: np.ndarray  # by every step that repeats its plan; 0 for the first of a plan
    runs: dict[str, np.ndarray]
    ended: dict[str, np.ndarray]
    idle: dict[str, np.ndarray]  # the pool while nothing runs, ahead of step number `before`
    can_fork: bool
    keyless_first: bool  # freed blocks are taken again before those that nobody has held yet
    num_copies: int
    num_hit_copies: int
    num_forked_blocks: int
    num_swapped_out: int  # blocks
    num_swapped_in: int
    num_reforks: int  # beams dropped for others
    registered_slots: int  # held all along, by prefixes that were registered in advance


class Recorder:
    """Collects one replica's records. Storage is O(plans + steps + requests), never O(tokens)."""

    def __init__(self, final_tokens: list[int]) -> None:
        self._final_tokens = final_tokens  # prompt + answer of each request
        self._resident = 0  # final tokens, summed over running sequences
        self._num_steps = 0
        self._plans = bytearray()
        self._durations = array("q")
        self._taken = array("q")
        self._runs = bytearray()
        self._ended = bytearray()
        self._idle = array("q")

    def ran(
        self, plan: StepPlan, scheduler: Scheduler, start_ns: int, durations_ns: list[int]
    ) -> None:
        """len(durations_ns) steps of a plan ran, and are about to be committed: the scheduler shows
        the state that the first ran in, memory granted and work not yet taken over."""
        final = self._final_tokens
        for seq in plan.preempted:
            self._resident -= final[seq.request.index]
        for seq in plan.admitted:
            self._resident += final[seq.request.index]
            if seq.admitted_ns < 0:
                seq.admitted_ns = start_ns
        step = self._num_steps
        for seq in plan.joined:
            self._emit_from(seq, step)
        for seq in plan.left:
            if seq.run_start >= 0:
                seq.run_end = step - 1
                self._close(seq)
        num_new = num_prompt_tokens = num_prefills = 0
        for seq, start, count in plan.work:
            if count > 1 or start < seq.request.prompt_tokens:
                num_prefills += 1
                num_prompt_tokens += count
            if seq.joined_at < 0:
                num_new += count
                if start + count == seq.num_tokens:
                    self._emit_from(seq, step)
                    seq.run_end = step
        decodes = plan.decodes.num_seqs
        self._plans += _pack_plan(
            start_ns,
            len(durations_ns),
            decodes + len(plan.work) - plan.num_joining - num_prefills,
            num_prefills,
            num_prompt_tokens,
            plan.num_padding_tokens,
            scheduler.num_running,
            len(plan.admitted),
            len(plan.preempted),
            plan.limit,
            scheduler.num_computed_tokens + decodes + num_new,
            self._resident,
            *scheduler.kv.usage(),
        )
        self._durations.extend(durations_ns)
        self._num_steps = step + len(durations_ns)

    def committed(self, end_ns: int, finished: list[Sequence], done: Commit) -> None:
        """What came of the plan that ran: `finished` made their last token; those that have ended
        also left the batch."""
        ended, forked, taken = done
        self._taken.append(0)
        if taken:
            self._taken.extend(taken)
        last = self._num_steps - 1
        for seq in forked:
            seq.run_start = seq.run_end = last
        for seq in finished:
            seq.run_end = last
            for sample in range(1, seq.width):  # one-token answers that never forked
                self._runs += _pack_run(seq.request.index, sample, last, last)
            self._close(seq)
        for seq in ended:
            self._resident -= self._final_tokens[seq.request.index]
            self._end(seq, end_ns)

    def idle(self, usage: KVUsage) -> None:
        """Nothing runs or waits from here to the next step."""
        self._idle.extend((self._num_steps, usage.cached, usage.largest_free_run, usage.untouched))

    def stopped(self, scheduler: Scheduler) -> None:
        """The simulation stops here: close what is still open."""
        for seq in scheduler.unfinished():
            if seq.joined_at >= 0:
                seq.run_end = self._num_steps - 1
            if seq.run_start >= 0:
                self._close(seq)
            if seq.admitted_ns >= 0:
                self._end(seq, -1)

    def log(self, scheduler: Scheduler) -> ReplicaLog:
        kv = scheduler.kv
        return ReplicaLog(
            _columns(self._plans, PLAN_COLUMNS),
            np.array(self._durations, np.int64),
            np.array(self._taken, np.int64),
            _columns(self._runs, RunOfTokens._fields),
            _columns(self._ended, ENDED_COLUMNS),
            _columns(self._idle, IDLE_COLUMNS),
            kv.can_fork,
            kv.keyless_first,
            kv.num_copies,
            kv.num_hit_copies,
            kv.num_forked_blocks,
            scheduler.num_swapped_out,
            scheduler.num_swapped_in,
            scheduler.num_reforks,
            kv.registered_tokens,
        )

    def _emit_from(self, seq: Sequence, step: int) -> None:
        """seq makes a token in `step`: part of its open run, or the start of another."""
        if seq.run_start < 0:
            seq.run_start = step
        elif seq.run_end != step - 1:
            self._close(seq)
            seq.run_start = step

    def _close(self, seq: Sequence) -> None:
        if seq.run_start <= seq.run_end:
            self._runs += _pack_run(seq.request.index, seq.sample, seq.run_start, seq.run_end)
        seq.run_start = -1

    def _end(self, seq: Sequence, now_ns: int) -> None:
        # an answer of one token that would have forked ends as all its samples at once
        generated = seq.num_generated * seq.width
        self._ended += _pack_ended(
            seq.request.index,
            seq.width,
            now_ns,
            seq.admitted_ns,
            generated,
            seq.num_preemptions,
            seq.num_recomputed,
            seq.num_hit,
            seq.num_resumed_hit,
        )


def _columns(values: array | bytearray, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    table = np.frombuffer(values, np.int64).reshape(-1, len(names))
    return {name: table[:, place].copy() for place, name in enumerate(names)}
