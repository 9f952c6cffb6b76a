"""Measured rows from files: CSVs told apart by their columns, operator profiles, benchmark JSON."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvsim.errors import ConfigError, UserError
from kvsim.fit.kernels import KERNEL_COLUMNS, kernel_group
from kvsim.fit.observed import Group, Observed
from kvsim.fit.profiles import PROFILE_FILES, profile_steps
from kvsim.fit.serving import Clients
from kvsim.latency.catalog import plain
from kvsim.latency.demand import Load, Operators, operators
from kvsim.memory.catalog import find_model, model_names

WITHOUT_HEAD = ("composed-vidur",)  # sums of the layers only
# lengths of these runs are drawn from 0.8 to 1 of the nominal ones, as InferenceMAX does: assumed
SPREAD_LENGTHS, MEAN_LENGTH = "-2025-10", 0.9
MAX_TTFT_MS = 5000  # above, clients wait for memory, and TPOT is that of fewer
FP8 = ("fp8", "float8")

STEP = {"phase", "num_tokens", "batch", "context", "prefill_tokens", "n_prefill", "time_ms"}
BACKEND = {"num_prompt_tokens", "num_seqs", "context", "num_chunks", "num_pairs", "measured_ns"}
SERVING = {"isl", "osl", "concurrency", "tpot_ms"}
BENCHMARK = ("completed", "total_input_tokens", "total_output_tokens", "mean_tpot_ms")


class Given(NamedTuple):
    """What rows are about where they do not say it themselves."""

    gpu: str | None = None
    model: str | None = None
    tensor: int | None = None
    engine: str | None = None
    dtype: str | None = None


class _Row(NamedTuple):
    kind: str
    gpu: str
    engine: str
    dtype: str
    model: str
    tensor: int
    has_head: bool
    load: Load | Clients
    seconds: float
    phase: str


def read_observed(paths: Iterable[Path], given: Given) -> list[Observed]:
    """The rows of all files, grouped. UserError with file and line, or where nothing is left."""
    rows: list[_Row] = []
    found: list[Observed] = []
    for path in paths:
        try:
            if path.is_dir():
                rows += _of_profile(path, given)
            elif path.suffix == ".json":
                rows.append(_of_benchmark(path, given))
            else:
                more, kernels = _of_csv(path, given)
                rows += more
                found += kernels
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: is not UTF-8 text") from None
    found += _grouped(rows)
    if not found:
        raise UserError("nothing to fit: no rows with a time that counts")
    return found


def _grouped(rows: list[_Row]) -> list[Observed]:
    sets: dict[tuple, dict[tuple, list[_Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (row.kind, row.gpu, row.engine, row.dtype)
        sets[key][row.model, row.tensor, row.has_head].append(row)
    return [
        Observed(*key, tuple(_group(of, groups[of], key[3]) for of in sorted(groups)))
        for key, groups in sorted(sets.items())
    ]


def _group(of: tuple[str, int, bool], rows: list[_Row], dtype: str) -> Group:
    model, tensor, has_head = of
    ops = _operators(model, tensor, dtype, has_head)
    columns = (np.array(column, float) for column in zip(*(row.load for row in rows), strict=True))
    seconds = np.array([row.seconds for row in rows])
    load = type(rows[0].load)(*columns)
    return Group(model, tensor, ops, load, seconds, np.array([row.phase for row in rows]))


def _operators(model: str, tensor: int, dtype: str, has_head: bool) -> Operators:
    shape = find_model(model, "fp8" if dtype.startswith(FP8) else None)
    return operators(shape, tensor, has_head=has_head)


def _model_name(given: str) -> str:
    """The catalogue's name of a model, however it is spelled. Raises ConfigError."""
    by_plain = {plain(name): name for name in model_names()}
    return by_plain.get(plain(given.rpartition("/")[2]), given)


