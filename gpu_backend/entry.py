"""What `kvsim run FILE --executor torch` finds: from an experiment to executors on a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from gpu_backend.executor import ModelExecutor
from gpu_backend.load import Pools, load_decoder
from gpu_backend.texts import check_quotes
from gpu_backend.torch_runner import TorchRunner
from kvsim.config.build import registered_blocks
from kvsim.config.models import Experiment
from kvsim.errors import UserError
from kvsim.workload.workload import Workload


class Options(BaseModel):
    """`model`: small (19.5 M random parameters), a folder with config.json and safetensors, or a
    config.json, whose weights are then drawn from the experiment's seed. `dtype` is float32 on a
    CPU and bfloat16 on a GPU unless set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "small"
    device: str = "cpu"
    dtype: str | None = None


def prepare(
    experiment: Experiment, workload: Workload, options: dict[str, str]
) -> Callable[[list[int]], ModelExecutor]:
    """Load the model once; every replica gets an executor with a pool of its own, as large as the
    experiment says. Its step_time is not used. Raises UserError."""
    try:
        chosen = Options(**options)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        known = ", ".join(Options.model_fields)
        raise UserError(f"--executor-set {key}: not one of {known}") from None
    check_quotes(workload)
    kv, count = experiment.kv, experiment.replicas.count
    assert kv.num_blocks is not None and experiment.engine.max_model_len is not None
    pools = Pools(kv.num_blocks, kv.block_size, kv.num_host_blocks or 0)
    if chosen.device == "cpu":
        torch.set_num_threads(1)  # a step's time is that of one thread
    decoder = load_decoder(
        chosen.model,
        dtype=chosen.dtype or ("float32" if chosen.device == "cpu" else "bfloat16"),
        device=chosen.device,
        seed=experiment.seed,
        max_model_len=experiment.engine.max_model_len,
        pools=pools._replace(
            num_blocks=count * pools.num_blocks, num_host_blocks=count * pools.num_host_blocks
        ),
    )
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
        make_runner=partial(TorchRunner, is_contiguous=kv.policy.kind == "contiguous"),
    )
