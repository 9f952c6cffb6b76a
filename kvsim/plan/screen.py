"""The one screen of a plan."""

from __future__ import annotations

from kvsim.memory.budget import NO_BLOCKS, TOO_LONG, Budget, Term
from kvsim.memory.shape import ModelShape
from kvsim.plan.advice import next_command, notes, remedy_lines
from kvsim.plan.plan import Plan

MOST_REMEDIES = 6


def lines_of(plan: Plan) -> list[str]:
    return [
        *_head(plan),
        "",
        *_budget(plan),
        "",
        *_pool(plan),
        *_workload(plan),
        "",
        *_outcome(plan),
        *notes(plan),
        *next_command(plan),
    ]


def _head(plan: Plan) -> list[str]:
    setup = plan.setup
    split, shape = setup.parallel, setup.shape
    num_gpus = split.tensor * split.pipeline * split.data
    ways = [
        f"{name} {size}"
        for name, size in (("tp", split.tensor), ("pp", split.pipeline), ("dp", split.data))
        if size > 1
    ]
    gpus = f"{num_gpus} x {setup.gpu.name}" + (f" ({', '.join(ways)})" if ways else "")
    length = f"max_model_len {setup.limits.max_model_len:,}"
    parts = [f"{shape.name} {_form(shape)}", gpus, setup.engine_label, length]
    return ["kvsim plan  " + " · ".join(parts)]


def _form(shape: ModelShape) -> str:
    return shape.quantization.name if shape.quantization else shape.dtype


def _budget(plan: Plan) -> list[str]:
    out = plan.budget
    minus = [
        ("weights", out.weights),
        ("activation", out.activation),
        ("runtime", out.runtime),
        ("communication", out.communication),
        ("graphs", out.graphs),
        ("occupied", out.occupied),
    ]
    rows = [
        ("", "GPU memory", out.total),
        ("", "budget", out.usable),
        *(("-", name, term) for name, term in minus if term.gib),
        ("=", "KV", Term(out.kv.gib, _bar(plan))),
    ]
    unit = "GiB, each GPU" if plan.setup.parallel.pipeline == 1 else "GiB, the stage with least"
    lines = [f"  {sign:1} {term.gib:8.2f}  {name:<14} {term.how}" for sign, name, term in rows]
    return [f"  {unit}", *lines, *_beside(out)]


def _bar(plan: Plan) -> str:
    """The error is that of what was not given."""
    known = plan.setup.known
    given = [name for name in ("weights_gib", "activation_gib") if getattr(known, name) is not None]
    text = f"± {plan.budget.error_gib:.2f} (preset {plan.setup.engine.versions})"
    return f"{text}, less with what is given" if given else text


def _beside(out: Budget) -> list[str]:
    """What is not in the budget but takes memory all the same."""
    left = out.total.gib - out.usable.gib
    needs = []
    if out.outside_graphs.gib:
        needs.append(f"CUDA graphs {out.outside_graphs.gib:.2f}")
    if needs:
        return [f"    {left:8.2f}  outside it     for {', '.join(needs)} and other processes"]
    return []


def _pool(plan: Plan) -> list[str]:
    pool, limits = plan.budget.pool, plan.setup.limits
    layout, tensor = pool.layout, plan.setup.parallel.tensor
    override = plan.reading.asked.num_gpu_blocks_override
    first = layout.groups[0]
    is_plain = len(layout.groups) == 1 and first.window is None and not first.is_state
    at_once = (
        f"{plan.requests_at_once:,.2f} requests of {limits.max_model_len:,} tokens at once "
        f'(the "{plan.requests_at_once:.2f}x" of its log)'
    )
    lines = []
    if is_plain:
        size = first.block_size
        per_gpu = f" on each of {tensor} GPUs" if tensor > 1 else ""
        lines += [
            f"  KV  {layout.block_bytes // size:,} B/token{per_gpu} x {size} = "
            f"{layout.block_bytes:,} B/block",
            f"      {pool.num_blocks:,} blocks x {size} = {pool.num_blocks * size:,} tokens "
            f"-> {at_once}",
        ]
    else:
        kinds = [
            f"{'state' if g.is_state else 'full' if g.window is None else f'window {g.window:,}'}"
            for g in layout.groups
        ]
        counted = " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        lines += [
            f"  KV  {pool.num_blocks:,} blocks of {layout.block_bytes:,} B, shared by "
            f"{len(kinds)} groups of layers ({counted})",
            f"      -> {at_once}; the log's tokens: {pool.tokens(limits.max_model_len):,}",
        ]
    if override is not None:
        lines.append("      blocks: num_gpu_blocks_override, in the place of what memory is left")
    if plan.setup.parallel.data > 1:
        lines.append(f"      on each of {plan.setup.parallel.data} replicas")
    if not is_plain or plan.flow is None:
        lines += _table(plan)
    return lines


def _table(plan: Plan) -> list[str]:
    shown = [(f"{context:,}", f"{num:,.1f}") for context, num in plan.table]
    widths = [max(len(a), len(b)) for a, b in shown]
    contexts = "  ".join(a.rjust(w) for (a, _), w in zip(shown, widths, strict=True))
    at_once = "  ".join(b.rjust(w) for (_, b), w in zip(shown, widths, strict=True))
    return [f"      tokens of each    {contexts}", f"      requests at once  {at_once}"]


