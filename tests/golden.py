"""Replays a golden vLLM V1 run through kvsim's scheduler, one step at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from kvsim.engine.batching import CONTINUOUS
from kvsim.engine.kv.paged import Paged
from kvsim.engine.request import Request, Sequence, Span, answer_stream, merged
from kvsim.engine.scheduler import Scheduler
from kvsim.latency.model import Linear
from kvsim.sim.executor import SimulatedExecutor

NO_TIME = Linear(base_ms=1, per_seq_ms=0, per_context_token_us=0, per_prompt_token_ms=0)


def golden_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def replayed_rows(folder: Path) -> Iterator[dict]:
    """kvsim's columns for each golden step, under the golden names."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    with (folder / "trace.csv").open() as file:
        rows = list(csv.DictReader(file))
    ids = [row["request_id"] for row in rows]
    # vLLM keeps block 0 for itself, and takes its watermark of all blocks
    usable = config["num_gpu_blocks"] - 1
    kv = Paged(
        usable,
        config["block_size"],
        prefix_caching=config.get("enable_prefix_caching", False),
        watermark=config.get("watermark", 0.0) * config["num_gpu_blocks"] / usable,
    )
    scheduler = Scheduler(
        kv,
        CONTINUOUS,
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        chunked_prefill=True,
    )
    lengths = [int(row["output_tokens"]) for row in rows]
    executor = SimulatedExecutor(NO_TIME, lengths)
    queue = [(_arrival(row), index, _request(index, row, ids)) for index, row in enumerate(rows)]
    queue.sort(key=lambda entry: entry[:2])
    clock, step = 0.0, 0
    for expected in golden_rows(folder):
        step = expected["step"]
        now = expected.get("t", step)
        arrived = []
        while queue and queue[0][0] <= now:
            request = queue.pop(0)[2]
            arrived.append(ids[request.index])
            scheduler.submit(Sequence(request, num_tokens=request.prompt_tokens))
        row, clock = _one_step(scheduler, executor, ids), clock
        row |= {"step": step}
        if arrived:
            row["arr"] = arrived
        yield row


def _one_step(scheduler: Scheduler, executor: SimulatedExecutor, ids: list[str]) -> dict:
    kv = scheduler.kv
    evicted = kv._pool.num_evicted
    resumed = {id(seq) for seq in scheduler.waiting if seq.num_preemptions}
    plan = scheduler.plan()

    def name(seq: Sequence) -> str:
        return ids[seq.request.index]

    standing = plan.decodes.members()
    work = sorted(plan.work, key=lambda w: w.seq.order)
    entries = [w for w in work if not w.is_decode or w.seq in plan.admitted]
    decodes = sorted(
        standing + [w.seq for w in work if w not in entries], key=lambda seq: seq.order
    )
    row: dict = {
        "pre": [[name(w.seq), w.num_new] for w in entries],
        "dec": [name(seq) for seq in decodes],
        "run": len(scheduler.running),
        "wait": len(scheduler.waiting),
        "used": kv.num_blocks - kv._pool.num_free,
        "free": kv._pool.num_free,
        "tok": scheduler.num_computed_tokens + len(standing) + sum(w.num_new for w in work),
    }
    if plan.admitted:
        row["adm"] = [
            [name(s), s.num_computed, "resumed" if id(s) in resumed else "new"]
            for s in plan.admitted
        ]
    if plan.preempted:
        row["prm"] = [name(seq) for seq in plan.preempted]
    if kv._index is not None:
        row["evict"] = kv._pool.num_evicted - evicted
    row["tables"] = {name(s): [b + 1 for b in s.blocks] for s in scheduler.running.values()}
    result = executor.execute(plan, 1)
    done = scheduler.commit(plan, 1, result.finished)
    if done.ended:
        row["fin"] = [name(seq) for seq in done.ended]
    row["free_end"] = kv._pool.num_free
    return row


def _arrival(row: dict) -> float:
    return float(row["arrival_step"] if "arrival_step" in row else row["arrival_time"])


def _request(index: int, row: dict, ids: list[str]) -> Request:
    spans = []
    for segment in filter(None, (row.get("segments") or "").split(";")):
        label, length = segment.rsplit(":", 1)
        if label.startswith("@"):
            stream = answer_stream(ids.index(label[1:]))
        else:
            stream = int.from_bytes(label.encode(), "big") % (1 << 60) + 1_000_000
        spans.append(Span(stream, 0, int(length)))
    prompt = int(row["prompt_tokens"])
    spans.append(Span(index, 0, prompt - sum(span.length for span in spans)))
    return Request(index, merged(tuple(spans)), prompt)
