"""Golden runs of the paper-era schedulers (vllm-0.2, paper), replayed on GroupScheduler.

Which beams survive is an input: `ops` names every fork ("F", parent, child) and free ("X",
sequence) by number, and `arr_seq` the numbers of what arrives.
"""

from __future__ import annotations

from kvsim.engine.groups import Group, GroupScheduler
from kvsim.engine.kv.host import HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, StepPlan
from kvsim.engine.request import Request, Sequence, State
from kvsim.errors import UserError
from kvsim.golden_case import Case

WATERMARK = 0.01


class GroupReplay:
    """A case, one step at a time, in the golden columns."""

    def __init__(self, case: Case) -> None:
        config = case.config
        num_blocks, self.longest = config.num_gpu_blocks, config.max_model_len
        self.kv = Paged(num_blocks, config.block_size, can_fork=True)
        self.host = HostPool(config.num_cpu_blocks)
        watermark = WATERMARK if config.watermark is None else config.watermark
        self.scheduler = GroupScheduler(
            self.kv,
            self.host,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.longest,
            watermark_blocks=int(watermark * num_blocks),
            always_swaps=config.preemption_mode == "swap",
            mixes_prompts=config.rules == "paper",
        )
        self.ids = case.ids
        self.outputs = {asked.request.index: asked.outputs for asked in case.coming}
        self.coming = [*case.coming]
        self.has_beams = any(asked.request.is_beam for asked in case.coming)
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
        while self.coming and self.coming[0].arrival <= now:
            request = self.coming.pop(0).request
            # beams fork as `ops` says, and not of themselves
            width = 1 if request.is_beam else request.num_samples
            seq = Sequence(request, num_tokens=request.prompt_tokens, width=width)
            group = self.scheduler.submit(seq)
            if self.has_beams:  # how many candidates took numbers before is the sampler's doing
                self.next_number = next(numbers, self.next_number)
            row.setdefault("arr", []).append(self.ids[request.index])
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
            if self._wanted(seq.request, sample) == 1 or seq.num_tokens + 1 > self.longest
        )
        scheduler.commit(plan, 1, finished, stillborn=stillborn)
        forks = {}  # numbers go to samples in order, also to those that never fork
        for seq in firsts:
            forks[seq] = self.next_number
            self.next_number += width_of[seq] - 1
        own = [*scheduler.ops]
        ops: list[list] = []
        for op in told.get("ops", ()) if self.has_beams else ():
            group, one = self._known(op, told)
            if not group.request.is_beam:
                if own and own[0][1] is not None and op[0] == "F":
                    forks[own[0][0]] = op[2] - own[0][1].sample
                if own:
                    ops.append(self._did(*own.pop(0), forks))
            else:
                self._obey(op, group, one)
                ops.append(op)
        ops += [self._did(*pair, forks) for pair in own]
        if ops:
            row["ops"] = ops
        gone = [group for group in groups if not group.seqs] + scheduler.ignored
        if gone:
            row["fin"] = [self._id(group) for group in gone]
        row["free_end"] = self.kv.pool.num_free

    def _did(self, one: Sequence, child: Sequence | None, forks: dict[Sequence, int]) -> list:
        """A fork or free of the scheduler's own, in numbers."""
        if child is None:
            return ["X", self.number[one]]
        self.number[child] = forks[one] + child.sample
        self.by_number[self.number[child]] = self.by_number[self.number[one]][0], child
        return ["F", self.number[one], self.number[child]]

    def _known(self, op: list, told: dict) -> tuple[Group, Sequence]:
        if op[1] not in self.by_number:
            raise UserError(f"steps.jsonl: step {told['step']}: ops: {op}: no such sequence")
        return self.by_number[op[1]]

    def _obey(self, op: list, group: Group, one: Sequence) -> None:
        """A fork or free of beams, as told."""
        if op[0] == "X":
            self.scheduler.free(group, one)
            return
        child = Sequence(one.request)
        self.scheduler.fork(group, one, child)
        self.number[child] = op[2]
        self.by_number[op[2]] = group, child

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
