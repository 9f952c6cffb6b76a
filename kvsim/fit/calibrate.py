"""Constants of one set of rows, and how well they hold on rows that had no part in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvsim.fit.observed import Group, Observed
from kvsim.fit.solve import Unknown, solve
from kvsim.latency.catalog import find_device, find_kernels, with_constants
from kvsim.latency.roofline import Device, EngineCosts, Kernels, Machine

NUM_FOLDS = 3
TYPICAL = Kernels(
    gemm_compute=0.75,
    gemm_memory=0.8,
    attention_memory=0.85,
    attention_compute=0.45,
    layer_us=30,
    prefill_layer_us=15,
    seq_layer_ns=100,
)
KERNEL_UNKNOWNS = {
    "gemm_compute": Unknown(0.75, 0.2, 1),
    "gemm_memory": Unknown(0.8, 0.3, 1),
    "attention_memory": Unknown(0.85, 0.2, 1),
    "attention_compute": Unknown(0.45, 0.1, 1),
    "layer_us": Unknown(30, 0.5, 300),
    "prefill_layer_us": Unknown(15, 0.1, 500),
    "seq_layer_ns": Unknown(100, 1, 3000),
    "reduce_us": Unknown(5, 0.5, 60),
    "link_share": Unknown(0.6, 0.05, 1),
    "mixed_context": Unknown(1.05, 1, 4),
    "mixed_query_ns": Unknown(0.02, 1e-4, 10),
    "fp8_compute": Unknown(0.5, 0.1, 1),
    "fp8_memory": Unknown(0.8, 0.3, 1),
}
STEP = {"step_ms": Unknown(0.3, 0.01, 30)}
ENGINE_UNKNOWNS = {
    "slowdown": Unknown(1, 0.6, 1.6, spread=0.2),
    "step_ms": Unknown(1.3, 0.01, 30),
    "seq_us": Unknown(40, 0.5, 500),
    "prompt_layer_us": Unknown(40, 0.1, 400),
}
# starts where it binds: a floor that does not has no derivative
LAUNCHES = {"cpu_layer_us": Unknown(300, 1, 2000)}
OF_KERNEL = {
    "gemm bf16": ("gemm_compute", "gemm_memory", "layer_us"),
    "gemm fp8": ("fp8_compute", "fp8_memory", "layer_us"),
    "attn_decode": ("attention_memory", "layer_us", "seq_layer_ns"),
    "attn_prefill": ("attention_compute", "layer_us"),
    "all_reduce": ("reduce_us", "link_share"),
}


class Calibration(NamedTuple):
    """`constants`: the fitted ones. `errors`: of the rows fitted, |predicted / measured - 1|."""

    observed: Observed
    unknowns: dict[str, Unknown]
    constants: dict[str, float]
    errors: np.ndarray


class HeldOut(NamedTuple):
    """Errors of rows that the constants do not know: `same` with other rows of their (model, TP)
    known; `unseen` with none of them (None with one group)."""

    same: np.ndarray
    unseen: np.ndarray | None


def calibrate(observed: Observed, *, keep_kernels: bool = False) -> Calibration:
    """Steps give the kernels' constants and the cost of a step, or with keep_kernels the engine's
    over the catalogue's kernels; serving runs always the engine's; kernels those of their kind.
    Raises ConfigError where the catalogue lacks the GPU or its kernels."""
    unknowns = _unknowns(observed, keep_kernels)
    start = _start(observed, keep_kernels)
    device, measured = find_device(observed.gpu), _seconds(observed)

    def predicted(values: np.ndarray) -> np.ndarray:
        named = dict(zip(unknowns, values.tolist(), strict=True))
        return _predicted(observed.groups, device, start, named)

    unknowns = _told(predicted, unknowns)
    values = solve(predicted, measured, list(unknowns.values()), _weights(observed))
    constants = dict(zip(unknowns, values.tolist(), strict=True))
    return Calibration(observed, unknowns, constants, np.abs(predicted(values) / measured - 1))


def errors_on(calibration: Calibration, other: Observed, *, keep_kernels: bool) -> np.ndarray:
    """Errors of the calibration's constants on other rows of its kind."""
    device, start = find_device(other.gpu), _start(other, keep_kernels)
    guess = _predicted(other.groups, device, start, calibration.constants)
    return np.abs(guess / _seconds(other) - 1)


