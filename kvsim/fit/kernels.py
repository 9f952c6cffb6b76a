"""Rows of single kernels as operators of their own."""

from __future__ import annotations

import numpy as np

from kvsim.fit.observed import Group
from kvsim.latency.demand import ACTIVATION_BYTES, AttentionCost, Gemm, Load, Operators

KERNEL_COLUMNS = {"gpu", "op", "dtype", "m", "n", "k", "batch", "context", "heads", "time_ms"}
BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def kernel_group(row: dict[str, str], given: object) -> tuple[tuple[str, str, str], Group]:
    """((gpu, kind, dtype), a group of this row alone); ValueError on an unknown op or dtype."""
    op, dtype = row["op"], row["dtype"]
    if dtype not in BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(BYTES)}")
    n = {name: float(row[name] or 0) for name in ("m", "n", "k", "batch", "context", "time_ms")}
    heads, kv_heads, dim = (float(row.get(c) or 0) for c in ("heads", "kv_heads", "head_dim"))
    gemms: tuple[Gemm, ...] = ()
    attention: tuple[AttentionCost, ...] = ()
    reduces, reduce_bytes, tensor = 0, 0.0, int(row.get("tp") or 1)
    none = (0.0, 0.0, 0.0, 0.0)
    if op == "gemm":
        gemms = (Gemm(1, n["n"], n["k"], BYTES[dtype]),)
        shape, load = f"{n['n']:g} x {n['k']:g}", Load(n["m"], *none)
        op = "gemm fp8" if dtype == "fp8" else "gemm bf16"
    elif op in ("attn_decode", "attn_prefill"):
        per_pair = 4 * heads * dim
        attention = (AttentionCost(1, 2 * kv_heads * dim * BYTES[dtype], per_pair, per_pair),)
        shape, batch, context = f"{heads:g}/{kv_heads:g} heads", n["batch"], n["context"]
        if op == "attn_decode":
            load = Load(batch, batch, batch * context, 0.0, 0.0)
        else:
            load = Load(batch * context, 0.0, 0.0, batch, batch * context**2 / 2)
    elif op == "all_reduce":
        shape, load = f"{tensor} GPUs", Load(float(row["elements"]), *none)
        reduces, reduce_bytes = 1, 2 * (tensor - 1) / tensor * ACTIVATION_BYTES
    else:
        raise ValueError(f"op {op!r} is not one of gemm, attn_decode, attn_prefill, all_reduce")
    if not n["time_ms"] > 0:
        raise ValueError("time_ms must be above 0")
    ops = Operators(1, gemms, attention, reduces, reduce_bytes, has_8_bit_kv=False)
    arrays = Load(*(np.array([value]) for value in load))
    seconds = np.array([n["time_ms"] * 1e-3])
    return (row["gpu"], op, dtype), Group(shape, tensor, ops, arrays, seconds, np.array([op]))
