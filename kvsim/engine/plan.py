"""What passes between scheduler and executor: the plan of a step and its result."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvsim.engine.decodes import DecodeSet
from kvsim.engine.request import Sequence

COPY, SWAP_OUT, SWAP_IN = "copy", "swap_out", "swap_in"

LIMITS = ("arrivals", "kv_memory", "max_num_seqs", "max_num_batched_tokens", "static_batch")
ARRIVALS, KV_MEMORY, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, STATIC_BATCH = range(5)


class Work(NamedTuple):
    """Compute `num_new` tokens of `seq`, from position `start` on."""

    seq: Sequence
    start: int
    num_new: int

    @property
    def is_decode(self) -> bool:
        return self.num_new == 1 and self.start >= self.seq.request.prompt_tokens


class BlockMove(NamedTuple):
    """Copy the KV of block `source` to block `target`, before the step's work; SWAP_OUT to a block
    of the host, SWAP_IN from one. Moves are made in order: a later one may write to the source of
    an earlier one."""

    kind: str
    source: int
    target: int


class StepPlan:
    """One step: every member of `decodes` makes one token, and `work` is done beside it.

    It names what changed: `joined` and `left` since the plan before, `admitted` and `preempted`
    now. Of those who joined, `num_joining` stand in the set from the next step on (`joined_at` is
    its clock then): this step's token they make by work that computes all they know. `limit` is
    what keeps (or would keep) a request waiting: an index of LIMITS. In a static batch answers
    already complete (`num_padding_seqs`) still compute, and prompts are filled up to the longest
    (`num_padding_tokens`).
    """

    __slots__ = (
        "admitted",
        "decodes",
        "joined",
        "left",
        "limit",
        "moves",
        "num_joining",
        "num_padding_seqs",
        "num_padding_tokens",
        "preempted",
        "token_budget",
        "work",
    )

    def __init__(self, decodes: DecodeSet, token_budget: int) -> None:
        self.decodes = decodes
        self.token_budget = token_budget
        self.work: list[Work] = []
        self.moves: list[BlockMove] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.joined: list[Sequence] = []
        self.left: list[Sequence] = []
        self.num_joining = 0
        self.limit = ARRIVALS
        self.num_padding_seqs = 0
        self.num_padding_tokens = 0


def load_of(plan: StepPlan) -> tuple[int, int, int, int, int]:
    """What the plan's first step computes, as the step-time models see it: prompt tokens (padding
    included); sequences that get a token or a chunk; the context that its decodes attend to
    (tokens, the newest included); how many of the sequences get a chunk of a prompt; and the pairs
    of a prompt token and a token that it attends to (itself, and all before it)."""
    decodes = plan.decodes
    prompt, seqs = plan.num_padding_tokens, decodes.num_seqs + plan.num_padding_seqs
    context, chunks, pairs = decodes.context, 0, 0
    if plan.work:
        seqs += len(plan.work) - plan.num_joining
        for seq, start, num_new in plan.work:
            if seq.joined_at >= 0:
                context -= start + num_new
            if num_new == 1 and start >= seq.request.prompt_tokens:
                context += start + 1
            else:
                prompt += num_new
                chunks += 1
                pairs += num_new * start + num_new * (num_new + 1) // 2
    return prompt, seqs, context, chunks, pairs


class Fork(NamedTuple):
    """Beam `child` is dropped: from the next step on it continues the tokens of `parent`, another
    beam of its request, which is kept."""

    parent: Sequence
    child: Sequence


class StepResult(NamedTuple):
    """Durations of the k >= 1 steps that were run; who ends with the last one, and which beams are
    dropped for others after it (with k = 1 only)."""

    durations_ns: list[int]
    finished: list[Sequence]
    forks: list[Fork] | tuple[()] = ()


class Executor(Protocol):
    def execute(self, plan: StepPlan, max_steps: int) -> StepResult:
        """Run the plan, and then up to max_steps - 1 steps in which the members of its decode set
        make one token each, at most up to the first end of a sequence."""
        ...
