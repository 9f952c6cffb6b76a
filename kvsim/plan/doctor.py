"""A start-up log's figures beside the arithmetic, what disagrees, and what would help."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.memory.activation import implied_seqs
from kvsim.memory.budget import Budget, Known, budget
from kvsim.memory.catalog import Gpu, find_engine
from kvsim.memory.kv import GIB, Limits, Pool
from kvsim.memory.printed import FAILS, Finding, Printed, findings, read
from kvsim.memory.remedies import Remedy, remedies
from kvsim.memory.start_log import StartLog
from kvsim.memory.weights import Parallel
from kvsim.plan.flags import AS_LONG_AS_FITS, Asked
from kvsim.plan.reading import Reading
from kvsim.plan.resolve import KV_DTYPES, engine_of, gpu_of, model_of

PARTS = ("weights", "activation", "runtime")
FAR_GIB = 1.0  # an activation this far over the preset's is that of more sequences
OLDEST_V1, V0 = "vllm-0.8", "vllm-0.1"
UNKNOWN_GPU = Gpu("an unnamed GPU", 80.0)
BLOCK_SIZE = 16  # vLLM's, where neither log nor flags say another
SHORT = 2048  # where neither log nor model says how long a request may be


class Row(NamedTuple):
    what: str
    printed: str
    computed: str
    says: str


class Diagnosis(NamedTuple):
    """rows: each printed figure; of what binds: `binds`. constants: learnt, as a plan's keys.
    why_no_model: None where the model's shape is known."""

    label: str
    rows: list[Row]
    findings: list[Finding]
    binds: str | None
    remedies: list[Remedy]
    constants: dict[str, Any]
    why_no_model: str | None

    @property
    def fails(self) -> bool:
        return any(finding.kind == FAILS for finding in self.findings)


class _Case(NamedTuple):
    printed: Printed
    out: Budget
    given: tuple
    knows_total: bool


def keys_of(log: StartLog) -> dict[str, Any]:
    """What a log says of how its server was started, as a plan's keys."""
    p = log.printed
    found = {
        "model": log.model,
        "engine": log.engine_version and f"vllm@{log.engine_version}",
        "dtype": log.dtype,
        "quantization": log.quantization,
        "kv_cache_dtype": log.kv_dtype,
        "tensor_parallel_size": log.tensor,
        "pipeline_parallel_size": log.pipeline,
        "block_size": log.block_size,
        "enforce_eager": log.enforce_eager,
        "max_model_len": p.max_model_len,
        "gpu_memory_utilization": p.gpu_memory_utilization,
        "gpu_memory_gib": None if p.total_gib is None else float(p.total_gib),
    }
    return {key: value for key, value in found.items() if value is not None}


def diagnose(log: StartLog, reading: Reading) -> Diagnosis:
    """Raises ConfigError on flags that no engine takes; a model that is not known is said."""
    asked = reading.asked
    printed = log.printed._replace(
        max_model_len=log.printed.max_model_len or _given_length(asked),
        gpu_memory_utilization=asked.gpu_memory_utilization,
        total_gib=log.printed.total_gib or asked.gpu_memory_gib,
    )
    try:
        shape, why = model_of(asked), None
    except ConfigError as error:
        shape, why = None, "; ".join(error.faults)
    label = f"{asked.model or 'a model that is not named'} · {asked.engine or 'version not said'}"
    size = asked.block_size or BLOCK_SIZE
    if shape is None:
        return Diagnosis(label, _ratios(printed, size), findings(printed), None, [], {}, why)
    has_gpu = asked.gpu is not None or asked.gpu_memory_gib is not None
    gpu = gpu_of(asked) if has_gpu else UNKNOWN_GPU
    if asked.engine:
        engine = find_engine(engine_of(asked.engine)[0])
    else:
        engine = find_engine(V0 if printed.activation_gib and printed.num_blocks else OLDEST_V1)
    longest = printed.max_model_len or shape.max_position or SHORT
    limits = Limits(
        longest,
        gpu_memory_utilization=asked.gpu_memory_utilization or 0.9,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_num_seqs=asked.max_num_seqs,
        kv_dtype=KV_DTYPES.get(asked.kv_cache_dtype, "auto"),
        enforce_eager=asked.enforce_eager,
        block_size=asked.block_size,
    )
    parallel = Parallel(
        asked.tensor_parallel_size, asked.pipeline_parallel_size, asked.data_parallel_size
    )
    known = Known(*(_float(getattr(printed, f"{name}_gib")) for name in PARTS), asked.free_gib)
    given = (shape, gpu, parallel, engine, limits)
    out = budget(*given)
    size = out.pool.layout.groups[0].block_size
    case = _Case(printed, out, given, has_gpu)
    found = findings(
        printed,
        out.pool.layout,
        step_tokens=out.step.tokens,
        num_ranks=parallel.tensor * parallel.pipeline,
        printed_tokens=engine.printed_tokens if asked.engine else None,
    )
    fails = any(finding.kind == FAILS for finding in found)
    return Diagnosis(
        label=f"{label} · {gpu.name} · preset {engine.versions}",
        rows=[*_parts(case), *_pool(case), *_ratios(printed, size)],
        findings=found,
        binds=_binds(case),
        remedies=remedies(*given, _as_printed(case, known)) if fails and has_gpu else [],
        constants=_constants(case) if has_gpu else {},
        why_no_model=None,
    )


def _as_printed(case: _Case, known: Known) -> Known:
    """What the printed KV memory lacks of the predicted goes to the runtime, so that remedies
    start from the log."""
    if case.printed.kv_gib is None:
        return known
    out = budget(*case.given, known)
    lacking = out.kv.gib - float(case.printed.kv_gib)
    return known._replace(runtime_gib=out.runtime.gib + out.communication.gib + lacking)


