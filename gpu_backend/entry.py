"""What `kvsim run FILE --executor torch` finds: from an experiment to executors on a model."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from gpu_backend.executor import ModelExecutor
from gpu_backend.load import Pools, load_decoder
from gpu_backend.model import Decoder
from gpu_backend.shape import Shape
from gpu_backend.step import Runner
from gpu_backend.texts import check_quotes
from gpu_backend.torch_runner import TorchRunner
from kvsim.config.build import registered_blocks
from kvsim.config.models import Experiment
from kvsim.errors import UserError
from kvsim.workload.workload import Workload


class RunnerChoice(NamedTuple):
    """How a runner is made, and what it refuses before anything else is."""

    make: Callable[[Decoder, Tensor, Tensor], Runner]
    check: Callable[[Shape, torch.dtype, torch.device], None] | None


class Options(BaseModel):
    """`model`: small (19.5 M random parameters), a folder with config.json and safetensors, or a
    config.json, whose weights are then drawn from the experiment's seed. Unless set, `dtype` and
    `attention` are float32 and torch on a CPU, bfloat16 and triton on a GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "small"
    device: str = "cpu"
    dtype: str | None = None
    attention: str | None = None


def prepare(
    experiment: Experiment, workload: Workload, options: dict[str, str]
) -> Callable[[list[int]], ModelExecutor]:
    """Load the model once; every replica gets an executor with a pool of its own, as large as the
    experiment says. Its step_time is not used. Raises UserError."""
    try:
        chosen = Options(**options)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        known = list(Options.model_fields)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        text = f"not one of {', '.join(known)}; nearest is {near!r}"
        raise UserError(f"--executor-set {key}: {text}") from None
    check_quotes(workload)
    kv, count = experiment.kv, experiment.replicas.count
    assert kv.num_blocks is not None and experiment.engine.max_model_len is not None
    pools = Pools(kv.num_blocks, kv.block_size, kv.num_host_blocks or 0)
    is_cpu = chosen.device == "cpu"
    runner = _runner_of(chosen.attention or ("torch" if is_cpu else "triton"), experiment)
    if is_cpu:
        torch.set_num_threads(1)  # a step's time is that of one thread
    decoder = load_decoder(
        chosen.model,
        dtype=chosen.dtype or ("float32" if is_cpu else "bfloat16"),
        device=chosen.device,
        seed=experiment.seed,
        max_model_len=experiment.engine.max_model_len,
        check=runner.check,
        pools=pools._replace(
            num_blocks=count * pools.num_blocks, num_host_blocks=count * pools.num_host_blocks
        ),
    )
    if decoder.device.type == "cuda":
        torch.cuda.set_device(decoder.device)  # where Triton launches
    size = kv.block_size
    registered = {
        stream: blocks * size for stream, blocks in registered_blocks(experiment, workload).items()
    }
    return partial(
        ModelExecutor,
        decoder,
        pools,
        seed=experiment.seed,
        registered=registered,
        make_runner=runner.make,
    )


def _runner_of(attention: str, experiment: Experiment) -> RunnerChoice:
    """Raises UserError for an attention that is none or that is not installed."""
    engine, kv = experiment.engine, experiment.kv
    is_contiguous = kv.policy.kind == "contiguous"
    if attention == "torch":
        return RunnerChoice(partial(TorchRunner, is_contiguous=is_contiguous), None)
    if attention != "triton":
        raise UserError(f"attention {attention!r} is not one of torch, triton")
    if find_spec("triton") is None:
        raise UserError("attention triton: triton is not installed; attention=torch needs none")
    from gpu_backend.triton_attention import check_triton
    from gpu_backend.triton_runner import Bounds, TritonRunner

    assert engine.max_model_len is not None
    bounds = Bounds(engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len)
    return RunnerChoice(
        partial(TritonRunner, bounds=bounds, is_contiguous=is_contiguous),
        partial(check_triton, block_size=kv.block_size),
    )
