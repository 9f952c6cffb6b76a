"""Golden runs of the paper-era scheduler (`oracle: v0.2.0`), replayed on GroupScheduler.

Beside the columns of later runs a trace has `n` (parallel answers; output_tokens may be "a|b|c",
one each) and `beam`. Which beams survive is an input: `ops` names every fork ("F", parent, child)
and free ("X", sequence) by number, and `arr_seq` the numbers of what arrives.
"""

from __future__ import annotations

from kvsim.engine.groups import Group, GroupScheduler
from kvsim.engine.kv.host import HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, StepPlan
from kvsim.engine.request import Request, Sequence, Span, State


def arrival_of(row: dict) -> float:
    return float(row["arrival_step"] if "arrival_step" in row else row["arrival_time"])


class GroupReplay:
    """A case, one step at a time, in the golden columns."""

    def __init__(self, config: dict, trace: list[dict]) -> None:
        num_blocks, self.longest = config["num_gpu_blocks"], config["max_model_len"]
        self.kv = Paged(num_blocks, config["block_size"], can_fork=True)
        self.host = HostPool(config["num_cpu_blocks"])
        self.scheduler = GroupScheduler(
            self.kv,
            self.host,
            max_num_seqs=config.get("max_num_seqs", 256),
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=self.longest,
            watermark_blocks=int(config.get("watermark", 0.01) * num_blocks),
            always_swaps=config.get("preemption_mode") == "swap",
        )
        self.ids = [row["request_id"] for row in trace]
        self.outputs = [list(map(int, row["output_tokens"].split("|"))) for row in trace]
        self.coming = sorted(enumerate(trace), key=lambda pair: arrival_of(pair[1]))
        self.number: dict[Sequence, int] = {}  # of every sequence there has been
        self.by_number: dict[int, tuple[Group, Sequence]] = {}
        self.next_number = 0

    def step(self, told: dict) -> dict:
        row: dict = {"step": told["step"]}
        self._arrive(told, row)
        scheduler = self.scheduler
        plan = scheduler.plan()
        is_prompt = scheduler.is_prompt_step
        row["kind"] = "prompt" if is_prompt else "decode"
        if is_prompt:
            row["sched"] = [[self._name(work.seq), work.num_new] for work in plan.work]
        else:
            row["sched"] = [[self._id(group), len(group.seqs)] for group in scheduler.running]
        num_standing = plan.decodes.num_seqs - plan.num_joining
        row["batched"] = sum(work.num_new for work in plan.work) + num_standing
        self._say_memory(plan, row)
        self._commit(plan, told, row)
        return row

    def _arrive(self, told: dict, row: dict) -> None:
        now = told.get("t", told["step"])
        numbers = iter(told.get("arr_seq", ()))
        while self.coming and arrival_of(self.coming[0][1]) <= now:
            index, one = self.coming.pop(0)
            prompt, width = int(one["prompt_tokens"]), int(one["n"])
            is_beam = one.get("beam") == "1"
            request = Request(index, (Span(index, 0, prompt),), prompt, width, is_beam)
            # beams fork as `ops` says, and not of themselves
            seq = Sequence(request, num_tokens=prompt, width=1 if is_beam else width)
            group = self.scheduler.submit(seq)
            if is_beam:  # how many candidates took numbers before is the sampler's doing
                self.next_number = next(numbers)
            row.setdefault("arr", []).append(self.ids[index])
            row.setdefault("arr_seq", []).append(self._enter(group, seq))

    def _say_memory(self, plan: StepPlan, row: dict) -> None:
        scheduler, pool = self.scheduler, self.kv.pool
        moved = {kind: [m for m in plan.moves if m.kind == kind] for kind in (SWAP_IN, SWAP_OUT)}
        if scheduler.ignored:
            row["ign"] = [self._id(group) for group in scheduler.ignored]
        if plan.preempted:
            modes = {
                self._name(seq): "swap" if seq.state is State.SWAPPED else "recompute"
                for seq in plan.preempted
            }
            row["prm"] = [[name, mode] for name, mode in modes.items()]
        if scheduler.swapped_in:
            row["swapin"] = [self._id(group) for group in scheduler.swapped_in]
        if any(moved.values()):
            row["blocks_in"], row["blocks_out"] = len(moved[SWAP_IN]), len(moved[SWAP_OUT])
        row |= {
            "copies": sum(move.kind == COPY for move in plan.moves),
            "run": len(scheduler.running),
            "wait": len(scheduler.waiting),
            "swp": len(scheduler.swapped),
            "used": self.kv.num_blocks - pool.num_free,
            "free": pool.num_free,
            "cpu_used": self.host.num_used,
            "refs": sum(len(seq.blocks) for group in scheduler.running for seq in group.seqs),
        }

    def _commit(self, plan: StepPlan, told: dict, row: dict) -> None:
        scheduler = self.scheduler
        groups = [*scheduler.running]
        width_of = {work.seq: work.seq.width for work in plan.work}
        scheduler.unfinished()  # brings the counts of decodes up to now
        making = dict.fromkeys([*(work.seq for work in plan.work), *plan.decodes.members()])
        finished = [seq for seq in making if not seq.request.is_beam and self._is_last(seq)]
        firsts = [work.seq for work in plan.work if width_of[work.seq] > 1]
        stillborn = frozenset(
            (seq.request.index, sample)
            for seq in firsts
            for sample in range(seq.width - 1)
            if self._wanted(seq.request, sample) == 1
        )
        scheduler.commit(plan, 1, finished, stillborn=stillborn)
        ops: list[list] = []
        base = {}
        for seq in firsts:  # numbers go to samples in order, also to those that never fork
            base[seq] = self.next_number
            self.next_number += width_of[seq] - 1
        for one, child in scheduler.ops:
            if child is None:
                ops.append(["X", self.number[one]])
            else:
                self.number[child] = base[one] + child.sample
                self.by_number[self.number[child]] = self.by_number[self.number[one]][0], child
                ops.append(["F", self.number[one], self.number[child]])
        for op in told.get("ops", ()) if any(group.request.is_beam for group in groups) else ():
            group, one = self.by_number[op[1]]
            if op[0] == "X":
                scheduler.free(group, one)
            else:
                child = Sequence(one.request)
                scheduler.fork(group, one, child)
                self.number[child] = op[2]
                self.by_number[op[2]] = group, child
            ops.append(op)
        if ops:
            row["ops"] = ops
        gone = [group for group in groups if not group.seqs] + scheduler.ignored
        if gone:
            row["fin"] = [self._id(group) for group in gone]
        row["free_end"] = self.kv.pool.num_free

    def _enter(self, group: Group, seq: Sequence) -> int:
        number = self.next_number
        self.next_number += 1
        self.number[seq] = number
        self.by_number[number] = group, seq
        return number

    def _is_last(self, seq: Sequence) -> bool:
        """Whether the token that this step makes is the answer's last: the prompt's own sample is
        the last one. An answer also ends when it has passed max_model_len."""
        sample = seq.width - 1 if seq.width > 1 else seq.sample
        wanted = self._wanted(seq.request, sample)
        return seq.num_generated + 1 >= wanted or seq.num_tokens + 1 > self.longest

    def _wanted(self, request: Request, sample: int) -> int:
        outputs = self.outputs[request.index]
        return outputs[min(sample, len(outputs) - 1)]

    def _id(self, group: Group) -> str:
        return self.ids[group.request.index]

    def _name(self, seq: Sequence) -> str:
        return self.ids[seq.request.index]
