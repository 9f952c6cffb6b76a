"""Runs steps by the Triton kernels: decodes of padded sizes, from CUDA graphs where there is a GPU;
steps with chunks one operator after the other."""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_backend.decode_bucket import DecodeBucket, Found, bucket_sizes, decode_fields
from gpu_backend.kernels import move_blocks, num_splits_of, runs_of_moves
from gpu_backend.model import Batch, Decoder
from gpu_backend.staging import Field, Fields, Staging, size_of
from gpu_backend.step import Chunk, Ran, Step
from gpu_backend.triton_attention import (
    COLUMNS,
    CONTIGUOUS,
    PAGED,
    Chunks,
    Decodes,
    TritonAttention,
)
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove
from kvsim.errors import UserError

ALONG_BYTES = 1 << 16  # beside a decode: of moves and what sampling needs


class Bounds(NamedTuple):
    """The largest step that an engine makes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class TritonRunner:
    """Over KV [L, 2, N, B, G, D] on the device and, pinned, on the host. Where the cache is
    contiguous (block tables are runs of ids), kernels read the first block of a table only.

    Whatever a step of `bounds` needs is compiled, captured and allocated before the first one, but
    for what torch's own allocator keeps for steps with chunks. Raises UserError where there is no
    memory for that.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Tensor,
        host_kv: Tensor,
        *,
        bounds: Bounds,
        is_contiguous: bool = False,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._pools = {COPY: (kv, kv), SWAP_OUT: (kv, host_kv), SWAP_IN: (host_kv, kv)}
        self._kernels = CONTIGUOUS if is_contiguous else PAGED
        self._is_cuda = decoder.device.type == "cuda"
        longest = self._kernels.num_columns(-(-bounds.max_model_len // kv.shape[3]))
        self._num_columns = -(-longest // COLUMNS) * COLUMNS
        self._sizes = bucket_sizes(bounds.max_num_seqs)
        self._buckets = self._make_buckets(bounds)
        num_seqs = self._sizes[-1]
        num_tokens = bounds.max_num_batched_tokens + num_seqs
        largest = _step_fields(num_seqs, num_seqs, num_tokens, num_seqs, self._num_columns)
        self._staging = Staging(size_of(largest) + ALONG_BYTES, decoder.device)
        self._told = torch.zeros(4 * num_seqs, dtype=torch.int64, pin_memory=self._is_cuda)
        try:
            self._warm_up(bounds)
        except torch.OutOfMemoryError:
            raise UserError(
                f"kv.num_blocks: {kv.shape[2]:,} blocks leave no room for steps of "
                f"{bounds.max_num_batched_tokens:,} tokens (engine.max_num_batched_tokens)"
            ) from None

    def run(self, moves: list[BlockMove], step: Step, along: list[np.ndarray]) -> Ran:
        runs = [
            (kind, np.array(run, np.int64))
            for kind, same in groupby(moves, key=lambda move: move.kind)
            for run in runs_of_moves((move.source, move.target) for move in same)
        ]
        along = [*(pairs for _, pairs in runs), *along]
        bucket = self._bucket_of(step, along)
        if bucket is None:
            staging, fields = self._laid(step, along)
            end = fields.end
        else:
            staging, fields = self._decode_staging, None
            end = bucket.fill(step, self._columns_of(step.contexts))
        sent = staging.lay(_fields_of(along), end)
        for host, array in zip(sent.host, along, strict=True):
            host[...] = array
        staging.send(sent.end)
        for (kind, _), pairs in zip(runs, sent.device, strict=False):
            move_blocks(*self._pools[kind], pairs)
        found = self._found(step, bucket, fields)
        return Ran(*found, sent.device[len(runs) :])

    def read(self, found: Tensor) -> np.ndarray:
        if len(found) > len(self._told):
            self._told = torch.zeros(2 * len(found), dtype=torch.int64, pin_memory=self._is_cuda)
        told = self._told[: len(found)]
        told.copy_(found, non_blocking=True)
        self._wait()
        return told.numpy()

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self._decoder.device).synchronize()

    def _bucket_of(self, step: Step, along: list[np.ndarray]) -> DecodeBucket | None:
        """The smallest with room for a step of decodes alone; None: one operator at a time."""
        num_rows = len(step.contexts) + step.num_padding
        if step.chunks or not 0 < num_rows <= self._sizes[-1]:
            return None
        if size_of(_fields_of(along)) > ALONG_BYTES:
            return None
        return self._buckets[bisect_left(self._sizes, num_rows)]

    def _laid(self, step: Step, along: list[np.ndarray]) -> tuple[Staging, Fields]:
        """A step on the host's side of a buffer, which grows where it has no room for it."""
        num_decodes, num_chunks = len(step.contexts), len(step.chunks)
        sizes = (num_decodes, num_chunks, len(step.tokens), len(step.rows))
        fields = _step_fields(*sizes, self._num_columns)
        num_bytes = size_of(fields) + size_of(_fields_of(along))
        if num_bytes > self._staging.num_bytes:
            self._staging = Staging(2 * num_bytes, self._decoder.device)
        laid = self._staging.lay(fields)
        *flat, contexts, tables, starts, chunk_contexts, chunk_tables = laid.host
        for host, array in zip(
            flat, (step.tokens, step.positions, step.slots, step.rows), strict=True
        ):
            host[:] = array
        contexts[:] = step.contexts
        width = self._columns_of(step.contexts)
        tables[:, :width] = step.tables[:, :width]
        starts[0], starts[1:] = 0, np.cumsum([chunk.num_new for chunk in step.chunks])
        chunk_contexts[:] = [chunk.context for chunk in step.chunks]
        for table, chunk, context in zip(chunk_tables, step.chunks, chunk_contexts, strict=True):
            blocks = chunk.blocks[: self._columns_of(context[None])]
            table[: len(blocks)] = blocks
        return self._staging, laid

    def _columns_of(self, contexts: np.ndarray) -> int:
        """Columns of block tables that kernels read for contexts of so many tokens."""
        longest = int(contexts.max(initial=0))
        return self._kernels.num_columns(-(-longest // self._kv.shape[3]))

    def _found(self, step: Step, bucket: DecodeBucket | None, laid: Fields | None) -> Found:
        if bucket is not None:
            bucket.run()
            return Found(*(one[: len(step.contexts)] for one in bucket.found))
        if not len(step.tokens) + step.num_padding:
            logits = self._decoder.no_logits()
        else:
            logits = self._decoder.logits(self._batch(step, laid), self._kv)
        return Found(logits, logits.argmax(dim=-1))

    def _batch(self, step: Step, laid: Fields) -> Batch:
        tokens, positions, slots, rows, contexts, tables, *chunked = laid.device
        decodes = chunks = None
        if count := len(step.contexts):
            place = min(bisect_left(self._sizes, count), len(self._sizes) - 1)
            scratch = self._buckets[place].scratch if count <= self._sizes[-1] else None
            decodes = Decodes(tables, contexts, scratch)
        if step.chunks:
            starts, chunk_contexts, chunk_tables = chunked
            most = max(chunk.num_new for chunk in step.chunks)
            chunks = Chunks(starts, chunk_tables, chunk_contexts, most)
        attend = TritonAttention(self._kernels, slots, decodes, chunks)
        padding = (0, step.num_padding)
        return Batch(pad(tokens, padding), pad(positions, padding), rows, attend)

    def _make_buckets(self, bounds: Bounds) -> list[DecodeBucket]:
        decoder, largest = self._decoder, self._sizes[-1]
        shape, device = decoder.shape, decoder.device
        fields = decode_fields(largest, self._num_columns)
        self._decode_staging = Staging(size_of(fields) + ALONG_BYTES, device)
        found = Found(
            torch.empty(largest, shape.vocab_size, dtype=decoder.dtype, device=device),
            torch.empty(largest, dtype=torch.int64, device=device),
        )
        num_processors = 1
        if self._is_cuda:
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        return [
            DecodeBucket(
                decoder,
                self._kv,
                self._kernels,
                self._decode_staging,
                found,
                size=size,
                num_columns=self._num_columns,
                num_splits=num_splits_of(
                    size, shape.num_kv_heads, bounds.max_model_len, num_processors
                ),
            )
            for size in self._sizes
        ]

    def _warm_up(self, bounds: Bounds) -> None:
        """Compile every kernel, let torch's libraries choose theirs, then capture: with rows that
        write nothing, and moves of a block to its own place."""
        pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        for bucket in reversed(self._buckets):
            self._decode_staging.send(bucket.fill(_idle_step(0), 0))
            bucket.run()
            self._wait()
            if pool is not None:
                bucket.capture(pool)
        largest = bounds.max_num_batched_tokens
        for num_tokens in {*(1 << n for n in range(largest.bit_length())), largest}:
            self.run([], _idle_step(num_tokens), [])
            self._wait()
        kinds = [COPY, SWAP_OUT, SWAP_IN] if self._pools[SWAP_IN][0].shape[2] else [COPY]
        if self._kv.shape[2]:
            self.run([BlockMove(kind, 0, 0) for kind in kinds], _idle_step(0), [])
            self._wait()


def _idle_step(num_tokens: int) -> Step:
    """So many rows of a chunk, or none: nothing is written, attended to or wanted."""
    nothing = np.zeros(0, np.int64)
    tokens = np.zeros(num_tokens, np.int64)
    chunks = [Chunk(num_tokens, 0, [])] if num_tokens else []
    tables = np.zeros((0, 1), np.int64)
    return Step(tokens, tokens, tokens - 1, nothing, tables, chunks, tokens[:1])


def _step_fields(
    num_decodes: int, num_chunks: int, num_tokens: int, num_rows: int, num_columns: int
) -> list[Field]:
    """Tokens, positions, slots, wanted rows; contexts and tables of decodes; starts, contexts and
    tables of chunks."""
    return [
        *(Field("int64", (num_tokens,)) for _ in range(3)),
        Field("int64", (num_rows,)),
        Field("int32", (num_decodes,)),
        Field("int32", (num_decodes, num_columns)),
        Field("int32", (num_chunks + 1,)),
        Field("int32", (num_chunks,)),
        Field("int32", (num_chunks, num_columns)),
    ]


def _fields_of(arrays: list[np.ndarray]) -> list[Field]:
    return [Field(array.dtype.name, array.shape) for array in arrays]