def held_out(observed: Observed, *, keep_kernels: bool = False) -> HeldOut:
    """Each row predicted by constants fitted without it: without a third of all rows, drawn, and
    without its whole (model, TP)."""
    num_rows = observed.num_rows
    fold = np.random.default_rng(0).integers(0, NUM_FOLDS, num_rows)
    same = np.full(num_rows, np.nan)
    for one in range(NUM_FOLDS):
        if (fold == one).any() and (fold != one).any():
            known = calibrate(observed.where(fold != one), keep_kernels=keep_kernels)
            rest = observed.where(fold == one)
            same[fold == one] = errors_on(known, rest, keep_kernels=keep_kernels)
    if len(observed.groups) == 1:
        return HeldOut(same, None)
    unseen = []
    for left in observed.groups:
        others = tuple(group for group in observed.groups if group is not left)
        known = calibrate(observed._replace(groups=others), keep_kernels=keep_kernels)
        rest = observed._replace(groups=(left,))
        unseen.append(errors_on(known, rest, keep_kernels=keep_kernels))
    return HeldOut(same, np.concatenate(unseen))


def at_bounds(calibration: Calibration) -> list[str]:
    """Constants that would be smaller or larger still: not to be trusted one by one."""
    return [
        name
        for name, unknown in calibration.unknowns.items()
        if np.isclose(calibration.constants[name], (unknown.low, unknown.high), rtol=1e-6).any()
    ]


def _unknowns(observed: Observed, keep_kernels: bool) -> dict[str, Unknown]:
    if observed.kind == "kernel":
        known = {**KERNEL_UNKNOWNS, "layer_us": Unknown(5, 0.05, 100)}
        return {name: known[name] for name in OF_KERNEL[observed.engine]}
    if observed.kind == "serving":
        return ENGINE_UNKNOWNS
    if keep_kernels:
        return {**ENGINE_UNKNOWNS, **LAUNCHES}
    return KERNEL_UNKNOWNS if observed.kind == "sum" else {**KERNEL_UNKNOWNS, **STEP}


def _start(observed: Observed, keep_kernels: bool) -> tuple[Kernels, EngineCosts]:
    """What the fitted constants are put in the place of."""
    if observed.kind == "kernel":  # alone, it has its own fixed cost and no other
        alone = {"layer_us": 0.0, "prefill_layer_us": 0.0, "seq_layer_ns": 0.0}
        return replace(TYPICAL, **alone), EngineCosts()
    if observed.kind == "serving" or keep_kernels:
        return find_kernels(observed.gpu), EngineCosts()
    return TYPICAL, EngineCosts()


def _told(
    predicted: Callable[[np.ndarray], np.ndarray], unknowns: dict[str, Unknown]
) -> dict[str, Unknown]:
    """The unknowns that some row depends on."""
    start = np.array([unknown.start for unknown in unknowns.values()])
    base, kept = predicted(start), {}
    for place, (name, unknown) in enumerate(unknowns.items()):
        moved = start.copy()
        moved[place] = min(unknown.start * 1.1, unknown.high)
        if (np.abs(predicted(moved) / base - 1) > 1e-9).any():
            kept[name] = unknown
    return kept


def _predicted(
    groups: tuple[Group, ...],
    device: Device,
    start: tuple[Kernels, EngineCosts],
    constants: dict[str, float],
) -> np.ndarray:
    kernels, engine = with_constants(*start, constants)
    machines = (Machine(group.ops, device, kernels, engine) for group in groups)
    pairs = zip(groups, machines, strict=True)
    return np.concatenate([group.predicted_s(machine) for group, machine in pairs])


def _weights(observed: Observed) -> np.ndarray:
    """Of rows, 1 in the mean: a phase counts as the root of its rows, since grids of mixed steps
    are large and say little about how often such steps are run."""
    phases = np.concatenate([group.phases for group in observed.groups])
    _, place, counts = np.unique(phases, return_inverse=True, return_counts=True)
    weights = 1 / np.sqrt(counts[place])
    return weights / weights.mean()


def _seconds(observed: Observed) -> np.ndarray:
    return np.concatenate([group.seconds for group in observed.groups])
