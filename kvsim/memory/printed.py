"""The memory figures that a start-up log prints, each held against the others."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

from kvsim.memory.kv import GIB, Layout, Pool

CONTRADICTION = "contradiction"
SMALLEST_RANK = "smallest rank"
FAILS = "fails"
SLACK_GIB = 0.01  # engines round the sum of unrounded parts
MOST_UNPRINTED_GIB = 3.0  # a runtime that was not printed
MOST_RANK_LOSS = 0.15  # the most that a rank's pool was seen under another's (vllm#13061: 14.1 %)


class Printed(NamedTuple):
    """What one start printed; None: not printed. Figures as text keep their decimals, by which
    they are judged: "12.40" is 12.395 to 12.405. A number has the decimals it is shown with."""

    total_gib: float | str | None = None
    gpu_memory_utilization: float | None = None
    weights_gib: float | str | None = None
    runtime_gib: float | str | None = None
    activation_gib: float | str | None = None
    kv_gib: float | str | None = None
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    swap_gib: float | None = None
    tokens: int | None = None
    max_model_len: int | None = None
    concurrency: float | str | None = None
    needed_gib: float | str | None = None
    estimated_max_len: int | None = None


class Finding(NamedTuple):
    kind: str
    text: str


class Range(NamedTuple):
    low: float
    high: float

    def meets(self, low: float, high: float) -> bool:
        return self.low <= high and low <= self.high


def read(figure: float | str) -> Range:
    """The values that print as this figure."""
    text = str(figure).replace(",", "")
    half = 0.5 * 10.0 ** min(0, Decimal(text).as_tuple().exponent)
    return Range(float(text) - half, float(text) + half)


def findings(
    printed: Printed,
    layout: Layout | None = None,
    *,
    step_tokens: int = 2048,
    num_ranks: int = 1,
    printed_tokens: str | None = None,
) -> list[Finding]:
    """Every disagreement between figures, a smaller rank's loss, and why the start fails.

    layout: of one rank, as kv.layout has it; None where the architecture is not known, and then
    only figures that need none are compared. Nothing is fitted: a figure agrees if some value that
    prints as it gives the other.
    """
    found = [*_sum(printed), *_ratios(printed, layout)]
    if layout is not None:
        found += _pool(printed, layout, step_tokens, num_ranks, printed_tokens)
        found += _host(printed, layout)
        found += _need(printed, layout, step_tokens)
    return [*found, *_failures(printed, layout)]


def _sum(p: Printed) -> Iterator[Finding]:
    """total x utilization = weights + runtime + activation + KV, where all are printed."""
    terms = (p.weights_gib, p.activation_gib, p.kv_gib)
    if p.total_gib is None or p.gpu_memory_utilization is None or None in terms:
        return
    parts = [read(term) for term in (*terms, p.runtime_gib) if term is not None]
    total = read(p.total_gib)
    low = total.low * p.gpu_memory_utilization - sum(part.high for part in parts)
    high = total.high * p.gpu_memory_utilization - sum(part.low for part in parts)
    rest = 0.0 if p.runtime_gib is not None else MOST_UNPRINTED_GIB
    if high < -SLACK_GIB or low > rest + SLACK_GIB:
        text = (
            f"{p.total_gib} x {p.gpu_memory_utilization} less the printed parts leaves "
            f"{(low + high) / 2:.2f} GiB, not {'0' if not rest else 'a runtime'}"
        )
        yield Finding(CONTRADICTION, text)


def _tokens(p: Printed, layout: Layout | None) -> int | None:
    if p.tokens is not None:
        return p.tokens
    size = layout.groups[0].block_size if layout else 16
    return None if p.num_blocks is None else p.num_blocks * size


def _ratios(p: Printed, layout: Layout | None) -> Iterator[Finding]:
    """tokens = blocks x block size; concurrency = tokens / max_model_len."""
    if None not in (p.tokens, p.num_blocks) and p.num_blocks:
        size = layout.groups[0].block_size if layout else None
        if p.tokens % p.num_blocks or (size and p.tokens != p.num_blocks * size):
            text = f"{p.tokens:,} tokens are not {p.num_blocks:,} blocks x {size or 'a size'}"
            yield Finding(CONTRADICTION, text)
    tokens = _tokens(p, layout)
    if tokens is None or p.concurrency is None or not p.max_model_len:
        return
    ratio = tokens / p.max_model_len  # v1 divides blocks by whole blocks of a request
    size = layout.groups[0].block_size if layout else 16
    whole = tokens / (-(-p.max_model_len // size) * size)
    is_grouped = layout is not None and len(layout.groups) > 1
    if not is_grouped and not read(p.concurrency).meets(whole, ratio + 1 / p.max_model_len):
        text = (
            f"{tokens:,} tokens are {ratio:.2f} requests of {p.max_model_len:,}, "
            f"not {p.concurrency}"
        )
        yield Finding(CONTRADICTION, text)


def _pool(
    p: Printed, layout: Layout, step_tokens: int, num_ranks: int, printed_tokens: str | None
) -> Iterator[Finding]:
    """Blocks and tokens are what the KV memory holds; fewer on several ranks: the smallest's."""
    if p.kv_gib is None:
        return
    low, high = (Pool(layout, int(gib * GIB), step_tokens) for gib in read(p.kv_gib))
    if p.num_blocks is not None:
        ranges = [(low.num_blocks, high.num_blocks)]
        yield from _held(p, p.num_blocks, ranges, "blocks", num_ranks)
    if p.tokens is not None:
        ways = [printed_tokens] if printed_tokens else ["blocks", "requests"]
        ranges = [
            tuple(pool._replace(printed_tokens=way).tokens(p.max_model_len) for pool in (low, high))
            for way in ways
            if way == "blocks" or p.max_model_len
        ]
        yield from _held(p, p.tokens, ranges, "tokens", num_ranks)


