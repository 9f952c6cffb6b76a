"""Both schedulers beside a model that knows which token's KV lies in which slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.groups import GroupScheduler
from kvsim.engine.kv.hash_chain import HashChain
from kvsim.engine.kv.host import HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.radix import Radix
from kvsim.engine.plan import SWAP_IN, SWAP_OUT, StepPlan
from kvsim.engine.request import Request, Sequence, Span, State, answer_stream, merged
from kvsim.engine.rules import RULES, Admission, Rules, Unchunked
from kvsim.engine.scheduler import Scheduler

LONGEST = 24  # tokens of a request
PAPER_ERA = {"vllm-0.2": False, "paper": True}  # whether prompts and decodes share a step
SAME_RUNS = settings(derandomize=True, database=None, deadline=None, stateful_step_count=30)
FEWER_RUNS = settings(SAME_RUNS, max_examples=30)


@dataclass(eq=False)
class Answer:
    """What the model knows of a sequence: the tokens of its text, and how far it has come."""

    seq: Sequence
    number: int  # of submission
    prompt: list[tuple[int, int]]
    most: int  # tokens of its answer at which it has to end
    known: int
    computed: int = 0
    num_made: int = 0
    has_run: bool = False
    names: list[int] = field(default_factory=list)  # of each token and all before it

    def name(self, place: int) -> int:
        while len(self.names) <= place:
            at = len(self.names)
            token = self.prompt[at] if at < len(self.prompt) else self._written(at)
            self.names.append(hash((self.names[-1] if at else 0, token)))
        return self.names[place]

    def _written(self, at: int) -> tuple:
        """A token of its answer; that of a further sample nobody can quote."""
        index, sample = self.seq.request.index, self.seq.sample
        stream = ("further", index, sample) if sample else answer_stream(index)
        return stream, at - len(self.prompt)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps run, and whoever makes a token may end with it."""

    forbids_preemption = False
    is_in_order = True  # nobody is admitted before one who came earlier, resumed ones aside
    is_by_priority = False
    reads_what_it_wrote = True

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[Sequence, Answer] = {}
        self.asked: list[tuple[tuple[Span, ...], int]] = []  # prompt and answer by request
        self.slots: dict[tuple[int, int], int] = {}  # (block, place in it) -> name of its token
        self.host_slots: dict[tuple[int, int], int] = {}
        self.last_admitted = -1

    def make(self, draw: Callable, size: int, num_blocks: int, seats: int, budget: int) -> None:
        raise NotImplementedError

    def running(self) -> list[Sequence]:
        return list(self.scheduler.running.values())

    def seats(self) -> int:
        return sum(seq.width for seq in self.running())

    @initialize(data=st.data())
    def build(self, data):
        self.size = data.draw(st.sampled_from((1, 2, 3, 4, 8)))
        self.num_blocks = data.draw(st.integers(8, 2 * LONGEST)) // self.size + 1
        self.max_num_seqs = data.draw(st.integers(1, 6))
        self.budget = data.draw(st.sampled_from((0, 0, 2, 5, LONGEST))) + self.max_num_seqs
        self.make(data.draw, self.size, self.num_blocks, self.max_num_seqs, self.budget)

    @rule(data=st.data())
    def submit(self, data):
        index, draw = len(self.asked), data.draw
        answer = draw(st.sampled_from((1, 2, 5, 9, 12)))
        spans = [Span(1000, 0, draw(st.integers(0, 8)))]
        if index and draw(st.booleans()):
            quoted = draw(st.integers(0, index - 1))
            prompt, written = self.asked[quoted]
            spans = [*prompt, Span(answer_stream(quoted), 0, draw(st.integers(1, written)))]
        spans = merged((*spans, Span(index, 0, draw(st.integers(1, 6)))))
        length = sum(span.length for span in spans)
        width = draw(st.sampled_from((1, 1, 1, 2, 3))) if self.scheduler.kv.can_fork else 1
        request = Request(index, spans, length, width, answer, draw(st.integers(0, 2)))
        if length + answer > LONGEST or not self.scheduler.fits(request, length + answer):
            return
        self.asked.append((spans, answer))
        seq = Sequence(request, num_tokens=length, width=width)
        text = [(stream, start + n) for stream, start, count in spans for n in range(count)]
        self.answers[seq] = Answer(seq, index, text, answer, length)
        self.scheduler.submit(seq)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def step(self, data):
        some = data.draw(st.sampled_from((False, False, True)))
        self.run_step(lambda made: {seq for seq in made if some and data.draw(st.booleans())})

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def jump(self, data):
        """A step and repeats of it in which nobody ends."""
        plan, made = self.planned()
        left = [self.answers[seq].most - self.answers[seq].num_made for seq in made]
        steps = min([self.scheduler.steady_steps(plan), *(most - 1 for most in left)], default=1)
        if steps < 1 or not made:
            return self.committed(plan, made, {seq for seq in made if self.must_end(seq)})
        steps = data.draw(st.integers(1, steps))
        self.committed(plan, made, set(), steps)

    def run_step(self, choose: Callable[[list[Sequence]], set[Sequence]]) -> None:
        plan, made = self.planned()
        ends = choose(made) | {seq for seq in made if self.must_end(seq)}
        self.committed(plan, made, ends)

    def must_end(self, seq: Sequence) -> bool:
        answer = self.answers[seq]
        return answer.num_made + 1 == answer.most

    def planned(self) -> tuple[StepPlan, list[Sequence]]:
        """Plans a step and follows it, up to the commit; who makes a token in it."""
        scheduler = self.scheduler
        computed = sum(self.answers[seq].computed for seq in self.running())
        assert scheduler.num_computed_tokens == computed
        plan = scheduler.plan()
        assert not (plan.preempted and self.forbids_preemption)
        for seq in plan.preempted:
            answer = self.answers[seq]
            if seq.state is not State.SWAPPED:
                answer.computed = 0
        for seq in plan.admitted:
            self.follow_admission(self.answers[seq])
        self.follow_moves(plan)
        made, num_scheduled = [], 0
        work = {one.seq: one for one in plan.work}
        assert len(work) == len(plan.work), "nobody is scheduled twice"
        for seq in self.running():
            answer, num_new = self.answers[seq], 0
            if seq in work:
                _, start, num_new = work[seq]
                assert start == answer.computed
                assert start + num_new <= answer.known
            elif seq.joined_at >= 0:
                assert answer.computed == answer.known - 1, "a plain decode"
                num_new = 1
            self.write(answer, num_new)
            num_scheduled += num_new
            if num_new and answer.computed == answer.known:
                made.append(seq)
        assert num_scheduled <= self.budget
        assert self.seats() <= self.max_num_seqs
        assert set(work) <= set(self.running())
        if self.reads_what_it_wrote:
            self.everyone_reads_his_own_text()
        return plan, made

    def follow_admission(self, answer: Answer) -> None:
        seq = answer.seq
        if seq.state is State.RUNNING and not answer.has_run:
            answer.has_run = True
            answer.computed = seq.num_hit
            if self.is_in_order and not self.is_by_priority:
                assert answer.number > self.last_admitted, "first come, first served"
                self.last_admitted = answer.number
        elif not answer.computed:
            answer.computed = self.hit_of_resumed(answer)
        assert answer.computed < answer.known
        if self.is_by_priority and self.is_in_order:
            ranks = [self.rank(self.answers[other]) for other in self.scheduler.waiting]
            assert self.rank(answer) < min(ranks, default=(9, 0, 0))

    def rank(self, answer: Answer) -> tuple[int, int, int]:
        return answer.seq.request.priority, answer.number, answer.seq.sample

    def hit_of_resumed(self, answer: Answer) -> int:
        """Of all hits of the resumed, what is new since the last time."""
        seen = getattr(answer, "resumed_hits", 0)
        answer.resumed_hits = answer.seq.num_resumed_hit
        return answer.resumed_hits - seen

    def follow_moves(self, plan: StepPlan) -> None:
        for kind, source, target in plan.moves:
            read = self.host_slots if kind == SWAP_IN else self.slots
            written = self.host_slots if kind == SWAP_OUT else self.slots
            for place in range(self.size):
                written.pop((target, place), None)
                if (source, place) in read:
                    written[target, place] = read[source, place]

    def write(self, answer: Answer, num_new: int) -> None:
        size, blocks = self.size, answer.seq.blocks
        for place in range(answer.computed, answer.computed + num_new):
            self.slots[blocks[place // size], place % size] = answer.name(place)
        answer.computed += num_new
        if not answer.seq.host_blocks:
            assert len(blocks) == -(-answer.computed // size), "blocks for what it computes"

    def everyone_reads_his_own_text(self) -> None:
        size = self.size
        for seq in self.running():
            answer = self.answers[seq]
            for place in range(answer.computed):
                found = self.slots.get((seq.blocks[place // size], place % size))
                assert found == answer.name(place), (seq.request.index, seq.sample, place)

    def committed(
        self, plan: StepPlan, made: list[Sequence], ends: set[Sequence], num_steps: int = 1
    ) -> None:
        width = {seq: seq.width for seq in made}
        finished = sorted(ends, key=lambda seq: seq.order)
        done = self.scheduler.commit(plan, num_steps, finished)
        assert set(done.ended) == ends
        for seq in made:
            answer = self.answers[seq]
            answer.known += num_steps
            answer.num_made += num_steps
            if seq in ends:
                assert seq.num_generated == answer.num_made, "exactly its tokens"
                assert (seq.state, seq.blocks) == (State.FINISHED, [])
                del self.answers[seq]
            else:
                self.write(answer, num_steps - 1)
        for seq in done.forked:
            self.follow_fork(seq)
        forks = sum(width[seq] - 1 for seq in made if seq not in ends)
        assert len(done.forked) == forks

    def follow_fork(self, seq: Sequence) -> None:
        parents = [
            one for one in self.answers.values() if one.seq.request.index == seq.request.index
        ]
        parent = parents[0]
        self.answers[seq] = Answer(
            seq,
            parent.number,
            parent.prompt,
            parent.most,
            parent.known,
            parent.computed,
            parent.num_made,
            has_run=True,
        )

    @invariant()
    def references_equal_holders(self):
        kv = self.scheduler.kv
        holders: Counter[int] = Counter()
        for seq in self.running():
            assert len(set(seq.blocks)) == len(seq.blocks)
            holders.update(seq.blocks)
        pool = kv.pool
        assert pool.shared == {block: count - 1 for block, count in holders.items() if count > 1}
        everywhere = sorted([*holders, *pool.unkeyed, *pool.queue])
        assert everywhere == list(range(self.num_blocks)), "no block is twice or nowhere"
        usage = kv.usage()
        assert usage.held + usage.cached + usage.largest_free_run == self.num_blocks * self.size
        assert usage.held == len(holders) * self.size
        tokens = sum(self.answers[seq].computed for seq in self.running())
        filled = {
            (block, place)
            for seq in self.running()
            for number, block in enumerate(seq.blocks)
            for place in range(min(self.size, self.answers[seq].computed - number * self.size))
        }
        assert usage.overlap == tokens - len(filled)

    @invariant()
    def whoever_waits_keeps_his_tokens_and_holds_nothing(self):
        running = set(self.running())
        for seq, answer in self.answers.items():
            if seq not in running:
                assert seq.blocks == []
                assert seq.num_tokens == answer.known
                assert seq.state in (State.WAITING, State.SWAPPED)
        assert set(self.scheduler.unfinished()) == set(self.answers)

    def teardown(self):
        """Whoever is there ends, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1000):
            if not self.scheduler.has_work:
                break
            self.run_step(lambda made: set())
            self.references_equal_holders()
        assert not self.answers
        usage = self.scheduler.kv.usage()
        assert (usage.held, usage.overlap, self.scheduler.num_computed_tokens) == (0, 0, 0)
        assert self.seats() == self.scheduler.num_running == 0
        self.the_whole_pool_can_be_had()

    def the_whole_pool_can_be_had(self) -> None:
        """By a request that needs all of it, up to the limit of its answer."""
        prompt = max(min(self.num_blocks * self.size, LONGEST) - 1, 1)
        most = max(self.num_blocks * self.size - prompt, 1)
        request = Request(1 << 20, (Span(1 << 20, 0, prompt),), prompt, 1, most)
        if self.scheduler.fits(request, prompt + most):
            self.scheduler.submit(Sequence(request, num_tokens=prompt))
            assert len(self.scheduler.plan().admitted) == 1


class V1Machine(SchedulerMachine):
    whose: Rules

    def make(self, draw, size, num_blocks, seats, budget):
        rules, is_chunked = self.whose, draw(st.booleans())
        if draw(st.booleans()):
            rules = rules._replace(admission=draw(st.sampled_from(Admission)))
        if not is_chunked:
            self.budget = budget = budget + LONGEST
        self.forbids_preemption = rules.admission is Admission.FULL_PROMPT_AND_MAX_OUTPUT
        self.is_in_order = is_chunked or rules.unchunked is not Unchunked.SKIP
        is_caching = draw(st.booleans())
        index = draw(st.sampled_from((HashChain, Radix))) if is_caching else HashChain
        # a block is found once it is scheduled to be full, and a victim may have been scheduled
        self.reads_what_it_wrote = not (self.is_by_priority and is_caching and index is HashChain)
        kv = Paged(
            num_blocks,
            size,
            can_fork=draw(st.booleans()),
            prefix_caching=is_caching,
            prefix_index=index,
            watermark_blocks=draw(st.sampled_from((0, 0, 1, 2))) if rules.has_watermark else 0,
            rules=rules,
        )
        self.scheduler = Scheduler(
            kv,
            CONTINUOUS,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            chunked_prefill=is_chunked,
            long_prefill_token_threshold=draw(st.sampled_from((0, 0, 2, 5))),
            is_by_priority=self.is_by_priority,
            rules=rules,
        )


class GroupMachine(SchedulerMachine):
    mixes_prompts: bool

    def make(self, draw, size, num_blocks, seats, budget):
        self.budget = budget + LONGEST
        self.host = HostPool(10_000)
        self.scheduler = GroupScheduler(
            Paged(num_blocks, size, can_fork=True),
            self.host,
            max_num_seqs=seats,
            max_num_batched_tokens=self.budget,
            max_model_len=LONGEST,
            watermark_blocks=draw(st.sampled_from((0, 0, 1))),
            mixes_prompts=self.mixes_prompts,
            always_swaps=draw(st.booleans()),
        )

    def running(self):
        return [seq for group in self.scheduler.running for seq in group.seqs]

    def seats(self):
        return sum(group.live for group in self.scheduler.running)

    @invariant()
    def the_host_holds_what_is_swapped(self):
        swapped = [seq for group in self.scheduler.swapped for seq in group.seqs]
        held = {block for seq in swapped for block in seq.host_blocks}
        assert self.host.num_used == len(held)
        for seq in swapped:
            for place in range(self.answers[seq].computed):
                found = self.host_slots[seq.host_blocks[place // self.size], place % self.size]
                assert found == self.answers[seq].name(place)


@pytest.mark.parametrize("version", RULES)
def test_first_come_first_served_keeps_its_laws(version):
    machine = type("Machine", (V1Machine,), {"whose": RULES[version]})
    run_state_machine_as_test(machine, settings=settings(SAME_RUNS, max_examples=30))


@pytest.mark.parametrize("version", RULES)
def test_priorities_keep_the_laws(version):
    machine = type("Machine", (V1Machine,), {"whose": RULES[version], "is_by_priority": True})
    run_state_machine_as_test(machine, settings=FEWER_RUNS)


@pytest.mark.parametrize("era", PAPER_ERA)
def test_groups_keep_the_laws(era):
    machine = type("Machine", (GroupMachine,), {"mixes_prompts": PAPER_ERA[era]})
    run_state_machine_as_test(machine, settings=settings(SAME_RUNS, max_examples=60))
