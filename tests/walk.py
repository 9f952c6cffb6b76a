"""A paper-era scheduler driven step by step, its books checked against its block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvsim.engine.groups import GroupScheduler
from kvsim.engine.plan import Executor, StepPlan
from kvsim.engine.request import Request, Sequence, Span


def submit(scheduler: GroupScheduler, requests: list[Request]) -> None:
    for request in requests:
        seq = Sequence(request, num_tokens=request.prompt_tokens, width=request.num_samples)
        scheduler.submit(seq)


def asked(
    index: int, prompt: int, width: int, *, is_beam: bool = False, shared: int = 0
) -> Request:
    """A request whose first `shared` tokens are those of stream 1000."""
    spans = (Span(1000, 0, shared), Span(index, 0, prompt - shared))
    return Request(index, tuple(s for s in spans if s.length), prompt, width, is_beam=is_beam)


def walk(scheduler: GroupScheduler, executor: Executor) -> Iterator[StepPlan]:
    """Every plan to the end of the work, as it runs: granted, and not yet committed."""
    while scheduler.has_work:
        plan = scheduler.plan()
        _, finished, forks = executor.execute(plan, 1)
        assert_books_balance(scheduler)
        yield plan
        scheduler.commit(plan, 1, finished, forks)
        assert_books_balance(scheduler)


def assert_books_balance(scheduler: GroupScheduler) -> None:
    """Free and shared blocks, host blocks and tokens are what the block tables and the registered
    prefixes say."""
    kv, seqs = scheduler.kv, scheduler.unfinished()
    size = kv.block_size
    filled = Counter(dict.fromkeys(kv.registered_blocks, size))
    holders = Counter(kv.registered_blocks)
    holders.update(block for seq in seqs for block in seq.blocks)
    for seq in seqs:
        for number, block in enumerate(seq.blocks):
            inside = min(max(seq.num_computed - number * size, 0), size)
            filled[block] = max(filled[block], inside)
    assert kv.pool.num_free == kv.num_blocks - len(holders)
    assert kv.pool.shared == {block: n - 1 for block, n in holders.items() if n > 1}
    assert scheduler.host.num_used == len({block for seq in seqs for block in seq.host_blocks})
    usage = kv.usage()
    assert usage.held == len(holders) * size
    held = scheduler.num_computed_tokens - usage.overlap + kv.registered_tokens
    assert held == filled.total()
