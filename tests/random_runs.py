"""Random engines and workloads for whole runs: small, seeded, on pools that a few requests fill."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from kvsim.engine.request import answer_stream
from kvsim.workload.workload import Workload
from tests.test_twin import Row, workload_of
from tests.twin import Setup


def random_run(seed: int, **options: object) -> tuple[Workload, Setup, int]:
    """A workload with priorities and limits of answers, a paged engine, a long prefill threshold.
    `options` are fields of the Setup."""
    rng = Random(f"run {seed}")
    block_size, longest = rng.choice([1, 2, 3, 4, 8]), rng.choice([12, 24, 40])
    seats, is_chunked = rng.randint(1, 8), rng.random() < 0.7
    drawn = {
        "num_blocks": rng.randint(1, max(2, 3 * longest // block_size)),
        "prefix_caching": rng.random() < 0.6,
        "can_fork": rng.random() < 0.4,
        "prefix_index": rng.choice(["hash_chain", "hash_chain", "radix"]),
        "watermark": rng.choice([0, 0, 0, 0.2]),
    }
    setup = Setup(
        **drawn | options,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=seats,
        max_num_batched_tokens=rng.choice([0, 0, 1, 3, 9])
        + max(seats, 0 if is_chunked else longest),
        chunked_prefill=is_chunked,
    )
    rows = random_rows(rng, longest // 3)
    workload = replace(
        workload_of(rows),
        priority=np.array([rng.randint(0, 3) for _ in rows]),
        max_tokens=np.array([rng.choice([-1, -1, 4, 10, 30]) for _ in rows]),
    )
    return workload, setup, rng.choice([0, 0, 2, 5])


def random_rows(rng: Random, longest: int) -> list[Row]:
    """Up to 16 requests; prompts begin with shared text, or quote an earlier request."""
    time_ms, rows = 0, []
    for number in range(rng.choice([2, 3, 5, 10, 16])):
        time_ms += rng.choice([0, 0, 1, 2, 3, 7, 30])
        spans: list[tuple[int, int, int]] = []
        if rows and rng.random() < 0.3:
            quoted = rng.randrange(number)
            length = rng.choice([1, rows[quoted].num_answer_tokens])
            spans = [*rows[quoted].spans, (answer_stream(quoted), 0, length)]
        elif rng.random() < 0.5:
            spans.append((1000 + rng.randint(0, 1), 0, rng.randint(1, longest)))
        if not spans or rng.random() < 0.7:
            spans.append((number, 0, rng.randint(1, longest)))
        answer, samples = rng.choice([1, 2, 3, 5, 8, 13, 20, 30]), rng.choice([1, 1, 1, 2, 3])
        rows.append(Row(time_ms, spans, answer, samples))
    return rows