def _of_csv(path: Path, given: Given) -> tuple[list[_Row], list[Observed]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        kinds: list[tuple[set[str], Callable]] = [
            (STEP, _of_step),
            (BACKEND, _of_backend_step),
            (SERVING, _of_run),
            (KERNEL_COLUMNS, kernel_group),
        ]
        read = next((read for wanted, read in kinds if wanted <= columns), None)
        if read is None:
            raise UserError(
                f"{path}: no columns that kvsim fit knows: steps have {_said(STEP)}; serving runs "
                f"{_said(SERVING)}; kernels {_said(KERNEL_COLUMNS)}"
            )
        found = []
        for number, row in enumerate(reader, 2):
            try:
                found.append(read(row, given))
            except (ConfigError, ValueError, KeyError, TypeError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else error
                raise UserError(f"{path}, line {number}: {reason}") from None
    if read is kernel_group:
        return [], _kernel_sets(found)
    return [row for row in found if row is not None], []


def _kernel_sets(found: list[tuple[tuple, Group]]) -> list[Observed]:
    """Kernels of one GPU and kind together; those of one shape in one group."""
    sets: dict[tuple, dict[tuple, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for (gpu, what, dtype), group in found:
        sets[gpu, what, dtype][group.model, group.tensor].append(group)
    return [
        Observed("kernel", *key, tuple(_joined(groups[of]) for of in sorted(groups)))
        for key, groups in sorted(sets.items())
    ]


def _joined(groups: list[Group]) -> Group:
    load = Load(*(np.concatenate(column) for column in zip(*(g.load for g in groups), strict=True)))
    seconds = np.concatenate([group.seconds for group in groups])
    phases = np.concatenate([group.phases for group in groups])
    return groups[0]._replace(load=load, seconds=seconds, phases=phases)


def _said(columns: set[str]) -> str:
    return ", ".join(sorted(columns))


def _about(row: dict[str, str], given: Given) -> tuple[str, str, str, str, int]:
    """gpu, engine, dtype, model and tensor-parallel size, of the row or else as given."""
    gpu = row.get("gpu") or given.gpu
    model = row.get("model") or given.model
    if not gpu or not model:
        raise ValueError("the rows do not say gpu and model: give --gpu and --model")
    tensor = int(row.get("tp") or given.tensor or 1)
    if tensor < 1:
        raise ValueError(f"tp {tensor} is not a number of GPUs")
    engine = row.get("engine") or given.engine or row.get("source") or "engine"
    dtype = row.get("dtype") or given.dtype or "bf16"
    return gpu, engine, dtype, _model_name(model), tensor


def _number(row: dict[str, str], column: str) -> float:
    text = row.get(column) or "0"
    if not math.isfinite(value := float(text)) or value < 0:
        raise ValueError(f"{column} {text} is not a number from 0 on")
    return value


def _time(row: dict[str, str], column: str) -> float:
    if not (value := _number(row, column)) > 0:
        raise ValueError(f"{column} must be above 0")
    return value


def _of_step(row: dict[str, str], given: Given) -> _Row:
    gpu, engine, dtype, model, tensor = _about(row, given)
    batch, chunks = _number(row, "batch"), _number(row, "n_prefill")
    new, cached = _number(row, "prefill_tokens"), _number(row, "prefill_kv")
    each = max(chunks, 1)
    pairs = new * (cached / each + new / each / 2)  # prompts of one step taken to be alike
    load = Load(batch + new, batch, batch * _number(row, "context"), chunks, pairs)
    has_head = engine not in WITHOUT_HEAD
    kind = "step" if row.get("engine") or given.engine else "sum"
    seconds = _time(row, "time_ms") * 1e-3
    return _Row(kind, gpu, engine, dtype, model, tensor, has_head, load, seconds, row["phase"])


def _of_backend_step(row: dict[str, str], given: Given) -> _Row | None:
    """A step of the real backend's comparison (steps.csv)."""
    gpu, engine, dtype, model, tensor = _about(row, given)
    prompt, seqs = _number(row, "num_prompt_tokens"), _number(row, "num_seqs")
    chunks = _number(row, "num_chunks")
    if not seqs:
        return None  # it only moves blocks
    decodes = seqs - chunks
    load = Load(
        decodes + prompt, decodes, _number(row, "context"), chunks, _number(row, "num_pairs")
    )
    phase = "decode" if not chunks else "mixed" if decodes else "prefill"
    seconds = _time(row, "measured_ns") * 1e-9
    return _Row("step", gpu, engine, dtype, model, tensor, True, load, seconds, phase)


def _of_run(row: dict[str, str], given: Given) -> _Row | None:
    if _number(row, "ttft_ms") >= MAX_TTFT_MS:
        return None
    gpu, engine, dtype, model, tensor = _about(row, given)
    share = MEAN_LENGTH if engine.endswith(SPREAD_LENGTHS) else 1.0
    prompt, output = _time(row, "isl") * share, _time(row, "osl") * share
    clients = Clients(prompt, output, _time(row, "concurrency"))
    seconds = _time(row, "tpot_ms") * 1e-3
    return _Row("serving", gpu, engine, dtype, model, tensor, True, clients, seconds, "tpot")


def _of_benchmark(path: Path, given: Given) -> _Row:
    """A result of `vllm bench serve`. Concurrency where it was not bound: that of Little's law."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from None
    missing = [name for name in BENCHMARK if name not in result] if result else BENCHMARK
    if not isinstance(result, dict) or missing:
        raise UserError(f"{path}: not a benchmark result: it lacks {', '.join(missing)}")
    count = result["completed"]
    if not count:
        raise UserError(f"{path}: no request of this benchmark was completed")
    isl, osl = (result[f"total_{what}_tokens"] / count for what in ("input", "output"))
    concurrency = result.get("max_concurrency")
    if concurrency is None:
        waited_ms = result.get("mean_ttft_ms", 0) + (osl - 1) * result["mean_tpot_ms"]
        concurrency = max(count * waited_ms * 1e-3 / result["duration"], 1)
    row = {
        "model": given.model or result.get("model_id"),
        "isl": isl,
        "osl": osl,
        "concurrency": concurrency,
        "ttft_ms": result.get("mean_ttft_ms", 0),
        "tpot_ms": result["mean_tpot_ms"],
    }
    try:
        found = _of_run({name: str(value) for name, value in row.items()}, given)
    except (ConfigError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if found is None:
        raise UserError(f"{path}: mean TTFT is {MAX_TTFT_MS} ms or more: requests wait for memory")
    return found


def _of_profile(path: Path, given: Given) -> list[_Row]:
    """A folder GPU/MODEL of operator times, put together to steps."""
    if missing := [name for name in PROFILE_FILES if not (path / name).is_file()]:
        raise UserError(f"{path}: not an operator profile: it lacks {', '.join(missing)}")
    gpu, model = given.gpu or path.resolve().parent.name, given.model or path.resolve().name
    about = ("sum", gpu, given.engine or "operators", given.dtype or "bf16")
    name, tensor = _model_name(model), given.tensor or 1
    num_layers = len(find_model(name).layers)
    return [
        _Row(*about, name, tensor, True, load, seconds, phase)
        for load, seconds, phase in profile_steps(path, num_layers)
    ]
