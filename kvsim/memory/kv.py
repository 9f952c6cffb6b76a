"""KV bytes of a request, and a pool of blocks cut from what memory is left for them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvsim.memory.entry import EngineEntry
from kvsim.memory.shape import Attention, Layer, ModelShape
from kvsim.memory.weights import DTYPE_BYTES

GIB = 2**30
NEAR_EQUAL = 1.25  # kinds of layers whose counts differ less are padded to the larger count (vLLM)


class Limits(NamedTuple):
    """What a serve line may set; None: as the engine defaults. kv_dtype auto: the model's."""

    max_model_len: int
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_dtype: str = "auto"
    enforce_eager: bool = False
    block_size: int | None = None


class Group(NamedTuple):
    """Layers that share a block table. window: tokens kept; is_state: one block a request."""

    block_size: int
    window: int | None
    is_state: bool


class Layout(NamedTuple):
    """The pool of one rank: block_bytes of a block, which holds block_size tokens of one group."""

    groups: tuple[Group, ...]
    block_bytes: int

    def blocks_of(self, tokens: int, step_tokens: int) -> int:
        """Blocks of one request, by the engine's own bound: a sliding group keeps its window, the
        step in flight and one block more, since neither starts on a block's edge."""
        total = 0
        for group in self.groups:
            if group.is_state:
                total += 1
            elif group.window is None:
                total += -(-tokens // group.block_size)
            else:
                kept = min(group.window - 1 + step_tokens, tokens)
                total += -(-kept // group.block_size) + 1
        return total


def kv_dtype_bytes(shape: ModelShape, kv_dtype: str) -> int:
    """fp8_e4m3 and the like count as fp8; auto is the model's dtype, whatever its weights'."""
    return DTYPE_BYTES[shape.dtype if kv_dtype == "auto" else kv_dtype.partition("_")[0]]


def token_elements(attention: Attention, tensor: int = 1) -> float:
    """KV elements of a token in one layer on one rank. A latent has no heads to split: every rank
    holds it; and a KV head that is alone is repeated."""
    if attention.state_elements:
        return 0
    if attention.latent:
        return attention.latent.kv_rank + attention.latent.rope_dim
    return 2 * attention.head_dim * max(1, attention.kv_heads // tensor)


def kv_bytes_of(shape: ModelShape, tokens: int, kv_dtype: str = "auto") -> int:
    """KV of one request of so many tokens, all layers, on one GPU, no block rounding: affine in
    tokens past the longest window."""
    per_element = kv_dtype_bytes(shape, kv_dtype)
    total = 0
    for layer in shape.layers:
        kept = min(tokens, layer.attention.window or tokens)
        total += kept * token_elements(layer.attention) * per_element
        total += layer.attention.state_elements * DTYPE_BYTES[shape.dtype]
    return int(total)


def layout(
    shape: ModelShape,
    layers: tuple[Layer, ...],
    engine: EngineEntry,
    limits: Limits,
    *,
    tensor: int = 1,
    block_size: int | None = None,
) -> Layout:
    """How an engine groups these layers: one group where all keep their tokens alike; else groups
    of as many layers as the rarest kind has, all of them with pages of one size."""
    size = limits.block_size or block_size or engine.block_size
    per_element = kv_dtype_bytes(shape, limits.kv_dtype)
    counts: Counter[tuple[int, int | None, int]] = Counter()
    for layer in layers:
        attention = layer.attention
        window = attention.window if engine.prices_windows else None
        token_bytes = int(token_elements(attention, tensor) * per_element)
        state_bytes = attention.state_elements * DTYPE_BYTES[shape.dtype] // tensor
        counts[token_bytes, window, state_bytes] += 1
    if len({(window, state > 0) for _, window, state in counts}) == 1:
        (_, window, state), *_ = counts
        page = sum((state or token * size) * count for (token, _, state), count in counts.items())
        return Layout((Group(size, window, state > 0),), page)
    return _grouped(counts, size)


def _grouped(counts: Counter[tuple[int, int | None, int]], size: int) -> Layout:
    rarest, commonest = min(counts.values()), max(counts.values())
    group_size = commonest if commonest < NEAR_EQUAL * rarest else rarest
    widest = max(token for token, _, _ in counts)
    if state := max(state for _, _, state in counts):  # a page holds a whole state
        size = max(size, -(-state // (widest * 16)) * 16)
    page = size * widest
    groups: list[Group] = []
    for (token, window, state), count in counts.items():
        tokens_a_page = size if state else page // token  # narrower layers get longer blocks
        groups += [Group(tokens_a_page, window, state > 0)] * -(-count // group_size)
    return Layout(tuple(groups), page * group_size)


class Pool(NamedTuple):
    """kv_bytes for KV on a rank (may be negative), as blocks. step_tokens: of one engine step."""

    layout: Layout
    kv_bytes: int
    step_tokens: int
    printed_tokens: str = "blocks"

    @property
    def num_blocks(self) -> int:
        return max(0, self.kv_bytes // self.layout.block_bytes)

    def requests_at_once(self, tokens: int) -> float:
        """How many requests of so many tokens the pool holds together."""
        return self.num_blocks / self.layout.blocks_of(tokens, self.step_tokens)

    def tokens(self, max_model_len: int) -> int:
        """The figure that engines print as the pool's tokens. From 0.21 vLLM prints requests at
        once x max_model_len, which for windows depends on the limit and not on memory alone."""
        if self.printed_tokens == "requests":
            blocks = self.layout.blocks_of(max_model_len, self.step_tokens)
            return self.num_blocks * max_model_len // blocks
        groups = self.layout.groups
        return self.num_blocks // len(groups) * min(group.block_size for group in groups)

    def needed_bytes(self, max_model_len: int) -> int:
        return self.layout.blocks_of(max_model_len, self.step_tokens) * self.layout.block_bytes

    def estimated_max_len(self, max_model_len: int) -> int:
        """The longest request up to max_model_len that fits alone; 0: none does."""
        low, high = 0, max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.needed_bytes(middle) <= self.kv_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def request_table(pool: Pool, contexts: list[int]) -> list[tuple[int, float]]:
    """(context, requests at once): what to print for windows and states in a token's stead."""
    return [(context, pool.requests_at_once(context)) for context in contexts]