def _held(
    p: Printed, shown: int, ranges: list[tuple[int, int]], unit: str, num_ranks: int
) -> Iterator[Finding]:
    if not ranges or any(least <= shown <= most for least, most in ranges):
        return
    least, most = min(ranges, key=lambda pair: abs(shown - sum(pair) / 2))
    share = 1 - 2 * shown / (least + most) if most else 1.0
    if num_ranks > 1 and 0 < share <= MOST_RANK_LOSS:
        lost = share * sum(read(p.kv_gib)) / 2
        text = f"{shown:,} {unit} are {share:.1%} ({lost:.2f} GiB) under this rank's {most:,}"
        yield Finding(SMALLEST_RANK, text)
    else:
        text = f"{p.kv_gib} GiB hold {least:,} to {most:,} {unit}, not {shown:,}"
        yield Finding(CONTRADICTION, text)


def _host(p: Printed, layout: Layout) -> Iterator[Finding]:
    """Swap space in blocks of the same size."""
    if p.num_host_blocks is None or p.swap_gib is None:
        return
    blocks = int(p.swap_gib * GIB) // layout.block_bytes
    if blocks != p.num_host_blocks:
        text = f"{p.swap_gib} GiB of swap are {blocks:,} blocks, not {p.num_host_blocks:,}"
        yield Finding(CONTRADICTION, text)


def _need(p: Printed, layout: Layout, step_tokens: int) -> Iterator[Finding]:
    """needed: of one request of max_model_len; estimated: the longest that KV memory holds."""
    if p.needed_gib is not None and p.max_model_len:
        needed = Pool(layout, 0, step_tokens).needed_bytes(p.max_model_len) / GIB
        if not read(p.needed_gib).meets(needed, needed):
            text = f"a request of {p.max_model_len:,} needs {needed:.2f} GiB, not {p.needed_gib}"
            yield Finding(CONTRADICTION, text)
    if p.estimated_max_len is not None and p.kv_gib is not None and p.max_model_len:
        kv = read(p.kv_gib)
        low, high = (
            Pool(layout, int(gib * GIB), step_tokens).estimated_max_len(p.max_model_len)
            for gib in (kv.low, kv.high)
        )
        if not low <= p.estimated_max_len <= high:
            text = f"{p.kv_gib} GiB hold {low:,} to {high:,} tokens, not {p.estimated_max_len:,}"
            yield Finding(CONTRADICTION, text)


def _failures(p: Printed, layout: Layout | None) -> Iterator[Finding]:
    """Why this start fails, by its own figures, and by how much."""
    if p.num_blocks == 0 or (p.kv_gib is not None and read(p.kv_gib).high <= 0):
        short = "" if p.kv_gib is None else f": {p.kv_gib} GiB"
        yield Finding(FAILS, f"no memory is left for KV blocks{short}")
        return
    if None not in (p.needed_gib, p.kv_gib) and read(p.kv_gib).high < read(p.needed_gib).low:
        short = (read(p.kv_gib).low + read(p.kv_gib).high) / 2 - sum(read(p.needed_gib)) / 2
        text = f"a request of max_model_len needs {p.needed_gib} GiB of {p.kv_gib}: {short:.2f} GiB"
        yield Finding(FAILS, text)
        return
    if p.concurrency is not None and read(p.concurrency).high >= 1:
        return
    if layout is not None and (len(layout.groups) > 1 or layout.groups[0].window):
        return  # windows: a request longer than the printed tokens may fit
    tokens = _tokens(p, layout)
    if tokens is not None and p.max_model_len and tokens < p.max_model_len:
        text = f"max_model_len {p.max_model_len:,} is more than the pool's {tokens:,} tokens"
        yield Finding(FAILS, text)
