"""vLLM 0.2.0's scheduler written a second time, slowly, from part 2 of vllm_semantics.md.

Nothing here imports kvsim. Beam search is left out: which beams survive is an input there. A case
is a dict of engine arguments and a list of trace rows; the result is the rows of steps.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class EngineDied(Exception):
    """What 2.2 and 2.4 say the real engine does not survive; the rows so far are kept."""


@dataclass(slots=True, eq=False)
class Answer:
    """One sequence: its number, its tokens known, and the blocks that it holds."""

    number: int
    num_tokens: int
    num_wanted: int
    num_made: int = 0
    table: list[int] = field(default_factory=list)
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Asked:
    """A request: a group of n answers, which are one sequence until the prompt step."""

    name: str
    num_samples: int
    wanted: list[int]
    answers: list[Answer]

    def unfinished(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.is_finished]

    def live(self) -> int:
        if len(self.answers) < self.num_samples:
            return self.num_samples
        return len(self.unfinished())

    def blocks(self) -> list[int]:
        """Distinct blocks, in the order in which they are met."""
        return list(dict.fromkeys(b for answer in self.unfinished() for b in answer.table))


class Engine:
    """2.1 to 2.3: one call of step() is one step."""

    def __init__(self, config: dict) -> None:
        self.block_size = config["block_size"]
        self.num_gpu_blocks = config["num_gpu_blocks"]
        self.num_cpu_blocks = config["num_cpu_blocks"]
        self.max_num_seqs = config.get("max_num_seqs", 256)
        self.max_num_batched_tokens = config["max_num_batched_tokens"]
        self.max_model_len = config["max_model_len"]
        self.kept_back = int(config.get("watermark", 0.01) * self.num_gpu_blocks)
        self.always_swaps = config.get("preemption_mode") == "swap"
        self.free = list(range(self.num_gpu_blocks))
        self.count = [0] * self.num_gpu_blocks
        self.num_cpu_used = 0
        self.next_number = 0
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.swapped: list[Asked] = []

    def arrive(self, row: dict) -> Asked:
        samples = int(row["n"])
        wanted = [int(part) for part in str(row["output_tokens"]).split("|")]
        wanted += [wanted[-1]] * (samples - len(wanted))
        first = Answer(self.next_number, int(row["prompt_tokens"]), wanted[samples - 1])
        self.next_number += 1
        one = Asked(row["request_id"], samples, wanted, [first])
        self.waiting.append(one)
        return one

    def step(self, arrived: list[dict]) -> dict:
        new = [self.arrive(row) for row in arrived]
        self.ignored: list[Asked] = []
        self.preempted: list[list[str]] = []
        self.swapped_in: list[str] = []
        self.num_in = self.num_out = self.num_copies = 0
        scheduled: list[Asked] = [] if self.swapped else self.prompt_step()
        is_prompt = bool(scheduled or self.ignored)
        if is_prompt:
            sched = [[one.name, one.answers[0].num_tokens] for one in scheduled]
        else:
            self.decode_step()
            scheduled = list(self.running)
            sched = [[one.name, len(one.unfinished())] for one in scheduled]
        row: dict = {"kind": "prompt" if is_prompt else "decode"}
        if new:
            row["arr"] = [one.name for one in new]
            row["arr_seq"] = [one.answers[0].number for one in new]
        row |= {"sched": sched, "batched": sum(size for _, size in sched)}
        row |= {"prm": self.preempted} if self.preempted else {}
        row |= {"swapin": self.swapped_in} if self.swapped_in else {}
        if self.num_in or self.num_out:
            row |= {"blocks_in": self.num_in, "blocks_out": self.num_out}
        row["copies"] = self.num_copies
        row |= {"ign": [one.name for one in self.ignored]} if self.ignored else {}
        row |= {"run": len(self.running), "wait": len(self.waiting), "swp": len(self.swapped)}
        row |= {"used": self.num_gpu_blocks - len(self.free), "free": len(self.free)}
        row["cpu_used"] = self.num_cpu_used
        row["refs"] = sum(len(a.table) for one in self.running for a in one.unfinished())
        ops = [op for one in scheduled for op in self.sample(one)]
        row |= {"ops": ops} if ops else {}
        gone = [one.name for one in scheduled if not one.unfinished()]
        gone += [one.name for one in self.ignored]
        row |= {"fin": gone} if gone else {}
        self.running = [one for one in self.running if one.unfinished()]
        return row | {"free_end": len(self.free)}

    def prompt_step(self) -> list[Asked]:
        """2.1"""
        scheduled: list[Asked] = []
        longest = min(self.max_model_len, self.max_num_batched_tokens)
        num_batched = 0
        while self.waiting:
            one = self.waiting[0]
            if len(one.unfinished()) > 1 or len(one.answers) > 1:
                raise EngineDied("Waiting sequence group should have only one prompt sequence")
            answer = one.answers[0]
            if answer.num_tokens > longest:
                self.ignored.append(self.waiting.pop(0))
                continue
            need = self.blocks_for(answer.num_tokens)
            if len(self.free) - need < self.kept_back:
                break
            if num_batched + answer.num_tokens > self.max_num_batched_tokens:
                break
            if sum(other.live() for other in self.running) + one.live() > self.max_num_seqs:
                break
            answer.table = [self.take() for _ in range(need)]
            num_batched += answer.num_tokens
            scheduled.append(self.waiting.pop(0))
            self.running.append(one)
        return scheduled

    def decode_step(self) -> None:
        """2.1"""
        # the page leaves ties open: a golden run (v0_swap, step 250) keeps the order of the trace
        remaining = sorted(self.running, key=lambda one: one.answers[0].number)
        self.running = []
        while remaining:
            one = remaining.pop(0)
            while len(one.unfinished()) > len(self.free):
                victim = remaining.pop() if remaining else one
                self.preempt(victim)
                if victim is one:
                    break
            else:
                self.give_slots(one)
                self.running.append(one)
        self.swapped.sort(key=lambda one: one.answers[0].number)
        while self.swapped and not self.preempted:
            one = self.swapped[0]
            blocks = one.blocks()
            if len(self.free) - len(blocks) - len(one.unfinished()) < self.kept_back:
                break
            if sum(other.live() for other in self.running) + one.live() > self.max_num_seqs:
                break
            self.swap_in(one, blocks)
            self.give_slots(one)
            self.running.append(self.swapped.pop(0))

    def give_slots(self, one: Asked) -> None:
        for answer in one.unfinished():
            if self.blocks_for(answer.num_tokens) > len(answer.table):
                answer.table.append(self.take())
            elif self.count[answer.table[-1]] > 1:
                self.count[answer.table[-1]] -= 1
                answer.table[-1] = self.take()
                self.num_copies += 1

    def preempt(self, one: Asked) -> None:
        """2.2"""
        if one.live() == 1 and not self.always_swaps:
            for answer in one.unfinished():
                self.drop(answer)
            self.waiting.insert(0, one)
            self.preempted.append([one.name, "recompute"])
            return
        blocks = one.blocks()
        if self.num_cpu_used + len(blocks) > self.num_cpu_blocks:
            raise EngineDied("not enough CPU blocks")
        # a swapped table keeps the old numbers, so that what it shares stays visible
        for answer in one.unfinished():
            for block in answer.table:
                self.release(block)
        self.num_cpu_used += len(blocks)
        self.num_out += len(blocks)
        self.swapped.append(one)
        self.preempted.append([one.name, "swap"])

    def swap_in(self, one: Asked, blocks: list[int]) -> None:
        moved = {block: self.take() for block in blocks}
        for answer in one.unfinished():
            answer.table = [moved[block] for block in answer.table]
            for block in answer.table:
                self.count[block] += 1
        for block in moved.values():
            self.count[block] -= 1  # take() had counted one already
        self.num_cpu_used -= len(blocks)
        self.num_in += len(blocks)
        self.swapped_in.append(one.name)

    def sample(self, one: Asked) -> list[list]:
        """2.3: every running sequence makes a token; forks, then frees."""
        ops: list[list] = []
        before = one.unfinished()
        for answer in before:
            answer.num_tokens += 1
            answer.num_made += 1
        if len(one.answers) < one.num_samples:
            parent = one.answers[0]
            for wanted in one.wanted[: one.num_samples - 1]:
                child = Answer(self.next_number, parent.num_tokens, wanted, num_made=1)
                self.next_number += 1
                one.answers.append(child)
                child.is_finished = self.has_ended(child)
                if not child.is_finished:
                    child.table = list(parent.table)
                    for block in child.table:
                        self.count[block] += 1
                    ops.append(["F", parent.number, child.number])
        for answer in before:
            if self.has_ended(answer):
                answer.is_finished = True
                self.drop(answer)
                ops.append(["X", answer.number])
        return ops

    def has_ended(self, answer: Answer) -> bool:
        return answer.num_made >= answer.num_wanted or answer.num_tokens > self.max_model_len

    def take(self) -> int:
        block = self.free.pop()
        self.count[block] = 1
        return block

    def release(self, block: int) -> None:
        self.count[block] -= 1
        if self.count[block] == 0:
            self.free.append(block)

    def drop(self, answer: Answer) -> None:
        for block in answer.table:
            self.release(block)
        answer.table = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def replay(config: dict, trace: list[dict], max_steps: int = 10_000) -> tuple[list[dict], str]:
    """The rows of steps.jsonl, and why the engine died, or "". Empty steps are not rows."""
    engine, rows = Engine(config), []
    coming = sorted(trace, key=lambda row: float(row["arrival_step"]))
    step = 0
    while len(rows) < max_steps:
        if not engine.waiting and not engine.running and not engine.swapped:
            if not coming:
                break
            step = max(step, int(coming[0]["arrival_step"]))
        arrived = []
        while coming and float(coming[0]["arrival_step"]) <= step:
            arrived.append(coming.pop(0))
        try:
            rows.append({"step": step} | engine.step(arrived))
        except EngineDied as death:
            return rows, str(death)
        step += 1
    return rows, ""
