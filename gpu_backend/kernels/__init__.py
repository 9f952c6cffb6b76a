"""The kernels of the real backend: each beside its reference in plain torch, the CPU's path."""

from gpu_backend.kernels.combine_splits import DecodeScratch, decode_scratch, num_splits_of
from gpu_backend.kernels.decode_attention import contiguous_decode_attention, decode_attention
from gpu_backend.kernels.move_blocks import move_blocks, runs_of_moves
from gpu_backend.kernels.prefill_attention import (
    contiguous_prefill_attention,
    prefill_attention,
)
from gpu_backend.kernels.store_kv import store_kv

__all__ = [
    "DecodeScratch",
    "contiguous_decode_attention",
    "contiguous_prefill_attention",
    "decode_attention",
    "decode_scratch",
    "move_blocks",
    "num_splits_of",
    "prefill_attention",
    "runs_of_moves",
    "store_kv",
]