def _workload(plan: Plan) -> list[str]:
    if plan.flow is None:
        return []
    flow, room = plan.flow, plan.room
    lines = [
        "",
        f"  your workload: {flow.input_len:,} in / {flow.output_len:,} out -> "
        f"{room.mean_tokens:,.0f} tokens resident in the mean, {room.longest_tokens:,} at its end",
        f"      KV memory holds {room.by_mean:,.1f} in the mean, {room.by_longest:,.1f} if all are "
        f"at their end; max_num_seqs {room.max_num_seqs:,}",
    ]
    if flow.users:
        share = flow.users / room.by_mean if room.by_mean else float("inf")
        text = f"      {flow.users:,.4g} in flight: {share:.0%} of the KV memory"
        over = flow.users - room.at_once
        lines.append(text + (f", {over:,.0f} wait for {room.binds}" if over > 0 else ""))
    return [*lines, *_steady(plan)]


def _steady(plan: Plan) -> list[str]:
    """Means at the rate; without a step time, how long a request may take."""
    flow, load, room = plan.flow, plan.load, plan.room
    if not load.limits:
        lines = [f"      TTFT and TPOT: not known: {load.step_time}"]
        if flow.rate_per_s and room.at_once:
            lines.append(
                f"      {flow.rate_per_s:,.4g} req/s fit as long as a request takes under "
                f"{room.at_once / flow.rate_per_s:,.1f} s ({room.at_once:,.0f} / rate, Little)"
            )
        return lines
    if (state := load.state) is None:
        if flow.rate_per_s is None:
            return []
        over = f"{flow.rate_per_s:,.4g} req/s are over what {load.limits[0].name} bears"
        return [f"      {over}: requests wait ever longer"]
    return [
        f"      at {state.rate_per_s:,.3g} req/s in the mean: {state.running:,.1f} running · KV "
        f"{state.kv_share:.0%} · TTFT {state.ttft_s * 1e3:,.0f} ms · TPOT "
        f"{state.tpot_s * 1e3:,.1f} ms · E2EL {state.e2el_s:,.2f} s",
        f"      ({load.step_time}; percentiles: kvsim run)",
    ]


def _outcome(plan: Plan) -> list[str]:
    out = plan.budget
    if plan.starts:
        return [f"  binding limit: {_binding(plan)}"]
    lines = [f"  DOES NOT START: {out.outcome}"]
    pool, longest = out.pool, plan.setup.limits.max_model_len
    if out.outcome == NO_BLOCKS:
        lines.append(f"      KV memory is {out.kv.gib:.2f} GiB")
    if out.outcome == TOO_LONG:
        needed = pool.needed_bytes(longest) / 2**30
        lines.append(
            f"      one request of {longest:,} needs {needed:.2f} GiB of {out.kv.gib:.2f}: "
            f"{out.kv.gib - needed:.2f} GiB; the longest that fits is "
            f"{pool.estimated_max_len(longest):,}"
        )
    return [*lines, *_remedies(plan)]


def _binding(plan: Plan) -> str:
    room, seqs = plan.room, plan.budget.step.seqs
    if room is None:
        num = plan.requests_at_once
        if num < seqs:
            text = f"{num:,.1f} of max_model_len at once; max_num_seqs {seqs:,}"
            return f"KV memory: {text}"
        return f"max_num_seqs: {seqs:,} at once; KV memory holds {num:,.1f} of max_model_len"
    if plan.load.limits:
        return _rates(plan)
    figures = {"KV memory": room.by_mean, "max_num_seqs": room.max_num_seqs}
    other = next(name for name in figures if name != room.binds)
    text = (
        f"{room.binds} at {figures[room.binds]:,.0f} requests at once "
        f"({other} at {figures[other]:,.0f})"
    )
    users = plan.flow.users
    return f"none at {users:,.4g} in flight; next is {text}" if users and plan.fits else text


def _rates(plan: Plan) -> str:
    """The rates at which limits bind, of one replica, and of all where there are more."""
    at = [f"{limit.name} at {limit.rate_per_s:,.3g} req/s" for limit in plan.load.limits]
    replicas = plan.setup.parallel.data
    each = " (each replica)" if replicas > 1 else ""
    lowest = plan.load.limits[0].rate_per_s
    rate = plan.load.state.rate_per_s if plan.load.state else plan.flow.rate_per_s
    if rate and plan.fits and rate < lowest:
        return f"none at {rate:,.3g} req/s; " + ", then ".join(at) + each
    return ", then ".join(at) + each


def _remedies(plan: Plan) -> list[str]:
    found = plan.remedies[:MOST_REMEDIES]
    lines = remedy_lines(found)
    tensor = plan.smallest_tensor
    if tensor and not any(one.starts and one.key == "tensor_parallel_size" for one in found):
        lines.append(f"      fewest GPUs that start it unchanged: tensor_parallel_size {tensor}")
    return lines
