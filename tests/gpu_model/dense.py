"""One request at a time in contiguous memory: what every policy's tokens are compared with."""

from __future__ import annotations

import torch

from gpu_backend.attention import TorchAttention, segment
from gpu_backend.model import Batch, Decoder


def dense_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of every position of a text, computed at once."""
    shape, count = decoder.shape, len(tokens)
    size = (shape.num_layers, 2, 1, count, shape.num_kv_heads, shape.head_size)
    kv = torch.zeros(size, dtype=decoder.dtype)
    rows = torch.arange(count)
    attend = TorchAttention(rows, [segment(0, count, count, slice(0, 1), decoder.device)])
    return decoder.logits(Batch(torch.tensor(tokens), rows, rows, attend), kv)
