"""Prints as JSON, of a runner, paged and contiguous: the kernels that its warm-up compiles, those
that steps of any size within its bounds compile after it, and how many operators of a step had
tensors of the host and of the device.

A process of its own, with nothing interpreted: the runner works on tensors without memory, under a
driver that launches nothing.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.driver import driver

from gpu_backend import triton_runner
from gpu_backend.aot import NoDriver
from gpu_backend.load import Pools
from gpu_backend.model import Decoder
from gpu_backend.rope import rope_of
from gpu_backend.shape import Shape
from gpu_backend.step import Chunk, Step
from gpu_backend.triton_runner import Bounds, TritonRunner
from gpu_backend.weights import drawn
from kvsim.engine.plan import COPY, SWAP_IN, SWAP_OUT, BlockMove

META, BLOCK_SIZE, NUM_BLOCKS = torch.device("meta"), 16, 5000
BOUNDS = Bounds(max_num_seqs=40, max_num_batched_tokens=512, max_model_len=3000)
NUM_PROCESSORS = 132
SHAPE = Shape(
    vocab_size=1000,
    hidden_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    ffn_size=512,
    num_positions=4096,
    rope=rope_of({}, 64, ""),
)


class Counting(NoDriver):
    """Each kernel is loaded once."""

    def load_binary(self, *args: object) -> tuple:
        return object(), *super().load_binary(*args)[1:]


class Crossings(TorchDispatchMode):
    """Counts operators that have tensors of the host and of the device: copies, above all."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        self.count += len({one.device.type for one in tensors}) > 1
        return out


class Literals(TorchFunctionMode):
    """Counts tensors made of Python's numbers: on a GPU each is a copy that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.tensor, torch.as_tensor, torch.asarray)
        return func(*args, **(kwargs or {}))


def random_step(random: np.random.Generator) -> Step:
    """Decodes at any contexts and, in half of all steps, chunks of up to the budget."""
    num_decodes = int(random.integers(0, BOUNDS.max_num_seqs + 1))
    contexts = random.integers(1, BOUNDS.max_model_len + 1, num_decodes)
    chunks, left = [], BOUNDS.max_num_batched_tokens
    while left and random.integers(2) and len(chunks) + num_decodes < BOUNDS.max_num_seqs:
        num_new = int(random.integers(1, left + 1))
        context = num_new + int(random.integers(0, BOUNDS.max_model_len - num_new + 1))
        chunks.append(Chunk(num_new, context, [*range(-(-context // BLOCK_SIZE))]))
        left -= num_new
    num_rows = num_decodes + sum(chunk.num_new for chunk in chunks)
    tables = np.zeros((num_decodes, 256), np.int64)
    rows = np.arange(min(num_rows, num_decodes + len(chunks)))
    flat = np.zeros(num_rows, np.int64)
    return Step(flat, flat, flat, contexts, tables, chunks, rows, int(random.integers(0, 3)))


def random_moves(random: np.random.Generator) -> list[BlockMove]:
    kinds = [(COPY, SWAP_OUT, SWAP_IN)[kind] for kind in random.integers(0, 3, 4)]
    return [BlockMove(kind, *random.integers(0, 50, 2).tolist()) for kind in kinds]


def main() -> None:
    splits_of = triton_runner.num_splits_of
    triton_runner.num_splits_of = lambda *fixed: splits_of(*fixed[:3], NUM_PROCESSORS)
    driver.set_active(stand_in := Counting())
    stand_in.target = 90
    pools = Pools(NUM_BLOCKS, BLOCK_SIZE, 100)
    found = {}
    for is_contiguous in (False, True):
        stand_in.loaded.clear()
        kv, host_kv = (
            torch.empty(pools.kv_size(SHAPE, count), dtype=torch.bfloat16, device=META)
            for count in (pools.num_blocks, pools.num_host_blocks)
        )
        decoder = Decoder(SHAPE, drawn(SHAPE, 0, torch.bfloat16, META))
        runner = TritonRunner(decoder, kv, host_kv, bounds=BOUNDS, is_contiguous=is_contiguous)
        at_first = [name for name, *_ in stand_in.loaded]
        random, crossed = np.random.default_rng(1), Counter()
        for _ in range(200):
            with Crossings() as crossings, Literals() as literals:
                runner.run(random_moves(random), random_step(random), [np.zeros(3), np.arange(3)])
            crossed[crossings.count + literals.count] += 1
        later = [name for name, *_ in stand_in.loaded[len(at_first) :]]
        name = "contiguous" if is_contiguous else "paged"
        found[name] = {"at first": Counter(at_first), "later": Counter(later), "crossed": crossed}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
