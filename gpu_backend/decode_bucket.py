"""A decode of padded size from fixed addresses to fixed addresses, so that a CUDA graph can hold
it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_backend.kernels import decode_scratch
from gpu_backend.model import Batch, Decoder
from gpu_backend.staging import Field, Staging
from gpu_backend.step import Step
from gpu_backend.triton_attention import Decodes, Kernels, TritonAttention

LARGEST = 512  # sequences: beyond them a step costs more than its launches


class Found(NamedTuple):
    """Where a decode leaves what it found, by row: logits [S, V] and the likeliest tokens, int64
    [S]."""

    logits: Tensor
    likeliest: Tensor


class DecodeBucket:
    """The whole decoder, embedding to likeliest tokens, for up to `size` sequences. Rows without
    one write no KV and attend to nothing. `num_splits` as `decode_scratch` says."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Tensor,
        kernels: Kernels,
        staging: Staging,
        found: Found,
        *,
        size: int,
        num_columns: int,
        num_splits: int,
    ) -> None:
        shape = decoder.shape
        self.found = Found(*(one[:size] for one in found))
        self.scratch = None
        if num_splits > 1:
            heads = (shape.num_heads, shape.head_size)
            self.scratch = decode_scratch(size, *heads, num_splits, decoder.device)
        self._decoder = decoder
        self._kv = kv
        self._fields = staging.lay(decode_fields(size, num_columns))
        tokens, positions, slots, contexts, tables = self._fields.device
        decodes = Decodes(tables, contexts, self.scratch)
        attend = TritonAttention(kernels, slots, decodes, None)
        self._batch = Batch(tokens, positions, slice(None), attend)
        self.run = self._compute

    def fill(self, step: Step, num_columns: int) -> int:
        """Write a step's decodes to the host's side of the fields, so many columns of its block
        tables. Returns the byte behind them."""
        count = len(step.contexts)
        tokens, positions, slots, contexts, tables = self._fields.host
        tokens[:count], tokens[count:] = step.tokens, 0
        positions[:count], positions[count:] = step.positions, 0
        slots[:count], slots[count:] = step.slots, -1
        contexts[:count], contexts[count:] = step.contexts, 0
        tables[:count, :num_columns] = step.tables[:, :num_columns]
        return self._fields.end

    def capture(self, pool: tuple[int, int]) -> None:
        """From now on `run` replays a CUDA graph, its memory from a pool that buckets share, the
        largest first. It must have run once, so that nothing is left to compile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._compute()
        self.run = graph.replay

    def _compute(self) -> None:
        self._decoder.logits(self._batch, self._kv, out=self.found.logits)
        torch.argmax(self.found.logits, dim=-1, out=self.found.likeliest)


def decode_fields(size: int, num_columns: int) -> list[Field]:
    """Tokens, positions, slots, contexts and block tables of so many sequences."""
    return [
        *(Field("int64", (size,)) for _ in range(3)),
        Field("int32", (size,)),
        Field("int32", (size, num_columns)),
    ]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, every 8th up to 256, every 16th from there, as vLLM captures them; and the most
    sequences that a step has, where LARGEST is not reached."""
    last = min(max_num_seqs, LARGEST)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]
    return [*(size for size in steps if size < last), last]
