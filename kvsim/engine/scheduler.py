"""The iteration-level scheduler: first come first served or by priority, chunked prefill,
preemption by recompute. Its rules are those of vLLM V1."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvsim.engine.batching import Batching
from kvsim.engine.decodes import DecodeSet
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.engine.plan import (
    ARRIVALS,
    KV_MEMORY,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Fork,
    StepPlan,
    Work,
)
from kvsim.engine.request import Request, Sequence, State, answer_stream
from kvsim.engine.rules import LATEST, Rules, Unchunked
from kvsim.engine.waiting import ByPriority

NO_LIMIT = 1 << 62
LONGEST_PROMISE = 256
"""Steps that one promise may hold: bounds its arrays, and what a cut throws away."""


class Commit(NamedTuple):
    """Who leaves now, who forked off with a first token, and the blocks that each repeat took."""

    ended: list[Sequence]
    forked: list[Sequence]
    taken: list[int]


class Scheduler:
    """Plans steps over one KV pool and commits what was executed.

    A step closes part of the gap between a sequence's known and computed tokens; there are no
    phases. `running` is in order of admission. Of its members, those that merely decode stand in
    `decodes`; `partial` are the others: prefill under way, or freshly forked.
    """

    num_swapped_out = num_swapped_in = 0  # blocks: V1 does not swap
    num_reforks = 0  # and its engine core knows no beams

    def __init__(
        self,
        kv: KVCachePolicy,
        batching: Batching,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool,
        long_prefill_token_threshold: int = 0,
        is_by_priority: bool = False,
        rules: Rules = LATEST,
    ) -> None:
        self.kv = kv
        self.batching = batching
        self._returns_together = batching.returns_together
        self._publishes = kv.publishes_computed
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self._unchunked = Unchunked.CHUNK if chunked_prefill else rules.unchunked
        self._spares_lone_prefill = rules.spares_lone_prefill
        self._longest_chunk = NO_LIMIT  # of the step being planned
        self._passed_over: list[Sequence] = []  # heads too long for a step, in this one
        self.is_by_priority = is_by_priority
        self._num_submitted = 0
        self.waiting: deque[Sequence] | ByPriority = ByPriority() if is_by_priority else deque()
        self.running: dict[int, Sequence] = {}
        self.decodes = DecodeSet(kv.block_size)
        self.partial: dict[int, Sequence] = {}
        self.num_seats = 0  # max_num_seqs limits them: one for each answer of a running sequence
        self.num_computed = 0  # tokens with KV over running sequences, the decode set's aside
        self._held: list[Sequence] = []  # complete answers of a static batch
        self._stalled: list[Sequence] = []  # decodes that the token budget left out of this step
        self._next_order = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of running sequences whose KV is in the cache."""
        decodes = self.decodes
        return self.num_computed + decodes.base + decodes.num_seqs * (decodes.clock - 1)

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether a request that grows to num_tokens could ever be served."""
        return request.num_samples <= self.max_num_seqs and self.kv.fits(request, num_tokens)

    def submit(self, seq: Sequence) -> None:
        if self.is_by_priority:
            seq.rank = (seq.request.priority, self._num_submitted, seq.sample)
            self._num_submitted += 1
        self.waiting.append(seq)

    def unfinished(self) -> list[Sequence]:
        """Every sequence submitted and not ended, counts brought up to now."""
        self.decodes.members()
        return [*self.running.values(), *self.waiting]

    def plan(self) -> StepPlan:
        """The next step, its memory granted."""
        plan = StepPlan(self.decodes, self.max_num_batched_tokens)
        if self.long_prefill_token_threshold:
            self._longest_chunk = self._chunk_limit()
        if self._held:
            plan.num_padding_seqs = len(self._held)
        self.batching.fill(self, plan)
        decodes = self.decodes
        for seq, start, num_new in plan.work:
            if start + num_new == seq.num_tokens and seq.width == 1:
                self._join_next(seq, plan)
        if decodes.joined:
            plan.joined, decodes.joined = decodes.joined, []
        if decodes.left:
            plan.left, decodes.left = decodes.left, []
        return plan

    def continue_running(self, plan: StepPlan) -> None:
        """Give every running sequence its next tokens, oldest first. Who finds no memory preempts
        the newest, itself at last."""
        kv, decodes = self.kv, self.decodes
        if self.is_by_priority:
            if self.partial or not kv.grant_all(decodes):
                self._continue_by_priority(plan)
            else:
                plan.token_budget -= decodes.num_seqs
            return
        wanted = self._share_budget(plan) if self.partial else []
        if wanted or not kv.grant_all(decodes):
            wanted += [(seq, 1) for seq in kv.growing(decodes)]
            wanted += [(seq, 0) for seq in kv.filling(decodes)]
            wanted.sort(key=lambda pair: pair[0].order)
        for seq, num_new in wanted:
            if seq.state is not State.RUNNING:  # preempted by one before it
                continue
            if num_new == 0:
                kv.fill(seq, decodes.clock)
                continue
            if seq.joined_at >= 0:
                decodes.sync(seq)
            while (moves := kv.grow(seq, num_new)) is None:
                victim = self.running[next(reversed(self.running))]
                self._preempt(victim, plan)
                if victim is seq:
                    break
            else:
                plan.moves += moves
                if seq.joined_at < 0:
                    plan.work.append(Work(seq, seq.num_computed, num_new))
                    plan.token_budget -= num_new
        plan.token_budget -= decodes.num_seqs
        if plan.preempted:
            plan.limit = KV_MEMORY

    def _continue_by_priority(self, plan: StepPlan) -> None:
        """As continue_running, at the expense of the lowest in rank, who may have been served in
        this step already: what he was given goes back to the budget. Who preempts himself ends the
        step's decodes and chunks, and those behind him are left out of it (vLLM V1)."""
        kv, decodes = self.kv, self.decodes
        has_failed = False
        for seq in [*self.running.values()]:
            if seq.state is not State.RUNNING:
                continue
            if seq.joined_at < 0 and seq.order not in self.partial:
                continue  # complete, and held for the rest of its batch
            if has_failed or plan.token_budget <= 0:
                if seq.joined_at >= 0:
                    self._stall(seq)
                continue
            num_new = 1
            if seq.joined_at >= 0:
                decodes.sync(seq)
            else:
                num_new = seq.num_tokens - seq.num_computed
                num_new = min(num_new, plan.token_budget, self._longest_chunk)
            while not has_failed and (moves := kv.grow(seq, num_new)) is None:
                victim = max(self.running.values(), key=lambda running: running.rank)
                has_failed = victim is seq
                if victim.order < seq.order:
                    self._take_back(victim, plan)
                self._preempt(victim, plan)
            if not has_failed:
                plan.moves += moves
                plan.token_budget -= num_new
                if seq.joined_at < 0:
                    plan.work.append(Work(seq, seq.num_computed, num_new))
        if plan.preempted:
            plan.limit = KV_MEMORY

    def _take_back(self, seq: Sequence, plan: StepPlan) -> None:
        """Undo what this step gave to seq, its blocks aside."""
        if seq.joined_at >= 0:
            plan.token_budget += 1
        work = [one for one in plan.work if one.seq is seq]
        plan.token_budget += sum(one.num_new for one in work)
        plan.work = [one for one in plan.work if one.seq is not seq]
        moves = [move for move in plan.moves if move.target not in seq.blocks]
        self.kv.num_copies -= len(plan.moves) - len(moves)
        plan.moves = moves

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit from the head of the queue while seats, token budget and memory last. Nobody
        overtakes the head; the last prompt admitted is cut to the budget."""
        if self._passed_over:
            self._passed_over.clear()
        limit = self._admit_heads(plan) if self.waiting else None
        if self._passed_over:
            self.waiting.extendleft(self._passed_over)  # reversed, as vLLM 0.11 does
            limit = MAX_NUM_BATCHED_TOKENS
        if limit is not None:
            plan.limit = limit
        elif self.num_seats >= self.max_num_seqs:
            plan.limit = MAX_NUM_SEQS
        elif plan.token_budget <= 0:
            plan.limit = MAX_NUM_BATCHED_TOKENS
        else:
            plan.limit = ARRIVALS

    def _admit_heads(self, plan: StepPlan) -> int | None:
        """Admit while it goes; what stopped it, or None if nobody is left."""
        kv, waiting = self.kv, self.waiting
        while waiting:
            seq = waiting[0]
            if self.num_seats + seq.width > self.max_num_seqs:
                return MAX_NUM_SEQS
            if plan.token_budget <= 0:
                return MAX_NUM_BATCHED_TOKENS
            hit = kv.match(seq)
            num_hit = hit.num_tokens
            num_new = seq.num_tokens - num_hit
            if self.long_prefill_token_threshold:
                num_new = min(num_new, self._longest_chunk)
            if num_new > plan.token_budget:
                if self._unchunked is Unchunked.STOP:
                    return MAX_NUM_BATCHED_TOKENS
                if self._unchunked is Unchunked.SKIP:
                    self._passed_over.append(waiting.popleft())
                    continue
                num_new = plan.token_budget
            moves = kv.admit(seq, hit, num_new, is_alone=not self.running)
            if moves is None:
                return KV_MEMORY
            waiting.popleft()
            self._run(seq, num_hit)
            plan.moves += moves
            plan.admitted.append(seq)
            plan.work.append(Work(seq, num_hit, num_new))
            plan.token_budget -= num_new
        return None

    def steady_steps(self, plan: StepPlan) -> int:
        """How many steps, this plan's own included, are settled: after it, only plain decodes.

        That takes that everyone running decodes from the next step on, and nobody enters. A head
        of the queue that memory or seats blocked stays blocked meanwhile: admission asks room for
        all its known tokens, and its hits cannot grow, unless it quotes an answer that is being
        written."""
        if self.partial or self._stalled or plan.preempted or not plan.decodes.num_seqs:
            return 1
        if plan.work and (plan.limit == MAX_NUM_BATCHED_TOKENS or self._returns_together):
            return 1  # what limits the next step is another thing
        if plan.work and self._publishes:
            return 1  # what is published may be hit, and blocks of equal tokens become one
        if self.waiting and (self._passed_over or not self.kv.blocks_for_good):
            return 1
        if self.waiting and self.kv.is_caching and self._quotes_running(self.waiting[0]):
            return 1
        return self.kv.headroom(plan.decodes, LONGEST_PROMISE)

    def commit(
        self,
        plan: StepPlan,
        num_steps: int,
        finished: list[Sequence],
        forks: list[Fork] | tuple[()] = (),
    ) -> Commit:
        """Take over that num_steps steps of the plan ran and `finished` ended with the last."""
        assert not forks, "no request of these rules has beams"
        decodes = self.decodes
        forked: list[Sequence] = []
        taken = self.kv.repeat(decodes, num_steps) if num_steps > 1 else []
        decodes.clock += num_steps
        if self._publishes:
            self._publish(plan.work)
        if len(plan.work) > plan.num_joining:
            for seq, start, num_new in plan.work:
                if seq.joined_at >= 0:
                    continue
                seq.num_computed = start + num_new
                self.num_computed += num_new
                if seq.num_computed == seq.num_tokens:  # its answers part here
                    seq.num_tokens += 1
                    if seq not in finished:
                        forked += self._fork(seq)
        if self._stalled:
            for seq in self._stalled:
                self.num_computed -= seq.num_computed
                decodes.join(seq, decodes.clock)
            self._stalled.clear()
        for seq in finished:
            self._stop(seq)
        if self._returns_together:
            self._held += finished
            finished = self._held if len(self._held) == len(self.running) else []
        for seq in finished:
            self._end(seq)
        if finished is self._held:
            self._held = []
        return Commit(finished, forked, taken)

    def _share_budget(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Tokens of the partial sequences in this step; decodes behind the end of the budget are
        taken out of the set for it. Everyone before the first partial one needs one token."""
        first = min(self.partial)
        tail = []
        for order in reversed(self.running):
            tail.append(self.running[order])
            if order == first:
                break
        budget = plan.token_budget - (len(self.running) - len(tail))
        wanted = []
        for seq in reversed(tail):
            if seq.joined_at >= 0:
                if budget > 0:
                    budget -= 1
                else:
                    self._stall(seq)
            elif seq.order in self.partial and budget > 0:
                num_new = min(seq.num_tokens - seq.num_computed, budget, self._longest_chunk)
                wanted.append((seq, num_new))
                budget -= num_new
        return wanted

    def _stall(self, seq: Sequence) -> None:
        """Leave a decode out of this step."""
        self.decodes.leave(seq)
        self.num_computed += seq.num_computed
        self._stalled.append(seq)

    def _chunk_limit(self) -> int:
        """The longest chunk of a step: long_prefill_token_threshold, unless it does not apply."""
        is_lone = len(self.running) + len(self.waiting) <= 1
        if is_lone and self._spares_lone_prefill:
            return NO_LIMIT
        return self.long_prefill_token_threshold

    def _quotes_running(self, seq: Sequence) -> bool:
        quoted = {span.stream for span in seq.request.prompt if span.stream < 0}
        return bool(quoted) and any(
            answer_stream(other.request.index) in quoted for other in self.running.values()
        )

    def _run(self, seq: Sequence, num_hit: int) -> None:
        seq.state = State.RUNNING
        seq.order = self._next_order
        self._next_order += 1
        self.running[seq.order] = seq
        self.partial[seq.order] = seq
        self.num_seats += seq.width
        seq.num_computed = num_hit
        self.num_computed += num_hit
        if seq.num_preemptions:
            seq.num_resumed_hit += num_hit
        else:
            seq.num_hit = num_hit
        seq.num_recomputed += max(seq.num_lost - num_hit, 0)
        seq.num_lost = 0

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        """Throw seq's KV away and put it at the head of the queue, its tokens kept."""
        self._stop(seq)
        if seq in self._stalled:
            self._stalled.remove(seq)
        seq.num_lost = seq.num_computed
        self._leave(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        seq.state = State.WAITING
        self.waiting.appendleft(seq)
        plan.preempted.append(seq)

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """Let the parallel answers of a prompt part: each has its first token now, and shares the
        prompt's blocks until it writes (Kwon et al. 2023, section 4.4)."""
        children = []
        for sample in range(1, parent.width):
            child = Sequence(
                parent.request,
                sample,
                num_tokens=parent.num_tokens,
                num_computed=parent.num_computed,
                admitted_ns=parent.admitted_ns,
                rank=(*parent.rank[:2], sample),
            )
            self.kv.fork(parent, child)
            child.state = State.RUNNING
            child.order = self._next_order
            self._next_order += 1
            self.running[child.order] = child
            self.partial[child.order] = child
            self.num_computed += child.num_computed
            children.append(child)
        parent.width = 1
        return children

    def _join_next(self, seq: Sequence, plan: StepPlan) -> None:
        """seq computes all it knows in this step, and merely decodes from the next one on."""
        del self.partial[seq.order]
        self.num_computed -= seq.num_computed
        seq.num_computed = seq.num_tokens
        seq.num_tokens += 1
        self.decodes.join(seq, self.decodes.clock + 1)
        plan.num_joining += 1

    def _stop(self, seq: Sequence) -> None:
        """Take seq out of the step's work."""
        if seq.joined_at >= 0:
            self.decodes.leave(seq)
            self.num_computed += seq.num_computed
        self.partial.pop(seq.order, None)

    def _publish(self, work: list[Work]) -> None:
        for one in work:
            if not one.is_decode:
                self.kv.publish(one.seq, one.start + one.num_new)

    def _end(self, seq: Sequence) -> None:
        if self._publishes:
            self.kv.publish(seq, seq.num_computed)
        self._leave(seq)
        seq.state = State.FINISHED

    def _leave(self, seq: Sequence) -> None:
        self.kv.release(seq)
        del self.running[seq.order]
        self.num_seats -= seq.width
        self.num_computed -= seq.num_computed
