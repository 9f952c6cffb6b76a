"""The paper-era scheduler: groups of sequences, all-or-nothing preemption, recompute or swap."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.kv.host import HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.plan import (
    ARRIVALS,
    KV_MEMORY,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Fork,
    StepPlan,
    Work,
)
from kvsim.engine.request import Request, Sequence, State
from kvsim.engine.scheduler import LONGEST_PROMISE, Commit

MAX_WIDTH = 1 << 32  # above any number of sequences in a group: their orders stand together


class PaperEra(NamedTuple):
    """What GroupScheduler needs beyond the limits of every scheduler. `watermark` is the share of
    the pool that admission and swap-in leave free (0.01 in both systems)."""

    num_host_blocks: int
    watermark: float
    mixes_prompts: bool


@dataclass(slots=True, eq=False)
class Group:
    """A request: one prompt that `num_samples` answers (or beams) fork from."""

    request: Request
    order: int  # of arrival
    seqs: list[Sequence] = field(default_factory=list)  # unfinished, in order of their ids

    @property
    def live(self) -> int:
        """Sequences that it may run at once from here on (max_num_seqs counts them)."""
        request = self.request
        is_whole = request.is_beam or self.seqs[0].width > 1
        return request.num_samples if is_whole else len(self.seqs)


class GroupScheduler:
    """vLLM 0.2: a step is all prompts or all decodes; `mixes_prompts` lets them share one, as the
    paper's system does (Kwon et al. 2023, sections 4.3 to 4.5).

    First come first served over groups. Each decode step demands a free block for every running
    sequence, whether it needs one or not; who finds none preempts the newest group: by recompute
    where it has one sequence, by swap where it has more (or always, with `always_swaps`). Nothing
    is admitted while anything is swapped. The watermark guards admission and swap-in.

    Sequences that merely decode in a last block of their own stand in `decodes`; beams never do,
    since the model may drop one after any step.
    """

    is_by_priority = False

    def __init__(
        self,
        kv: Paged,
        host: HostPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        watermark_blocks: int,
        always_swaps: bool = False,
        mixes_prompts: bool = False,
    ) -> None:
        self.kv = kv
        self.host = host
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.longest = min(max_model_len, max_num_batched_tokens)
        self.watermark_blocks = watermark_blocks
        self.always_swaps = always_swaps
        self.mixes_prompts = mixes_prompts
        self.decodes = DecodeSet(kv.block_size)
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.swapped: list[Group] = []
        self.ignored: list[Group] = []  # dropped by the last plan: longer than a step or the model
        self.swapped_in: list[Group] = []  # by the last plan
        self.num_submitted = 0
        self.num_running = 0  # sequences
        self.num_computed = 0  # tokens with KV over running sequences, the decode set's aside
        self._group_of: dict[Sequence, Group] = {}
        self._stalled: list[Sequence] = []  # decodes that wait for the prompts of this step
        self._is_sorted = True  # running stands in order of arrival
        self.is_prompt_step = False
        self.num_reforks = 0  # beams dropped for others
        self.ops: list[
            tuple[Sequence, Sequence | None]
        ] = []  # forks (parent, child), frees (, None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of running sequences whose KV is in the cache."""
        decodes = self.decodes
        return self.num_computed + decodes.base + decodes.num_seqs * (decodes.clock - 1)

    @property
    def num_swapped_out(self) -> int:
        return self.host.num_swapped_out

    @property
    def num_swapped_in(self) -> int:
        return self.host.num_swapped_in

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether a request that grows to num_tokens could ever be served: its answers together,
        a free block for each, above the watermark. (0.2.0 itself waits for ever.)"""
        kv, num_samples = self.kv, request.num_samples
        own = -(-(num_tokens - 1) // kv.block_size) - len(kv.registered(request).blocks)
        num_blocks = len(kv.registered_blocks) + num_samples * (own + 1)
        return (
            num_samples <= self.max_num_seqs and num_blocks + self.watermark_blocks <= kv.num_blocks
        )

    def submit(self, seq: Sequence) -> Group:
        """Queue a prompt; `seq.width` answers or beams will fork from it."""
        group = self._group_of[seq] = Group(seq.request, self.num_submitted, [seq])
        seq.order = group.order * MAX_WIDTH
        self.num_submitted += 1
        self.waiting.append(group)
        return group

    def unfinished(self) -> list[Sequence]:
        """Every sequence submitted and not ended, counts brought up to now."""
        self.decodes.members()
        groups = (*self.running, *self.swapped, *self.waiting)
        return [seq for group in groups for seq in group.seqs]

    def steady_steps(self, plan: StepPlan) -> int:
        """How many steps, this plan's own included, are settled: after it, only plain decodes.

        That takes that everyone running stands in the decode set, and that nobody enters, while
        the pool only empties. The swapped and the head of the queue stay out: memory that lacks
        goes on to lack, and seats and budget do not change (but for a budget that prompts of this
        step had used). Each step must leave a block for every sequence of the widest group, so
        that none is preempted; and what a head needs that something else stopped, or its limit
        would be another one."""
        if self.decodes.num_seqs < self.num_running or not self.num_running:
            return 1
        if plan.preempted:
            return 1
        spare = self._widest()
        if self.waiting and not self.swapped and plan.limit != KV_MEMORY:
            if plan.limit == ARRIVALS or (plan.limit == MAX_NUM_BATCHED_TOKENS and plan.work):
                return 1  # nobody asked in this step, or the next one's budget is larger
            spare = max(spare, self._needed(self.waiting[0].seqs[0]) + self.watermark_blocks)
        return self.kv.headroom(self.decodes, LONGEST_PROMISE, spare)

    def plan(self) -> StepPlan:
        """The next step, its memory granted."""
        plan = StepPlan(self.decodes, self.max_num_batched_tokens)
        self.ignored, self.swapped_in = [], []
        if self.mixes_prompts:
            self._continue_running(plan)
            self.is_prompt_step = not plan.preempted and not self.swapped and self._admit(plan)
        else:
            self.is_prompt_step = not self.swapped and self._admit(plan)
            if self.is_prompt_step:
                self._stall(plan)
            else:
                self._continue_running(plan)
        decodes = self.decodes
        for seq, _, _ in plan.work:
            if seq.width == 1 and not seq.request.is_beam:
                self._join_next(seq, plan)
        if decodes.joined:
            plan.joined, decodes.joined = decodes.joined, []
        if decodes.left:
            plan.left, decodes.left = decodes.left, []
        return plan

    def commit(
        self,
        plan: StepPlan,
        num_steps: int,
        finished: list[Sequence],
        forks: list[Fork] | tuple[()] = (),
        stillborn: frozenset[tuple[int, int]] | None = None,
    ) -> Commit:
        """Take over that num_steps steps of the plan ran and that `finished` made their last token
        with the last: answers and beams fork where a prompt was computed, the beams that `forks`
        drops begin anew, then the finished ones give their blocks back. A sample that is complete
        with its first token, (request index, sample) in `stillborn`, never forks; None: the answers
        of a request are equally long, and end with their prompt or not at all.
        """
        decodes = self.decodes
        self.ops = []
        taken = self.kv.repeat(decodes, num_steps) if num_steps > 1 else []
        decodes.clock += num_steps
        parents = []
        if len(plan.work) > plan.num_joining:
            for seq, start, num_new in plan.work:
                if seq.joined_at >= 0:
                    continue
                seq.num_computed = start + num_new
                seq.num_tokens += 1
                self.num_computed += num_new
                if seq.width > 1:
                    parents.append(seq)
        for seq in self._stalled:
            self.num_computed -= seq.num_computed
            decodes.join(seq, decodes.clock)
        self._stalled.clear()
        if forks:
            self.kv.refork(forks)
            self.num_reforks += len(forks)
        forked = self._part(parents, finished, stillborn) if parents or finished else []
        ended = [seq for seq in finished if seq.state is State.FINISHED]
        return Commit(ended, forked, taken)

    def _part(
        self,
        parents: list[Sequence],
        finished: list[Sequence],
        stillborn: frozenset[tuple[int, int]] | None,
    ) -> list[Sequence]:
        """Fork the answers of parents and free the finished, group by group; who forked off."""
        touched = {self._group_of[seq] for seq in (*parents, *finished)}
        over, forked = set(finished), []
        for group in [group for group in self.running if group in touched]:
            parent = group.seqs[0]
            if parent.width > 1:
                if stillborn is None and parent not in over:
                    forked += self._fork(group, frozenset())
                elif stillborn is not None:
                    forked += self._fork(group, stillborn)
            for seq in [seq for seq in group.seqs if seq in over]:
                self.free(group, seq)
        return forked

    def fork(self, group: Group, parent: Sequence, child: Sequence) -> None:
        """Let child begin as a copy of parent that shares all its blocks."""
        child.num_tokens, child.num_computed = parent.num_tokens, parent.num_computed
        child.state = State.RUNNING
        child.order = group.order * MAX_WIDTH + len(group.seqs)
        self.kv.fork(parent, child)
        group.seqs.append(child)
        self._group_of[child] = group
        self.num_running += 1
        self.num_computed += child.num_computed
        self.ops.append((parent, child))

    def free(self, group: Group, seq: Sequence) -> None:
        """End a sequence; its group ends with the last one."""
        self._leave(seq)
        self.kv.release(seq)
        del self._group_of[seq]
        seq.state = State.FINISHED
        group.seqs.remove(seq)
        self.ops.append((seq, None))
        if not group.seqs:
            self.running.remove(group)

    def _admit(self, plan: StepPlan) -> bool:
        """Prompts from the head of the queue, whole; whether anything came of it."""
        if not self.waiting:
            return False
        kv, num_before = self.kv, len(plan.work)
        seats = sum(group.live for group in self.running)
        budget = self.max_num_batched_tokens
        if self.mixes_prompts:
            budget -= self.decodes.num_seqs + sum(work.num_new for work in plan.work)
        while self.waiting:
            group = self.waiting[0]
            (seq,) = group.seqs
            if seq.num_tokens > self.longest:
                self.ignored.append(self.waiting.popleft())
                del self._group_of[seq]
                continue
            hit = kv.match(seq)
            num_hit = hit.num_tokens
            num_new = seq.num_tokens - num_hit
            if kv.pool.num_free - self._needed(seq) < self.watermark_blocks:
                plan.limit = KV_MEMORY
                break
            if num_new > budget:
                plan.limit = MAX_NUM_BATCHED_TOKENS
                break
            if seats + group.live > self.max_num_seqs:
                plan.limit = MAX_NUM_SEQS
                break
            self.waiting.popleft()
            moves = kv.admit(seq, hit, num_new, is_alone=True)
            assert moves == [], "the pool was asked, and a prompt copies nothing"
            self._run(group, num_hit)
            budget -= num_new
            seats += group.live
            plan.work.append(Work(seq, num_hit, num_new))
            plan.admitted.append(seq)
        return len(plan.work) > num_before or bool(self.ignored)

    def _needed(self, seq: Sequence) -> int:
        """Blocks that a prompt takes when it is admitted."""
        return -(-seq.num_tokens // self.kv.block_size) - len(self.kv.match(seq).blocks)

    def _run(self, group: Group, num_hit: int) -> None:
        (seq,) = group.seqs
        seq.num_computed = num_hit
        self._enter(group)
        if seq.num_preemptions:
            seq.num_resumed_hit += num_hit
        else:
            seq.num_hit = num_hit
        seq.num_recomputed += max(seq.num_lost - num_hit, 0)
        seq.num_lost = 0

    def _continue_running(self, plan: StepPlan) -> None:
        """Slots for the running groups, oldest first, at the expense of the newest; then the
        swapped come back, if nobody was preempted."""
        if not self._is_sorted:
            self.running.sort(key=lambda group: group.order)
            self._is_sorted = True
        if not self._grant_all():
            self._walk(plan)
        if plan.preempted:
            plan.limit = KV_MEMORY
        elif self.swapped:
            self._swap_back(plan)

    def _grant_all(self) -> bool:
        """Give everyone a slot at once, where all stand in the decode set and no group can come to
        lack the free blocks that are demanded; else change nothing and return False."""
        decodes = self.decodes
        needed = len(decodes.growing(decodes.clock))
        if decodes.num_seqs < self.num_running or (self.kv.pool.num_free - needed < self._widest()):
            return False
        is_granted = self.kv.grant_all(decodes)
        assert is_granted, "the pool was asked"
        return True

    def _walk(self, plan: StepPlan) -> None:
        queue = deque(self.running)
        self.running = []
        while queue:
            group = queue.popleft()
            while len(group.seqs) > self.kv.pool.num_free:
                if not queue:
                    self._preempt(group, plan)
                    break
                self._preempt(queue.pop(), plan)
            else:
                self._give_slots(group, plan)
                self.running.append(group)

    def _swap_back(self, plan: StepPlan) -> None:
        seats = sum(group.live for group in self.running)
        self.swapped.sort(key=lambda group: group.order)
        while self.swapped:
            group = self.swapped[0]
            distinct = len({block for seq in group.seqs for block in seq.host_blocks})
            free = self.kv.pool.num_free - distinct - len(group.seqs)
            if free < self.watermark_blocks or seats + group.live > self.max_num_seqs:
                plan.limit = KV_MEMORY
                break
            self.swapped.pop(0)
            plan.moves += self.host.swap_in(self.kv, group.seqs)
            seats += group.live
            self.swapped_in.append(group)
            plan.admitted += group.seqs
            self._enter(group)
            self._give_slots(group, plan)

    def _enter(self, group: Group) -> None:
        """Let a group run from here on, its memory granted."""
        if self.running and self.running[-1].order > group.order:
            self._is_sorted = False
        self.running.append(group)
        self.num_running += len(group.seqs)
        for seq in group.seqs:
            seq.state = State.RUNNING
            self.num_computed += seq.num_computed

    def _leave(self, seq: Sequence) -> None:
        """Take a running sequence out of all counts and the decode set."""
        self.num_running -= 1
        if seq.joined_at >= 0:
            self.decodes.leave(seq)
        else:
            self.num_computed -= seq.num_computed

    def _stall(self, plan: StepPlan) -> None:
        """Let the decodes wait for a step that is all prompts."""
        for seq in self.decodes.members():
            self.decodes.leave(seq)
            self.num_computed += seq.num_computed
            self._stalled.append(seq)

    def _join_next(self, seq: Sequence, plan: StepPlan) -> None:
        """seq computes all it knows in this step, and merely decodes from the next one on."""
        self.num_computed -= seq.num_computed
        seq.num_computed = seq.num_tokens
        seq.num_tokens += 1
        self.decodes.join(seq, self.decodes.clock + 1)
        plan.num_joining += 1

    def _widest(self) -> int:
        """Sequences of the running group that has most."""
        if self.num_running == len(self.running):
            return 1
        return max(len(group.seqs) for group in self.running)

    def _give_slots(self, group: Group, plan: StepPlan) -> None:
        decodes = self.decodes
        growing = decodes.growing(decodes.clock)
        for seq in group.seqs:
            if seq.joined_at >= 0:
                if seq.order not in growing:
                    continue
                decodes.sync(seq)
            moves = self.kv.grow(seq, 1)
            assert moves is not None, "a block is free for every sequence of the group"
            plan.moves += moves
            if seq.joined_at < 0:
                plan.work.append(Work(seq, seq.num_computed, 1))

    def _preempt(self, group: Group, plan: StepPlan) -> None:
        """All of a group or nothing: throw its KV away, or move it to the host."""
        for seq in group.seqs:
            self._leave(seq)
        if group.live == 1 and not self.always_swaps:
            (seq,) = group.seqs
            self.kv.release(seq)
            seq.num_lost = seq.num_computed
            seq.num_computed = 0
            seq.state = State.WAITING
            self.waiting.appendleft(group)
        else:
            plan.moves += self.host.swap_out(self.kv, group.seqs)
            for seq in group.seqs:
                seq.state = State.SWAPPED
            self.swapped.append(group)
        for seq in group.seqs:
            seq.num_preemptions += 1
        plan.preempted += group.seqs

    def _fork(self, group: Group, stillborn: frozenset[tuple[int, int]]) -> list[Sequence]:
        """Children for all samples but the last, which the parent keeps."""
        (parent,) = group.seqs
        children = []
        for sample in range(parent.width - 1):
            if (parent.request.index, sample) in stillborn:
                continue
            child = Sequence(parent.request, sample, admitted_ns=parent.admitted_ns)
            self.fork(group, parent, child)
            children.append(child)
        parent.sample = parent.width - 1
        parent.width = 1
        return children
