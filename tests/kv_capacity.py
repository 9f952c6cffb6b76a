"""Server starts of public logs against the memory model: one row of the published cases each.

`python -m tests.kv_capacity` prints every row's checks and what the model predicts for it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from kvsim.memory.activation import profiled_step
from kvsim.memory.budget import Known, budget
from kvsim.memory.catalog import (
    Gpu,
    engine_of_version,
    find_engine,
    find_gpu,
    find_model,
    gpu_names,
    model_names,
)
from kvsim.memory.entry import EngineEntry
from kvsim.memory.kv import Layout, Limits, layout
from kvsim.memory.printed import CONTRADICTION, FAILS, Finding, Printed, findings
from kvsim.memory.shape import ModelShape
from kvsim.memory.weights import Parallel
from tests.shared import SHARED

CASES = SHARED / "data" / "cases" / "kv_capacity.yaml"
FORMATS = {  # the cases' words for weight formats
    "4bit": "gptq-4bit", "gptq4": "gptq-4bit", "awq4": "awq-4bit", "awq": "awq-4bit",
    "gptq": "gptq-4bit", "w4a16": "gptq-4bit", "bnb4": "bnb-4bit", "fp8": "fp8", "int8": "int8",
    "w8a8": "int8", "gptq8": "int8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "gguf-q8": "gguf-q8",
    "gguf-q4": "gguf-q4",
}  # fmt: skip


class Prediction(NamedTuple):
    """kv_gib from the engine preset with printed and with computed weights; bar: of its error."""

    printed_kv_gib: float
    kv_gib: float
    kv_gib_from_shape: float
    bar_gib: float
    how: str

    @property
    def is_within(self) -> bool:
        return abs(self.kv_gib - self.printed_kv_gib) <= self.bar_gib


def read_cases(path: Path = CASES) -> list[dict]:
    return yaml.safe_load(path.read_text())["cases"]


def shape_of(case: dict) -> ModelShape | None:
    """The catalogue's model, its weights as the case has them; None: unknown or hybrid-linear."""
    if case["arch"] not in model_names():
        return None
    quantization = case.get("weights_quant")
    shape = find_model(case["arch"], FORMATS.get(quantization))
    dtype = "fp32" if quantization == "fp32" else case.get("dtype", shape.dtype)
    return replace(shape, dtype=dtype)


def engine_of(case: dict) -> EngineEntry:
    if "engine_version" in case:
        return find_engine(engine_of_version(str(case["engine_version"])))
    return find_engine("vllm-0.8" if case["engine"] == "vllm-v1" else "vllm-0.1")


def gpu_of(case: dict) -> Gpu:
    """The card by the name's words; what it holds as the log prints it, where it does."""
    text = case["gpu"].lower().replace("-", "").replace(" ", "")
    known = [name for name in gpu_names() if name.replace("-", "") in text]
    gpu = find_gpu(max(known, key=len)) if known else Gpu(case["gpu"], 80.0)
    if "a100" in case["gpu"].lower():
        gpu = gpu._replace(large_step_defaults=False)
    return gpu._replace(memory_gib=case.get("gpu_total_gib", gpu.memory_gib))


def limits_of(case: dict) -> Limits:
    return Limits(
        max_model_len=case.get("max_model_len", 2048),
        gpu_memory_utilization=case.get("gmu", 0.9),
        max_num_batched_tokens=case.get("max_num_batched_tokens"),
        max_num_seqs=case.get("max_num_seqs"),
        kv_dtype=case.get("kv_dtype", "auto"),
        enforce_eager=case.get("enforce_eager", False),
        block_size=case.get("block_size"),
    )


def parallel_of(case: dict) -> Parallel:
    return Parallel(case.get("tp", 1), case.get("pp", 1), case.get("dp", 1))


def layout_of(case: dict) -> Layout | None:
    if (shape := shape_of(case)) is None:
        return None
    gpu = gpu_of(case)
    return layout(
        shape, shape.layers, engine_of(case), limits_of(case),
        tensor=parallel_of(case).tensor, block_size=gpu.block_size,
    )  # fmt: skip


def findings_of(case: dict) -> list[Finding]:
    printed = Printed(
        total_gib=case.get("gpu_total_gib"),
        gpu_memory_utilization=case.get("gmu"),
        weights_gib=case.get("weights_gib"),
        runtime_gib=case.get("non_torch_gib"),
        activation_gib=case.get("activation_gib"),
        kv_gib=case.get("avail_kv_gib"),
        num_blocks=case.get("gpu_blocks"),
        num_host_blocks=case.get("cpu_blocks"),
        swap_gib=case.get("swap_gib"),
        tokens=case.get("kv_tokens", case.get("max_tokens_reported")),
        max_model_len=case.get("max_model_len"),
        concurrency=case.get("max_concurrency"),
        needed_gib=case.get("needed_kv_gib"),
        estimated_max_len=case.get("est_max_len"),
    )
    return findings(
        printed,
        layout_of(case),
        step_tokens=profiled_step(engine_of(case), gpu_of(case), limits_of(case)).tokens,
        num_ranks=parallel_of(case).tensor * parallel_of(case).pipeline,
        printed_tokens=engine_of(case).printed_tokens if "engine_version" in case else None,
    )


def prediction_of(case: dict) -> Prediction | None:
    """None unless total, utilization, weights and KV memory are printed and the model is known."""
    printed = [case.get(key) for key in ("gpu_total_gib", "gmu", "weights_gib", "avail_kv_gib")]
    shape = shape_of(case)
    if None in printed or shape is None:
        return None
    total, share, weights, kv = printed
    given = (shape, gpu_of(case), parallel_of(case), engine_of(case), limits_of(case))
    out = budget(*given, Known(weights_gib=weights))
    reserve = total * share - weights - kv
    return Prediction(
        kv, out.kv.gib, budget(*given).kv.gib, max(0.5, 0.15 * reserve), out.activation.how
    )


def main() -> None:
    cases = read_cases(Path(sys.argv[1]) if len(sys.argv) > 1 else CASES)
    good, predicted, within = 0, 0, 0
    for case in cases:
        found = findings_of(case)
        kinds = {finding.kind for finding in found}
        is_as_known = (CONTRADICTION in kinds) == (case["quality"] == "X")
        is_as_known &= (FAILS in kinds) == case["outcome"].startswith("fail")
        good += is_as_known
        print(f"{'ok  ' if is_as_known else 'MISS'} {case['id']}")
        for kind, text in found:
            print(f"       {kind}: {text}")
        if guess := prediction_of(case):
            predicted += 1
            within += guess.is_within
            print(
                f"       {'within' if guess.is_within else 'MISS  '} KV {guess.printed_kv_gib:.2f} "
                f"predicted {guess.kv_gib:.2f} (error {guess.kv_gib - guess.printed_kv_gib:+.2f}, "
                f"bar {guess.bar_gib:.2f}; weights computed {guess.kv_gib_from_shape:.2f}), "
                f"{guess.how}"
            )
    print(f"{good} of {len(cases)} starts as known; KV memory {within} of {predicted} in the bar")


if __name__ == "__main__":
    main()