def _given_length(asked: Asked) -> int | None:
    return None if asked.max_model_len == AS_LONG_AS_FITS else asked.max_model_len


def _float(text: float | str | None) -> float | None:
    return None if text is None else float(text)


def _parts(case: _Case) -> list[Row]:
    """Terms by the shape and the preset; KV memory by the printed terms and by the preset."""
    p, out, rows = case.printed, case.out, []
    for name in PARTS:
        shown, term = getattr(p, f"{name}_gib"), getattr(out, name)
        if shown is not None:
            off = float(shown) - term.gib
            if name == "activation" and off > FAR_GIB:
                shape, _, _, engine, _ = case.given
                seqs = implied_seqs(shape, engine, out.step, float(shown))
                term = term._replace(how=f"it is the sampler's of max_num_seqs {seqs:,}")
            rows.append(
                Row(f"{name} GiB", str(shown), f"{term.gib:.2f}", f"{off:+.2f}: {term.how}")
            )
    if p.kv_gib is None or not case.knows_total:
        return rows
    kv, parts = float(p.kv_gib), [_float(getattr(p, f"{name}_gib")) for name in PARTS]
    if None not in parts:
        left = out.usable.gib - sum(parts)
        text = f"{out.usable.gib:.2f} less what is printed: {_near(kv, left, 0.03)}"
        rows.append(Row("KV GiB", str(p.kv_gib), f"{left:.2f}", text))
    guess = budget(*case.given, Known(weights_gib=parts[0]))
    text = f"{kv - guess.kv.gib:+.2f}: by preset, ± {guess.error_gib:.2f}"
    rows.append(Row("KV GiB", str(p.kv_gib), f"{guess.kv.gib:.2f}", text))
    return rows


def _near(shown: float, computed: float, within: float) -> str:
    off = shown - computed
    return "agrees" if abs(off) <= within else f"{off:+.2f} GiB"


def _pool(case: _Case) -> list[Row]:
    """What the printed KV memory holds, all that prints as it."""
    p, pool, rows = case.printed, case.out.pool, []
    ends = None
    if p.kv_gib is not None:
        ends = [pool._replace(kv_bytes=int(gib * GIB)) for gib in read(p.kv_gib)]
    how = f"{p.kv_gib} GiB / {pool.layout.block_bytes:,} B a block"
    longest = p.max_model_len or SHORT
    if ends and p.num_blocks is not None:
        rows.append(_range("blocks", p.num_blocks, [end.num_blocks for end in ends], how))
    if ends and p.tokens is not None:
        rows.append(_range("tokens", p.tokens, [end.tokens(longest) for end in ends], how))
    if ends and p.estimated_max_len is not None:
        lengths = [end.estimated_max_len(longest) for end in ends]
        rows.append(_range("longest request", p.estimated_max_len, lengths, how))
    if p.needed_gib is not None and p.max_model_len:
        needed = pool.needed_bytes(longest) / GIB
        agrees = read(p.needed_gib).meets(needed, needed)
        text = f"{'agrees' if agrees else 'differs'}: one request of {longest:,} tokens"
        rows.append(Row("needed GiB", str(p.needed_gib), f"{needed:.2f}", text))
    return rows


def _range(what: str, shown: int, ends: list[int], how: str) -> Row:
    low, high = ends
    text = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    if low <= shown <= high:
        return Row(what, f"{shown:,}", text, f"agrees: {how}")
    share = 2 * shown / (low + high) - 1 if low + high else 1.0
    return Row(what, f"{shown:,}", text, f"{share:+.1%}: {how}")


def _ratios(p: Printed, size: int) -> list[Row]:
    """Tokens of the printed blocks, and requests at once of the printed tokens."""
    tokens, rows = p.tokens, []
    if p.num_blocks:
        rows.append(
            Row("blocks", f"{p.num_blocks:,}", "", f"x {size} = {p.num_blocks * size:,} tokens")
        )
        tokens = tokens or p.num_blocks * size
    if not tokens or p.concurrency is None or not p.max_model_len:
        return rows
    ratio = tokens / p.max_model_len
    text = f"requests of {p.max_model_len:,} tokens at once, of {tokens:,}: a count, no speed-up"
    return [*rows, Row("concurrency", f"{p.concurrency}x", f"{ratio:.2f}", text)]


def _binds(case: _Case) -> str | None:
    p, pool, seqs = case.printed, case.out.pool, case.out.step.seqs
    blocks = p.num_blocks
    if p.kv_gib is not None:
        blocks = pool._replace(kv_bytes=int(float(p.kv_gib) * GIB)).num_blocks
    if not blocks or not p.max_model_len:
        return None
    holds = blocks / Pool(pool.layout, 0, pool.step_tokens).layout.blocks_of(
        p.max_model_len, pool.step_tokens
    )
    which = "KV memory" if holds < seqs else "max_num_seqs"
    return f"{which}: {holds:,.1f} requests of {p.max_model_len:,} at once; max_num_seqs {seqs:,}"


def _constants(case: _Case) -> dict[str, float]:
    """The printed terms; activation not printed is what the others leave of the budget."""
    p, out = case.printed, case.out
    found = {f"{name}_gib": _float(getattr(p, f"{name}_gib")) for name in PARTS}
    found = {key: value for key, value in found.items() if value is not None}
    if "activation_gib" not in found and p.kv_gib is not None and "weights_gib" in found:
        runtime = found.get("runtime_gib", out.runtime.gib + out.communication.gib)
        rest = out.usable.gib - found["weights_gib"] - runtime - out.graphs.gib - float(p.kv_gib)
        if rest > 0:
            found["activation_gib"] = round(rest, 3)
    return found
