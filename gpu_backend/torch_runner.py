"""Runs steps in plain torch, on any device: attention sequence by sequence."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_backend.attention import Segment, TorchAttention, copy_blocks, segment
from gpu_backend.model import Batch, Decoder
from gpu_backend.step import Chunk, Ran, Step
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove


class TorchRunner:
    """Over KV [L, 2, N, B, G, D] on the device and on the host. Where the cache is contiguous
    (block tables are runs of ids), KV is read where it lies, and not gathered."""

    def __init__(
        self, decoder: Decoder, kv: Tensor, host_kv: Tensor, *, is_contiguous: bool = False
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._pools = {COPY: (kv, kv), SWAP_OUT: (kv, host_kv), SWAP_IN: (host_kv, kv)}
        self._blocks = self._runs if is_contiguous else self._lists
        self._warm_up()

    def run(self, moves: list[BlockMove], step: Step, along: list[np.ndarray]) -> Ran:
        for kind, run in groupby(moves, key=lambda move: move.kind):
            copy_blocks(*self._pools[kind], [(move.source, move.target) for move in run])
        sent = [self._send(one) for one in along]
        padding = (0, step.num_padding)
        tokens, positions = (pad(self._send(one), padding) for one in (step.tokens, step.positions))
        if not len(tokens):
            logits = self._decoder.no_logits()
            return Ran(logits, logits.argmax(dim=-1), sent)
        attend = TorchAttention(self._send(step.slots), self._segments(step))
        batch = Batch(tokens, positions, self._send(step.rows), attend)
        logits = self._decoder.logits(batch, self._kv)
        return Ran(logits, logits.argmax(dim=-1), sent)

    def read(self, found: Tensor) -> np.ndarray:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)
        return found.cpu().numpy()

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._decoder.device)

    def _segments(self, step: Step) -> list[Segment]:
        contexts = [*step.contexts.tolist(), *(chunk.context for chunk in step.chunks)]
        lengths = [1] * len(step.contexts) + [chunk.num_new for chunk in step.chunks]
        blocks, segments, row = self._blocks(step, contexts), [], 0
        for num_new, context, held in zip(lengths, contexts, blocks, strict=True):
            segments.append(segment(row, num_new, context, held, self._decoder.device))
            row += num_new
        return segments

    def _lists(self, step: Step, contexts: list[int]) -> list[Tensor]:
        size, tables = self._kv.shape[3], self._send(step.tables)
        counts = [-(-context // size) for context in contexts]
        num_decodes = len(tables)
        return [
            *(table[:count] for table, count in zip(tables, counts, strict=False)),
            *(
                self._send(np.array(chunk.blocks[:count], np.int64))
                for chunk, count in zip(step.chunks, counts[num_decodes:], strict=True)
            ),
        ]

    def _runs(self, step: Step, contexts: list[int]) -> list[slice]:
        num_blocks, size = self._kv.shape[2:4]
        firsts = [*step.tables[:, 0].tolist(), *(chunk.blocks[0] for chunk in step.chunks)]
        runs = [
            slice(first, first - (-context // size))
            for first, context in zip(firsts, contexts, strict=True)
        ]
        assert all(run.stop <= num_blocks for run in runs), "a region lies in the pool"
        return runs

    def _warm_up(self) -> None:
        """The first products of a process cost more than all later ones."""
        for count in (1, self._kv.shape[3]):
            rows = np.arange(count)
            step = Step(
                rows * 0,
                rows,
                rows,
                np.zeros(0, np.int64),
                np.zeros((0, 1), np.int64),
                [Chunk(count, count, [0])],
                rows,
            )
            for _ in range(2):
                self.run([], step, [])
