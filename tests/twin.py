"""A plain twin of the whole simulation: walks every sequence in every step, spells out every token.

Written from vLLM V1's rules (0.26 and later) and sections 4 and 6.1 of Kwon et al. 2023; of kvsim
it uses the Workload only. It has no decode set, no jumps, no hashes, no event queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvsim.workload.workload import Workload

ARRIVALS, KV_MEMORY, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, STATIC_BATCH = range(5)
STOP, LENGTH, UNFINISHED, TOO_LONG, NEVER_FITS, NO_TOKENS = range(6)
SLOTS = ("token", "reserved", "internal", "external", "cached", "free")


@dataclass(frozen=True)
class Setup:
    """One engine, in plain values."""

    num_blocks: int = 16
    block_size: int = 4
    memory: str = "paged"  # or contiguous
    can_fork: bool = False
    prefix_caching: bool = False
    prefix_index: str = "hash_chain"  # the twin has no other
    watermark: float = 0.0
    reserve: str = "max"  # max, pow2, oracle or fixed
    reserve_tokens: int = 0
    placement: str = "buddy"  # buddy, first_fit or best_fit
    is_static: bool = False
    max_model_len: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    chunked_prefill: bool = True
    num_replicas: int = 1
    base_ms: float = 1.0
    per_seq_ms: float = 0.0
    per_context_token_us: float = 0.0
    per_prompt_token_ms: float = 0.0
    prompt_step_ms: float = 0.0
    stop_ns: int | None = None


@dataclass(eq=False)
class Answer:
    """One generation; the first of a request stands for all `width` of them until they fork."""

    row: int
    sample: int
    width: int
    prompt: list[tuple]
    num_answer_tokens: int
    known: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    granted: int = 0
    most_computed: int = 0
    admitted_ns: int = -1
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_hit: int = 0
    num_resumed_hit: int = 0

    @property
    def final(self) -> int:
        return len(self.prompt) + self.num_answer_tokens

    @property
    def is_complete(self) -> bool:
        return self.known == self.final

    def text(self, length: int) -> tuple:
        """The first `length` tokens; answers that nobody can quote have streams of their own."""
        stream = -(self.row + 2) if self.sample == 0 else ("further answer", self.row, self.sample)
        tokens = self.prompt[:length]
        return (*tokens, *((stream, place) for place in range(length - len(tokens))))


class PagedMemory:
    """Blocks with counted holders, one queue of free ones, whole prefixes as names."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.size = setup.block_size
        self.queue = list(range(setup.num_blocks))  # free blocks, the next to be taken first
        self.holders: dict[int, int] = {}
        self.published: dict[int, tuple] = {}  # block -> all text up to its end, in order
        self.num_copies = self.num_forked_blocks = 0
        self.ever_held: set[int] = set()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def fits(self, answer: Answer) -> bool:
        needed = max(answer.final - 1, len(answer.prompt))
        return self.blocks_for(needed) <= self.setup.num_blocks

    def find(self, answer: Answer) -> list[int]:
        found: list[int] = []
        if self.setup.prefix_caching:
            for number in range(1, (answer.known - 1) // self.size + 1):
                wanted = answer.text(number * self.size)
                named = (block for block, text in self.published.items() if text == wanted)
                block = next(named, None)
                if block is None:
                    break
                found.append(block)
        return found

    def admit(self, answer: Answer, hit: list[int], num_new: int, is_alone: bool) -> bool:
        cold = sum(block in self.queue for block in hit)
        spare = 0 if is_alone else int(self.setup.watermark * self.setup.num_blocks)
        if self.blocks_for(answer.known) - len(hit) + cold + spare > len(self.queue):
            return False
        for block in hit:
            if block in self.queue:
                self.queue.remove(block)
            self.holders[block] = self.holders.get(block, 0) + 1
        answer.blocks = list(hit)
        self._extend(answer, len(hit) * self.size + num_new)
        return True

    def grow(self, answer: Answer, num_new: int) -> bool:
        written = answer.computed // self.size
        is_shared = written < len(answer.blocks) and self.holders[answer.blocks[written]] > 1
        needed = self.blocks_for(answer.computed + num_new) - len(answer.blocks)
        if needed + is_shared > len(self.queue):
            return False
        if is_shared:
            self.holders[answer.blocks[written]] -= 1
            answer.blocks[written] = self._take()
            self.num_copies += 1
        self._extend(answer, answer.computed + num_new)
        return True

    def fork(self, parent: Answer, child: Answer) -> None:
        child.blocks = list(parent.blocks)
        for block in child.blocks:
            self.holders[block] += 1
        self.num_forked_blocks += len(child.blocks)

    def release(self, answer: Answer) -> None:
        for block in reversed(answer.blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                del self.holders[block]
        gone = [block for block in reversed(answer.blocks) if block not in self.holders]
        answer.blocks = []
        self.queue += [block for block in gone if block in self.published]
        for block in gone:
            if block not in self.published:
                self.queue.insert(0, block)

    def slots(self, computed: list[tuple[Answer, int]]) -> dict[str, tuple]:
        filled: dict[int, int] = {}
        for answer, num_computed in computed:
            for number, block in enumerate(answer.blocks):
                inside = min(max(num_computed - number * self.size, 0), self.size)
                filled[block] = max(filled.get(block, 0), inside)
        token = sum(filled.values())
        cached = sum(block in self.published for block in self.queue) * self.size
        free = len(self.queue) * self.size - cached
        row = (token, 0, self.num_held_slots - token, 0, cached, free)
        return {"paper": row, "common": row}

    @property
    def num_held_slots(self) -> int:
        return len(self.holders) * self.size

    def _take(self) -> int:
        block = self.queue.pop(0)
        self.published.pop(block, None)
        self.holders[block] = 1
        self.ever_held.add(block)
        return block

    def _extend(self, answer: Answer, upto: int) -> None:
        """Blocks for the first `upto` tokens, named as soon as they are sure to fill."""
        while len(answer.blocks) * self.size < upto:
            answer.blocks.append(self._take())
        if self.setup.prefix_caching:
            for number in range(min(upto, answer.known) // self.size):
                text = answer.text((number + 1) * self.size)
                self.published.setdefault(answer.blocks[number], text)


class ContiguousMemory:
    """One address space as a list of booleans; free chunks and runs are looked up in it."""

    num_copies = num_forked_blocks = 0

    def __init__(self, setup: Setup, output_tokens: list[int]) -> None:
        self.setup = setup
        self.size = setup.block_size
        self.limit = setup.reserve_tokens if setup.reserve == "fixed" else setup.max_model_len
        self.output_tokens = output_tokens
        self.is_used = [False] * setup.num_blocks
        self.ever_held: set[int] = set()
        largest = 1
        while largest < -(-self.limit // self.size):
            largest *= 2
        self.chunks = []  # of the buddy allocator before anything is taken
        start = 0
        while start < setup.num_blocks:
            while largest > setup.num_blocks - start:
                largest //= 2
            self.chunks.append((start, largest))
            start += largest

    def grant(self, answer: Answer) -> int:
        if self.setup.reserve == "fixed":
            return self.limit
        extra = {"max": self.limit, "oracle": self.output_tokens[answer.row], "pow2": 1}
        tokens = extra[self.setup.reserve]
        while self.setup.reserve == "pow2" and tokens < self.output_tokens[answer.row]:
            tokens *= 2
        return min(len(answer.prompt) + tokens, self.limit)

    def fits(self, answer: Answer) -> bool:
        granted = self.grant(answer)
        empty = ContiguousMemory(self.setup, self.output_tokens)
        return len(answer.prompt) < granted and empty.place(granted) is not None

    def find(self, answer: Answer) -> list[int]:
        return []

    def admit(self, answer: Answer, hit: list[int], num_new: int, is_alone: bool) -> bool:
        granted = self.grant(answer)
        place = self.place(granted)
        if place is None:
            return False
        answer.blocks, answer.granted = list(range(place[0], place[0] + place[1])), granted
        for block in answer.blocks:
            assert not self.is_used[block]
            self.is_used[block] = True
        self.ever_held.update(answer.blocks)
        return True

    def grow(self, answer: Answer, num_new: int) -> bool:
        assert answer.computed + num_new <= answer.granted
        return True

    def release(self, answer: Answer) -> None:
        for block in answer.blocks:
            self.is_used[block] = False
        answer.blocks = []

    def place(self, granted: int) -> tuple[int, int] | None:
        count = -(-granted // self.size)
        if self.setup.placement == "buddy":
            chunks = [chunk for one in self.chunks for chunk in self._free_chunks(*one)]
            fitting = [(length, start) for start, length in chunks if length >= count]
            held = 1
            while held < count:
                held *= 2
            return (min(fitting)[1], held) if fitting else None
        fitting = [(length, start) for start, length in self.runs() if length >= count]
        if not fitting:
            return None
        lowest, best = fitting[0], min(fitting)
        return (best if self.setup.placement == "best_fit" else lowest)[1], count

    def runs(self) -> list[tuple[int, int]]:
        """Free runs as (start, length), by address."""
        found: list[tuple[int, int]] = []
        for block, is_used in enumerate(self.is_used):
            if is_used:
                continue
            if found and sum(found[-1]) == block:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((block, 1))
        return found

    def slots(self, computed: list[tuple[Answer, int]]) -> dict[str, tuple]:
        pool = self.setup.num_blocks * self.size
        token = sum(num_computed for _, num_computed in computed)
        final = sum(answer.final for answer, _ in computed)
        granted = sum(answer.granted for answer, _ in computed)
        held = self.num_held_slots
        if self.setup.placement == "buddy":
            chunks = [chunk for one in self.chunks for chunk in self._free_chunks(*one)]
        else:
            chunks = self.runs()
        largest = max((length for _, length in chunks), default=0) * self.size
        return {
            "paper": (token, final - token, granted - final, pool - granted, 0, 0),
            "common": (token, final - token, held - final, pool - held - largest, 0, largest),
        }

    @property
    def num_held_slots(self) -> int:
        return sum(self.is_used) * self.size

    def _free_chunks(self, start: int, length: int) -> list[tuple[int, int]]:
        """Free chunks in an aligned one: itself, or those of its halves."""
        used = sum(self.is_used[start : start + length])
        if used == 0:
            return [(start, length)]
        if used == length:
            return []
        half = length // 2
        return self._free_chunks(start, half) + self._free_chunks(start + half, half)


class Step(NamedTuple):
    """A step under way: its row of the table and who gets how many tokens."""

    row: dict
    work: list[tuple[Answer, int]]


class Server:
    """One replica."""

    def __init__(self, setup: Setup, number: int, output_tokens: list[int]) -> None:
        self.setup = setup
        self.number = number
        contiguous = setup.memory == "contiguous"
        self.memory = ContiguousMemory(setup, output_tokens) if contiguous else PagedMemory(setup)
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []
        self.complete: list[Answer] = []  # in a static batch, waiting for its last
        self.step: Step | None = None
        self.wakes_ns: int | None = None
        self.idle_since_ns: int | None = 0
        self.idle_slots = self.memory.slots([])

    def begin(self, now_ns: int) -> None:
        setup, self.work = self.setup, []
        self.admitted: list[Answer] = []
        self.preempted: list[Answer] = []
        self.budget = setup.max_num_batched_tokens
        padding_tokens = 0
        if setup.is_static and self.running:
            self.work = [(answer, 1) for answer in self.running if not answer.is_complete]
            limit = STATIC_BATCH
        elif setup.is_static:
            self.budget = 1 << 60
            limit = self._admit(now_ns)
            limit = STATIC_BATCH if limit == ARRIVALS else limit
            longest = max(num_new for _, num_new in self.work)
            padding_tokens = sum(longest - num_new for _, num_new in self.work)
        else:
            self._continue()
            limit = KV_MEMORY if self.preempted else self._admit(now_ns)
        decodes, prompts = [], []
        for a, n in self.work:
            (decodes if n == 1 and a.computed >= len(a.prompt) else prompts).append((a, n))
        num_prompt = sum(n for _, n in prompts)
        duration = setup.base_ms * 1e6
        duration += setup.per_seq_ms * 1e6 * (len(self.work) + len(self.complete))
        if num_prompt + padding_tokens:
            duration += setup.prompt_step_ms * 1e6
            duration += setup.per_prompt_token_ms * 1e6 * (num_prompt + padding_tokens)
        duration += setup.per_context_token_us * 1e3 * sum(a.computed + 1 for a, _ in decodes)
        new = {id(answer): num_new for answer, num_new in self.work}
        computed = [(a, a.computed + new.get(id(a), 0)) for a in self.running]
        row = {
            "replica": self.number,
            "start_ns": now_ns,
            "end_ns": now_ns + max(round(duration), 1),
            "num_running": len(self.running),
            "num_decodes": len(decodes),
            "num_prefills": len(prompts),
            "num_prompt_tokens": num_prompt,
            "num_padding_tokens": padding_tokens,
            "num_admitted": len(self.admitted),
            "num_preempted": len(self.preempted),
            "limit": limit,
            "logical_tokens": sum(count for _, count in computed),
            "held_blocks": self.memory.num_held_slots // self.setup.block_size,
            "never_used_slots": (self.setup.num_blocks - len(self.memory.ever_held))
            * self.setup.block_size,
            "slots": self.memory.slots(computed),
        }
        self.step = Step(row, self.work)
        self.wakes_ns = row["end_ns"]

    def _continue(self) -> None:
        place = 0
        while place < len(self.running) and self.budget > 0:
            answer = self.running[place]
            num_new = min(answer.known - answer.computed, self.budget)
            while not self.memory.grow(answer, num_new):
                victim = self.running.pop()
                self.memory.release(victim)
                victim.computed = 0
                victim.num_preemptions += 1
                self.waiting.insert(0, victim)
                self.preempted.append(victim)
                if victim is answer:
                    return
            self.work.append((answer, num_new))
            self.budget -= num_new
            place += 1

    def _admit(self, now_ns: int) -> int:
        """Admit from the head; returns what stopped it."""
        setup = self.setup
        while self.waiting:
            head = self.waiting[0]
            seats = sum(answer.width for answer in self.running)
            if seats + head.width > setup.max_num_seqs:
                return MAX_NUM_SEQS
            if self.budget <= 0:
                return MAX_NUM_BATCHED_TOKENS
            hit = self.memory.find(head)
            num_hit = len(hit) * setup.block_size
            num_new = head.known - num_hit
            if num_new > self.budget and not setup.chunked_prefill:
                return MAX_NUM_BATCHED_TOKENS
            num_new = min(num_new, self.budget)
            if not self.memory.admit(head, hit, num_new, not self.running):
                return KV_MEMORY
            self.waiting.pop(0)
            self.running.append(head)
            head.computed = num_hit
            if head.num_preemptions:
                head.num_resumed_hit += num_hit
            else:
                head.num_hit += num_hit
            head.admitted_ns = now_ns if head.admitted_ns < 0 else head.admitted_ns
            self.admitted.append(head)
            self.work.append((head, num_new))
            self.budget -= num_new
        if sum(answer.width for answer in self.running) >= setup.max_num_seqs:
            return MAX_NUM_SEQS
        return MAX_NUM_BATCHED_TOKENS if self.budget <= 0 else ARRIVALS

    def commit(self) -> tuple[list[Answer], list[tuple[int, int]]]:
        """Ends the step: answers over, and (row, sample) of every token made."""
        made: list[tuple[int, int]] = []
        for answer, num_new in self.step.work:
            again = min(answer.computed + num_new, answer.most_computed) - answer.computed
            answer.num_recomputed += max(again, 0)
            answer.computed += num_new
            answer.most_computed = max(answer.most_computed, answer.computed)
            if answer.computed < answer.known:
                continue
            answer.known += 1
            made += [(answer.row, answer.sample + n) for n in range(answer.width)]
            if answer.width > 1 and not answer.is_complete:
                self._fork(answer)
        self.complete += [
            answer for answer in self.running if answer.is_complete and answer not in self.complete
        ]
        over: list[Answer] = []
        if not self.setup.is_static or len(self.complete) == len(self.running):
            over, self.complete = self.complete, []
        for answer in over:
            self.memory.release(answer)
            self.running.remove(answer)
        self.step = self.wakes_ns = None
        return over, made

    def _fork(self, parent: Answer) -> None:
        for sample in range(1, parent.width):
            child = Answer(
                parent.row,
                sample,
                1,
                parent.prompt,
                parent.num_answer_tokens,
                parent.known,
                parent.computed,
                most_computed=parent.computed,
                admitted_ns=parent.admitted_ns,
            )
            self.memory.fork(parent, child)
            self.running.append(child)
        parent.width = 1


@dataclass
class Story:
    """All that happened: rows of steps, of requests, of idle spans, and every token's time."""

    steps: list[dict]
    requests: list[dict]
    idle: list[tuple[int, int, int, dict[str, tuple]]]  # replica, start_ns, end_ns, slots
    token_ns: dict[tuple[int, int], list[int]]  # (row, sample) -> times
    num_copies: int
    num_forked_blocks: int
    end_ns: int


def tell(workload: Workload, setup: Setup) -> Story:
    """Simulate `workload`, one step after the other."""
    return _Narrator(workload, setup).tell()


class _Narrator:
    def __init__(self, workload: Workload, setup: Setup) -> None:
        self.workload, self.setup = workload, setup
        outputs = workload.output_tokens.tolist()
        self.servers = [Server(setup, number, outputs) for number in range(setup.num_replicas)]
        self.turn = 0
        self.agenda: list[tuple[int, int, int]] = []  # arrivals known: time, number, row
        self.opening = [row for row in range(len(workload)) if workload.after[row] < 0]
        self.num_known = 0
        self.missing: dict[int, int] = {}
        self.requests = [
            {
                "outcome": UNFINISHED,
                "replica": -1,
                "arrival_ns": -1,
                "admitted_ns": -1,
                "first_token_ns": -1,
                "finish_ns": -1,
                "num_generated": 0,
                "num_preemptions": 0,
                "num_recomputed": 0,
                "num_hit": 0,
                "num_resumed_hit": 0,
            }
            for _ in range(len(workload))
        ]
        self.steps: list[list[dict]] = [[] for _ in self.servers]
        self.arrivals: list[list[tuple[int, int]]] = [[] for _ in self.servers]
        self.idle: list[tuple[int, int, int, dict[str, tuple]]] = []
        self.token_ns: dict[tuple[int, int], list[int]] = {}

    def tell(self) -> Story:
        stop_ns, now_ns = self.setup.stop_ns, 0
        self._foresee(0)
        while True:
            times = [entry[0] for entry in self.agenda]
            times += [one.wakes_ns for one in self.servers if one.wakes_ns is not None]
            if not times or (stop_ns is not None and min(times) >= stop_ns):
                break
            now_ns = min(times)
            if self.agenda and min(self.agenda)[0] == now_ns:
                entry = min(self.agenda)
                self.agenda.remove(entry)
                self._arrive(entry[2], now_ns)
                if entry[2] in self.opening[:1]:
                    self.opening.pop(0)
                    self._foresee(now_ns)
            else:
                # at one instant every step ends, and what follows arrives, before the next plans
                awake = [server for server in self.servers if server.wakes_ns == now_ns]
                self._wake(min(awake, key=lambda s: (s.step is None, s.number)), now_ns)
        for server in self.servers:  # a step in flight at the stop runs to its end
            if server.step is not None:
                self._wake(server, server.wakes_ns)
        end_ns = now_ns if stop_ns is None else stop_ns
        for server in self.servers:
            if server.idle_since_ns is not None and server.idle_since_ns < end_ns:
                span = (server.number, server.idle_since_ns, end_ns, server.idle_slots)
                self.idle.append(span)
        for row, request in enumerate(self.requests):
            times = [t for (r, _), all_t in self.token_ns.items() if r == row for t in all_t]
            request["first_token_ns"] = min(times, default=-1)
        for server in self.servers:
            self._count_waiting(server.number)
        return Story(
            [row for rows in self.steps for row in rows],
            self.requests,
            sorted(self.idle, key=lambda span: span[:2]),
            self.token_ns,
            sum(server.memory.num_copies for server in self.servers),
            sum(server.memory.num_forked_blocks for server in self.servers),
            end_ns,
        )

    def _foresee(self, now_ns: int) -> None:
        """The open-loop source looks one arrival ahead; what is known first comes first."""
        if self.opening:
            time_ns = max(int(self.workload.arrival_ns[self.opening[0]]), now_ns)
            # rows of one instant arrive in one go, before anything that was known later
            number = -1 if time_ns == now_ns else self._next_number()
            self.agenda.append((time_ns, number, self.opening[0]))

    def _next_number(self) -> int:
        self.num_known += 1
        return self.num_known

    def _arrive(self, row: int, now_ns: int) -> None:
        workload, setup = self.workload, self.setup
        request = self.requests[row]
        request["arrival_ns"] = now_ns
        num_prompt, wanted = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
        num_samples = int(workload.num_samples[row])
        if num_prompt <= 0 or wanted <= 0:
            return self._over(row, NO_TOKENS, now_ns)
        if num_prompt + wanted > setup.max_model_len:
            return self._over(row, TOO_LONG, now_ns)
        prompt = [(s, start + n) for s, start, count in workload.prompt(row) for n in range(count)]
        given = wanted
        if setup.memory == "contiguous" and setup.reserve == "fixed":
            given = max(min(wanted, setup.reserve_tokens - num_prompt), 0)
        width = num_samples if setup.can_fork else 1
        first = Answer(row, 0, width, prompt, given, num_prompt)
        if num_samples > setup.max_num_seqs or not self.servers[0].memory.fits(first):
            return self._over(row, NEVER_FITS, now_ns)
        server = self.servers[self.turn % len(self.servers)]
        self.turn += 1
        request["replica"] = server.number
        self.missing[row] = num_samples
        server.waiting.append(first)
        if not setup.can_fork:
            for sample in range(1, num_samples):
                server.waiting.append(Answer(row, sample, 1, prompt, given, num_prompt))
        self.arrivals[server.number].append((now_ns, num_samples // width))
        if server.wakes_ns is None:
            server.wakes_ns = now_ns
        return None

    def _wake(self, server: Server, now_ns: int) -> None:
        if server.step is not None:
            row = server.step.row
            over, made = server.commit()
            server.wakes_ns = now_ns
            self.steps[server.number].append(row | {"num_tokens": len(made)})
            for name in made:
                self.token_ns.setdefault(name, []).append(now_ns)
            for answer in over:
                self._ended(answer, now_ns)
            return
        if server.idle_since_ns is not None and server.idle_since_ns < now_ns:
            self.idle.append((server.number, server.idle_since_ns, now_ns, server.idle_slots))
        server.wakes_ns = server.idle_since_ns = None
        if server.waiting or server.running:
            server.begin(now_ns)
        else:
            server.idle_since_ns = now_ns
            server.idle_slots = server.memory.slots([])

    def _ended(self, answer: Answer, now_ns: int) -> None:
        request = self.requests[answer.row]
        seen = request["admitted_ns"]
        first = answer.admitted_ns
        request["admitted_ns"] = first if seen < 0 else min(seen, first)
        request["num_generated"] += answer.num_answer_tokens * answer.width
        for name in ("num_preemptions", "num_recomputed", "num_hit", "num_resumed_hit"):
            request[name] += getattr(answer, name)
        self.missing[answer.row] -= answer.width
        if not self.missing[answer.row]:
            request["finish_ns"] = now_ns
            is_whole = answer.num_answer_tokens == self.workload.output_tokens[answer.row]
            self._over(answer.row, STOP if is_whole else LENGTH, now_ns)

    def _over(self, row: int, outcome: int, now_ns: int) -> None:
        self.requests[row]["outcome"] = outcome
        for follower in range(len(self.workload)):
            if self.workload.after[follower] == row:
                time_ns = now_ns + int(self.workload.think_ns[follower])
                self.agenda.append((time_ns, self._next_number(), follower))

    def _count_waiting(self, number: int) -> None:
        """Who had come by the start of each step and was not in it; with nobody waiting, nothing
        but a full token budget kept anyone out."""
        inside = 0
        for row in self.steps[number]:
            inside += row["num_admitted"] - row["num_preempted"]
            come = sum(count for time, count in self.arrivals[number] if time <= row["start_ns"])
            row["num_waiting"] = come - inside
            if row["num_waiting"] == 0 and row["limit"] != MAX_NUM_BATCHED_TOKENS:
                row["limit"] = ARRIVALS
