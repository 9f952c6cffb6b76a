"""What to try next: remedies, notes, the command line to type."""

from __future__ import annotations

import shlex
from typing import Any

from kvsim.memory.remedies import Remedy
from kvsim.plan.flags import AS_LONG_AS_FITS
from kvsim.plan.plan import Plan


def remedy_lines(found: list[Remedy]) -> list[str]:
    """A table of changes, each with the figures that it gives."""
    if not found:
        return ["  no single change of a flag helps"]
    head = "remedies, " + ("each alone:" if found[0].starts else "none alone is enough:")
    width = max(len(one.change) for one in found)
    return [
        f"  {head:<{width + 11}}  KV GiB    at once  costs",
        *(
            f"      {'starts' if one.starts else '':6} {one.change:<{width}}  {one.kv_gib:6.2f} "
            f"{one.requests_at_once:10,.2f}  {one.price}"
            for one in found
        ),
    ]


def notes(plan: Plan) -> list[str]:
    setup, reading = plan.setup, plan.reading
    found = [_legality(plan), *setup.notes]
    if reading.unmodelled:
        found.append(f"take memory, and are not modelled: {', '.join(reading.unmodelled)}")
    if reading.ignored:
        found.append(f"ignored, of no matter for memory: {', '.join(reading.ignored)}")
    return [f"  note: {note}" for note in found]


def _legality(plan: Plan) -> str:
    shape, tensor = plan.setup.shape, plan.setup.parallel.tensor
    attention = shape.layers[0].attention
    sizes = ", ".join(map(str, plan.legal_tensor))
    kv_heads = attention.kv_heads
    if attention.latent:
        kv = "latent KV whole on each GPU"
    else:
        kv = f"{kv_heads} KV heads"
        if kv_heads < attention.heads:
            kv += f", repeated past {kv_heads}"
    text = (
        f"tensor parallel may be {sizes}: {attention.heads} heads, {kv}, vocabulary {shape.vocab:,}"
    )
    if tensor > 1 and attention.latent:
        return (
            f"{text}; {tensor} GPUs hold the same KV {tensor} times, data parallel ones would not"
        )
    if tensor > kv_heads:
        return f"{text}; {tensor} GPUs hold the same KV {tensor // kv_heads} times"
    return text


def next_command(plan: Plan) -> list[str]:
    asked, given = plan.reading.asked, plan.reading.given
    if not plan.starts:
        best = next((one for one in plan.remedies if one.starts), None)
        change = {best.key: best.value} if best else {}
        if plan.smallest_tensor and not best:
            change = {"tensor_parallel_size": plan.smallest_tensor}
        return [f"  next: {_command(given | change)}"] if change else []
    if plan.flow is None:
        return [f"  next: {_command(given)} --input-len 1200 --output-len 300 --rate 6"]
    if asked.rate is None and asked.users is None:
        return [f"  next: {_command(given)} --rate 6"]
    return ["  next: start it; kvsim doctor server.log says how near this was"]


def _command(given: dict[str, Any]) -> str:
    """Keys and values as one line of flags."""
    words = ["kvsim", "plan"]
    given = {k: v for k, v in given.items() if k != "shape"}
    if model := given.pop("model", None):
        words.append(model)
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif value == AS_LONG_AS_FITS:
            words += [flag, "auto"]
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
            words += [flag, text]
    return shlex.join(words)
