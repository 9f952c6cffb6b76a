"""Tables for the screen: one run as a block, many side by side."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from kvsim.study.definitions import SLOT_KINDS
from kvsim.study.results import Point

KIND_TITLES = {
    "token": "tokens",
    "reserved": "reserved",
    "internal": "internal",
    "external": "external",
    "cached": "cached",
    "free": "free",
}


def print_points(points: list[Point]) -> None:
    """Where memory goes and what follows, a row each point."""
    console = Console(width=_width(), highlight=False, markup=False)
    keys = list(points[0].at)
    names = [key.rsplit(".", 1)[-1] for key in keys]
    memory = _table("Where the KV memory goes (mean % of the pool)", names)
    for kind in SLOT_KINDS:
        memory.add_column(KIND_TITLES[kind], justify="right")
    memory.add_column("saved by\nsharing", justify="right")
    memory.add_column("batch", justify="right")
    memory.add_column("pre-\nempted", justify="right")
    memory.add_column("hit\ntokens", justify="right")
    memory.add_column("bound by", justify="left")
    has_slo = any(point.summary["slo_share"] is not None for point in points)
    slo = ("goodput\nreq/s", "meet SLO\n%") if has_slo else ()
    speed = _table("What follows", names)
    for title in (
        "done", "refused", "req/s", "out tok/s", "norm. latency\ns/token", "TTFT ms\np50",
        "TTFT ms\np99", "TPOT ms\nmean", "TPOT ms\np99", "E2EL s\nmean", *slo,
    ):  # fmt: skip
        speed.add_column(title, justify="right")
    last = None
    for point in points:
        s = point.summary
        if last not in (None, point.variant) and keys:
            memory.add_section()
            speed.add_section()
        last = point.variant
        label = [point.variant or s["policy"], *(_value(point.at[key]) for key in keys)]
        memory.add_row(
            *label,
            *(_percent(s["waste"][kind]) for kind in SLOT_KINDS),
            _percent(s["sharing_saving"]),
            _number(s["batch_size_mean"], 1),
            _number(s["preemptions"], 0),
            _number(s["hit_tokens"], 0),
            _bound(s),
        )
        speed.add_row(
            *label,
            _number(s["completed"], 0),
            _number(s["failed"], 0),
            _number(s["request_throughput"], 2),
            _number(s["output_throughput"], 0),
            _number(s["normalized_latency_s"], 3),
            _number(s["median_ttft_ms"], 0),
            _number(s["p99_ttft_ms"], 0),
            _number(s["mean_tpot_ms"], 1),
            _number(s["p99_tpot_ms"], 1),
            _number(_scaled(s["mean_e2el_ms"], 1e-3), 1),
            *((_number(s["request_goodput"], 2), _percent(s["slo_share"])) if has_slo else ()),
        )
    console.print(memory)
    console.print(speed)
    _print_warnings(console, points)


def print_summary(summary: dict) -> None:
    """One run, in the order and with the words of `vllm bench serve`, then its memory."""
    console = Console(width=_width(), highlight=False, markup=False)
    s = summary
    block = Table(box=box.SIMPLE_HEAD, title=_title(s), title_justify="left", title_style="bold")
    block.add_column("figure")
    block.add_column("value", justify="right")
    for name, value in (
        ("Successful requests", _number(s["completed"], 0)),
        ("Refused / unfinished requests", f"{s['failed']:,} / {s['unfinished']:,}"),
        ("Duration (s)", _number(s["duration"], 2)),
        ("Total input tokens", _number(s["total_input_tokens"], 0)),
        ("Total output tokens", _number(s["total_output_tokens"], 0)),
        ("Request throughput (req/s)", _number(s["request_throughput"], 2)),
        ("Output throughput (tok/s)", _number(s["output_throughput"], 1)),
        ("Total token throughput (tok/s)", _number(s["total_token_throughput"], 1)),
        ("Normalized latency (s/token)", _number(s["normalized_latency_s"], 4)),
    ):
        block.add_row(name, value)
    if s["slo_share"] is not None:
        block.add_row("Goodput (req/s)", _number(s["request_goodput"], 2))
        block.add_row("Requests that meet the SLO (%)", _percent(s["slo_share"]))
    console.print(block)
    times = Table(box=box.SIMPLE_HEAD)
    times.add_column("ms")
    marks = ("mean", "median", "std", "p90", "p95", "p99")
    for mark in marks:
        times.add_column(mark, justify="right")
    for name in ("ttft", "tpot", "itl", "e2el"):
        times.add_row(name.upper(), *(_number(s[f"{mark}_{name}_ms"], 1) for mark in marks))
    console.print(times)
    waste = ", ".join(f"{KIND_TITLES[kind]} {_percent(s['waste'][kind])}" for kind in SLOT_KINDS)
    slots = s["num_blocks"] * s["block_size"]
    each = f" in each of {s['num_replicas']} replicas" if s["num_replicas"] > 1 else ""
    pool = f"KV pool {s['num_blocks']:,} x {s['block_size']} = {slots:,} tokens{each}"
    console.print(f"{pool}: {waste} %")
    if s["sharing_saving"]:
        console.print(
            f"Sharing saves {_percent(s['sharing_saving'])} % of the token slots; "
            f"{s['blocks_shared_at_forks']:,} blocks shared at forks, {s['copies_made']:,} copied"
        )
    blocks = ", ".join(
        f"{name.replace('_', ' ')} {_percent(s['kv_blocks'][name])}"
        for name in ("referenced", "cached", "free_again", "never_used")
    )
    console.print(f"KV blocks: {blocks} % (means); most referenced {_percent(s['kv_used_peak'])} %")
    console.print(
        f"Batch mean {_number(s['batch_size_mean'], 1)}, peak {s['batch_size_peak']}; waiting mean "
        f"{_number(s['num_waiting_mean'], 1)}, peak {s['num_waiting_peak']}"
    )
    console.print(_preempted(s), soft_wrap=True)
    if s["shortest_hit_tokens"] is not None:
        console.print(
            f"Prefix hits: {s['hit_tokens']:,} tokens ({_percent(s['hit_share'])} % of prompts); a "
            f"shared prefix of fewer than {s['shortest_hit_tokens']} tokens cannot hit"
        )
    shares = ", ".join(
        f"{name} {_percent(share)}" for name, share in s["limit_shares"].items() if share
    )
    if shares:
        console.print(f"Bound by: {shares} % of the time")
    _print_warnings(console, [Point("", {}, None, s)])


def _preempted(s: dict) -> str:
    """What preemption cost."""
    line = (
        f"Preemptions: {s['preemptions']:,} of {s['preempted_requests']:,} requests; recomputed "
        f"{s['recomputed_tokens']:,} tokens, {_percent(s['recomputed_share'])} % of all computed"
    )
    if (worst := s["worst_preempted"]) is not None:
        line += (
            f"; worst request {worst['request_id']}: {worst['preemptions']} times, "
            f"{worst['recomputed_tokens']:,} tokens"
        )
    moved = s["swapped_out_blocks"] + s["swapped_in_blocks"]
    if moved:
        size = s["swapped_bytes"]
        gib = "" if size is None else f" ({size / 2**30:,.1f} GiB)"
        line += f"; {moved:,} blocks swapped out and in{gib}"
    return line


def _print_warnings(console: Console, points: list[Point]) -> None:
    """What a reader of the tables must know; said once, and of whom if not of all."""
    said: dict[str, list[str]] = {}
    for point in points:
        for line in _warnings(point.summary):
            said.setdefault(line, []).append(point.variant or point.summary["policy"])
    for line, variants in said.items():
        names = list(dict.fromkeys(variants))
        whose = f"{', '.join(names)}: " if len(variants) < len(points) else ""
        console.print(f"note: {whose}{line}", soft_wrap=True)


def _warnings(s: dict) -> list[str]:
    reasons = [
        f"{count:,} requests refused, {REFUSED[why]}"
        for why, count in s["refused"].items()
        if count
    ]
    if s["unfinished"]:
        reasons.append(f"{s['unfinished']:,} requests were unfinished when it stopped")
    if s["not_arrived"]:
        reasons.append(f"{s['not_arrived']:,} requests had not arrived when it stopped")
    if s["ended_by_length"]:
        reasons.append(f"{s['ended_by_length']:,} requests reached their limit, and end there")
    if not s["completed"]:
        reasons.append("no request finished in the window: there is nothing to say of latency")
    return reasons + [f"workload: {note}" for note in s["notes"]]


REFUSED = {
    "too_long": "longer than max_model_len",
    "never_fits": "too large for the pool (under full_prompt+max_output with all of max_tokens) or"
    " with more answers than max_num_seqs",
    "no_tokens": "without a prompt or an answer (failed requests of a trace)",
}


def _table(title: str, keys: list[str]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("policy", no_wrap=True)
    for key in keys:
        table.add_column(key, justify="right")
    return table


def _title(s: dict) -> str:
    return f"{s['model_id']}, {s['policy']}, {s['num_prompts']:,} requests, seed {s['seed']}"


def _width() -> int | None:
    """The terminal's own, where it is one; wide enough for any table elsewhere."""
    import sys

    return None if sys.stdout.isatty() else 160


def _bound(s: dict) -> str:
    limit = s["binding_limit"]
    return "-" if limit is None else f"{limit} {_percent(s['limit_shares'][limit])}%"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
