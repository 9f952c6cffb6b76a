"""vLLM's V1 scheduler written a second time, slowly, from the page vllm_semantics.md alone.

Nothing here imports kvsim: tokens are lists, keys are looked up one by one, the free queue is a
list. Section numbers in the comments are that page's. A case is a dict of engine arguments and a
list of trace rows; the result is the rows of steps.jsonl.

With `policy: priority` rows may carry a `priority`, and everyone has a rank, (priority, arrival),
the lowest of which goes first. The queue is by rank. The victim of a preemption is the highest in
rank of all who run. If this step has served him already, his tokens go back to the budget and he is
taken out of the step. If he is the one who asks, the walk ends: who runs behind him is not run in
this step.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

UNLIMITED = 1 << 40


class Version(NamedTuple):
    """What differs between the releases: one row of table 1.8."""

    garbage_first: bool  # 1.2: keyless blocks are freed to the front of the queue
    tails_first_uncached: bool  # 1.2: the order of a table freed with caching off
    has_gate: bool  # 1.5: scheduler_reserve_full_isl exists
    has_watermark: bool
    unchunked_head: str  # 1.4: what a too long head does: "stop", "skip" or "chunk"
    lone_is_free: bool  # 1.4: no threshold while one request or none is in the engine


VERSIONS = {
    "vllm-0.33": Version(True, True, True, True, "stop", True),
    "vllm-0.26": Version(True, True, True, True, "stop", False),
    "vllm-0.20": Version(False, True, True, False, "stop", False),
    "vllm-0.11": Version(False, True, False, False, "skip", False),
    "vllm-0.8": Version(False, False, False, False, "chunk", False),
}


@dataclass(slots=True, eq=False)
class Asked:
    """A request in the engine."""

    name: str
    tokens: list[tuple[str, int]]  # known: the prompt, then what was generated
    num_prompt: int
    num_output: int
    priority: int = 0
    arrival: int = 0  # the how-manieth to arrive
    computed: int = 0
    table: list[int] = field(default_factory=list)
    was_preempted: bool = False

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        return self.known - self.num_prompt

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.arrival


class Pool:
    """1.2: block 0 is the engine's own; a free block may still be cached."""

    def __init__(self, num_gpu_blocks: int, block_size: int, *, caching: bool, how: Version):
        self.block_size, self.caching, self.how = block_size, caching, how
        self.queue = list(range(1, num_gpu_blocks))
        self.count = [0] * num_gpu_blocks
        self.key: list[int | None] = [None] * num_gpu_blocks
        self.holders: dict[int, list[int]] = {}  # key -> blocks, published first first
        self.numbers: dict[tuple, int] = {}  # (parent key, tokens) -> key
        self.num_evicted = 0

    def key_of(self, parent: int, tokens: list[tuple[str, int]]) -> int:
        return self.numbers.setdefault((parent, tuple(tokens)), len(self.numbers) + 1)

    def keys(self, tokens: list[tuple[str, int]], num_blocks: int) -> list[int]:
        keys, parent = [], 0
        for first in range(0, num_blocks * self.block_size, self.block_size):
            parent = self.key_of(parent, tokens[first : first + self.block_size])
            keys.append(parent)
        return keys

    def lookup(self, tokens: list[tuple[str, int]]) -> list[int]:
        """1.6: at least one token is always computed."""
        if not self.caching:
            return []
        found = []
        for key in self.keys(tokens, (len(tokens) - 1) // self.block_size):
            if not self.holders.get(key):
                break
            found.append(self.holders[key][0])
        return found

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.count[block] == 0:
                self.queue.remove(block)
            self.count[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        taken, self.queue = self.queue[:num_blocks], self.queue[num_blocks:]
        for block in taken:
            key, self.key[block] = self.key[block], None
            if key is not None:
                self.holders[key].remove(block)
                self.num_evicted += 1
            self.count[block] = 1
        return taken

    def publish(self, table: list[int], tokens: list[tuple[str, int]], num_tokens: int) -> None:
        if not self.caching:
            return
        num_full = min(num_tokens, len(tokens)) // self.block_size
        keys = self.keys(tokens, num_full)
        for block, key in zip(table[:num_full], keys, strict=True):
            if self.key[block] is None:
                self.key[block] = key
                self.holders.setdefault(key, []).append(block)

    def free(self, table: list[int]) -> None:
        heads_first = not self.caching and not self.how.tails_first_uncached
        garbage, rest = [], []
        for block in table if heads_first else reversed(table):
            self.count[block] -= 1
            if self.count[block] == 0:
                is_garbage = self.how.garbage_first and self.key[block] is None
                (garbage if is_garbage else rest).append(block)
        self.queue = garbage + self.queue + rest


class Engine:
    """1.1 to 1.7: one call of step() is one step."""

    def __init__(self, config: dict) -> None:
        self.how = VERSIONS[config.get("engine", "vllm-0.33")]
        self.block_size = config["block_size"]
        self.num_gpu_blocks = config["num_gpu_blocks"]
        self.max_num_seqs = config["max_num_seqs"]
        self.max_num_batched_tokens = config["max_num_batched_tokens"]
        self.max_model_len = config.get("max_model_len", UNLIMITED)
        self.is_chunked = config.get("enable_chunked_prefill", True)
        self.threshold = config.get("long_prefill_token_threshold", 0)
        self.has_gate = self.how.has_gate and config.get("scheduler_reserve_full_isl", True)
        self.watermark = config.get("watermark", 0) if self.how.has_watermark else 0
        caching = config.get("enable_prefix_caching", False)
        self.pool = Pool(self.num_gpu_blocks, self.block_size, caching=caching, how=self.how)
        self.is_by_priority = config.get("policy", "fcfs") == "priority"
        self.num_arrived = 0
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []

    def step(self, arrived: list[Asked]) -> dict:
        for one in arrived:
            one.arrival = self.num_arrived
            self.num_arrived += 1
        self.queue(self.waiting + arrived)
        evicted = self.pool.num_evicted
        self.budget = self.max_num_batched_tokens
        self.prefills: list[list] = []
        self.decodes: list[str] = []
        self.admitted: list[list] = []
        self.preempted: list[str] = []
        self.schedule: list[Asked] = []
        queued = len(self.running) + len(self.waiting)
        is_free = self.how.lone_is_free and queued <= 1
        self.cap = self.threshold if self.threshold > 0 and not is_free else UNLIMITED
        self.walk_running()
        if not self.preempted:
            self.admit_waiting()
        row: dict = {"arr": [one.name for one in arrived]} if arrived else {}
        row |= {"pre": self.prefills, "dec": self.decodes}
        row |= {"adm": self.admitted} if self.admitted else {}
        row |= {"prm": self.preempted} if self.preempted else {}
        row |= {"run": len(self.running), "wait": len(self.waiting)}
        free = len(self.pool.queue)
        row |= {"used": self.num_gpu_blocks - 1 - free, "free": free}
        row["tok"] = sum(one.computed for one in self.running)
        if self.pool.caching:
            row["evict"] = self.pool.num_evicted - evicted
        row["tables"] = {one.name: list(one.table) for one in self.running}
        finished = self.run_model()
        row |= {"fin": finished} if finished else {}
        return row | {"free_end": len(self.pool.queue)}

    def queue(self, asked: list[Asked]) -> None:
        """Whose turn it is: 1.4, or by rank."""
        self.waiting = sorted(asked, key=lambda one: one.rank) if self.is_by_priority else asked

    def walk_running(self) -> None:
        """1.3"""
        place = 0
        while place < len(self.running) and self.budget > 0:
            one = self.running[place]
            left = self.max_model_len - one.computed - 1
            num_new = min(one.known - one.computed, self.cap, self.budget, left)
            while not self.allocate(one, [], num_new, is_admission=False):
                victim = self.running[-1]
                if self.is_by_priority:
                    victim = max(self.running, key=lambda running: running.rank)
                if victim in self.schedule:
                    self.unschedule(victim)
                    place -= 1
                self.running.remove(victim)
                self.preempt(victim)
                if victim is one:
                    return
            place += 1
            # the last token of a prompt is a chunk (v1_copies, step 1); what one token amid the
            # outputs of a resumed request is, no golden run tells: here a decode
            if num_new == 1 and one.computed >= one.num_prompt:
                self.decodes.append(one.name)
            else:
                self.prefills.append([one.name, num_new])
            self.budget -= num_new
            one.computed += num_new
            self.schedule.append(one)

    def unschedule(self, victim: Asked) -> None:
        self.schedule.remove(victim)
        if victim.name in self.decodes:
            self.decodes.remove(victim.name)
            self.budget += 1
        else:
            (chunk,) = [chunk for chunk in self.prefills if chunk[0] == victim.name]
            self.prefills.remove(chunk)
            self.budget += chunk[1]

    def preempt(self, victim: Asked) -> None:
        """1.7"""
        self.pool.free(victim.table)
        victim.table, victim.computed, victim.was_preempted = [], 0, True
        self.queue([victim, *self.waiting])
        self.preempted.append(victim.name)

    def admit_waiting(self) -> None:
        """1.4"""
        skipped: list[Asked] = []
        while self.waiting and self.budget > 0 and len(self.running) < self.max_num_seqs:
            one = self.waiting[0]
            hits = self.pool.lookup(one.tokens)
            hit = len(hits) * self.block_size
            num_new = min(one.known - hit, self.cap)
            if num_new > self.budget and not self.is_chunked and self.how.unchunked_head != "chunk":
                if self.how.unchunked_head == "stop":
                    break
                skipped.insert(0, self.waiting.pop(0))
                continue
            num_new = min(num_new, self.budget)
            if not self.allocate(one, hits, num_new, is_admission=True):
                break
            self.running.append(self.waiting.pop(0))
            self.admitted.append([one.name, hit, "resumed" if one.was_preempted else "new"])
            self.prefills.append([one.name, num_new])
            self.budget -= num_new
            one.computed = hit + num_new
            self.schedule.append(one)
        self.queue(skipped + self.waiting)

    def allocate(self, one: Asked, hits: list[int], num_new: int, *, is_admission: bool) -> bool:
        """1.5"""
        free = len(self.pool.queue)
        cold = sum(self.pool.count[block] == 0 for block in hits)
        kept_back = int(self.watermark * self.num_gpu_blocks)
        if not is_admission or not self.running:
            kept_back = 0
        if is_admission and self.has_gate:
            whole = self.blocks_for(min(one.known, self.max_model_len))
            if max(whole - len(hits), 0) + cold + kept_back > free:
                return False
        until = one.computed + len(hits) * self.block_size + num_new
        need = max(self.blocks_for(until) - len(one.table) - len(hits), 0)
        if need + cold + kept_back > free:
            return False
        self.pool.touch(hits)
        one.table += hits + self.pool.take(need)
        self.pool.publish(one.table, one.tokens, until)
        return True

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def run_model(self) -> list[str]:
        """1.1, points 3 and 4."""
        finished = []
        for one in self.schedule:
            if one.computed != one.known:
                continue
            one.tokens.append((f"@{one.name}", one.generated))
            if one.generated == one.num_output or one.known >= self.max_model_len:
                finished.append(one.name)
                self.running.remove(one)
                self.pool.free(one.table)
        return finished


def asked(row: dict) -> Asked:
    """A request with the tokens of its prompt: token j of a label is one fixed token."""
    tokens: list[tuple[str, int]] = []
    for segment in filter(None, (row.get("segments") or "").split(";")):
        label, length = segment.rsplit(":", 1)
        label = label if label.startswith("@") else f"shared {label}"
        tokens += [(label, j) for j in range(int(length))]
    num_prompt = int(row["prompt_tokens"])
    tokens += [(f"own {row['request_id']}", j) for j in range(num_prompt - len(tokens))]
    priority = int(row.get("priority") or 0)
    return Asked(row["request_id"], tokens, num_prompt, int(row["output_tokens"]), priority)


def replay(config: dict, trace: list[dict], max_steps: int = 10_000) -> list[dict]:
    """The rows of steps.jsonl. Steps in which the engine is empty are not rows."""
    engine, rows = Engine(config), []
    column = "arrival_step" if "arrival_step" in trace[0] else "arrival_time"
    timed = [(Fraction(str(row[column])), asked(row)) for row in trace]
    coming = sorted(timed, key=lambda pair: pair[0])
    cost = {name: Fraction(str(value)) for name, value in config.get("time_model", {}).items()}
    step, now = 0, Fraction(0)
    while (coming or engine.waiting or engine.running) and len(rows) < max_steps:
        if not engine.waiting and not engine.running:
            now = max(now, coming[0][0])
            step = step if cost else int(now)
        arrived = []
        while coming and coming[0][0] <= now:
            arrived.append(coming.pop(0)[1])
        stamp = {"step": step, "t": float(now)} if cost else {"step": step}
        rows.append(stamp | engine.step(arrived))
        step += 1
        scheduled = engine.max_num_batched_tokens - engine.budget
        now += cost["base"] + cost["per_token"] * scheduled if cost else 1
    return rows


def write_case(folder: Path, config: dict, trace: list[dict], rows: list[dict]) -> Path:
    """The folder of a golden run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}: {json.dumps(value)}" for name, value in config.items()]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")
    with (folder / "trace.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(trace[0]))
        writer.writeheader()
        writer.writerows(trace)
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
