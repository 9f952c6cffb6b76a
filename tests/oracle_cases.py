"""Random cases for the two oracles: small, seeded, and bent towards what seldom happens."""

from __future__ import annotations

from random import Random

from tests.oracle_v1 import VERSIONS


def v1_case(seed: int, engine: str | None = None) -> tuple[dict, list[dict]]:
    """Engine arguments and a trace. One in eight has requests that the pool, or a step with chunked
    prefill off, can never hold; in all others every request fits alone."""
    rng = Random(f"v1 {seed}")
    block_size = rng.choice([1, 2, 3, 4, 8, 16, 16, 32, 64])
    blocks = rng.choice([6, 10, 17, 30, 50, 60, rng.randint(3, 80)])
    roof = (blocks - 1) * block_size  # tokens that one request may come to
    config = {
        "oracle": "v1",
        "engine": engine or rng.choice(sorted(VERSIONS)),
        "num_gpu_blocks": blocks,
        "block_size": block_size,
        "max_num_seqs": rng.choice([1, 2, 3, 8, 64]),
        "max_num_batched_tokens": max(1, rng.choice([roof // 8, roof // 3, roof, 2 * roof])),
    }
    for name, choices in {
        "enable_prefix_caching": [None, True, True, False],
        "enable_chunked_prefill": [None, None, True, False],
        "long_prefill_token_threshold": [None, None, 0, 1, max(1, roof // 10), roof // 3],
        "scheduler_reserve_full_isl": [None, None, True, False],
        "watermark": [None, None, 0.0, 0.02, 0.05, 0.1, 0.25, 0.3, 0.5],
        "max_model_len": [None, None, roof, max(2, roof // 2)],
        "log_tables": [True],
    }.items():
        value = rng.choice(choices)
        if value is not None:
            config[name] = value
    longest = min(config.get("max_model_len", roof), roof)
    if rng.random() < 1 / 8:
        longest = 2 * roof
        config.pop("max_model_len", None)
    elif config.get("enable_chunked_prefill") is False:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], longest)
    is_timed = rng.random() < 0.25
    if is_timed:
        config["time_model"] = {"base": 0.01, "per_token": rng.choice([0, 0.00002, 0.001])}
    trace = v1_trace(rng, config, longest, is_timed)
    return config, trace


def priority_case(seed: int, engine: str) -> tuple[dict, list[dict]]:
    """As v1_case, everyone with a priority, and in two of three cases with seats and arrivals that
    overfill the pool. Every request fits alone: one that does not would wait for ever, or come and
    go for ever, and only the others can tell a policy."""
    rng = Random(f"priority {seed}")
    config, trace = v1_case(seed, engine)
    config["policy"] = "priority"
    roof = (config["num_gpu_blocks"] - 1) * config["block_size"]
    if rng.random() < 2 / 3:
        config["max_num_seqs"] = rng.choice([4, 8, 64])
        for row in trace:
            if "arrival_step" in row:
                row["arrival_step"] //= rng.choice([2, 8])
        trace.sort(key=lambda row: row.get("arrival_step", 0))
    levels = rng.choice([[0, 1], [0, 1, 1, 1], [0, 5, 9], range(10)])
    for row in trace:
        row["priority"] = rng.choice(levels)
        row["output_tokens"] = max(1, min(row["output_tokens"], roof - row["prompt_tokens"]))
    return config, trace


def v1_trace(rng: Random, config: dict, longest: int, is_timed: bool) -> list[dict]:
    block_size = config["block_size"]
    labels = {f"s{n}": rng.randint(1, max(1, longest // 2)) for n in range(rng.choice([1, 2, 5]))}
    rate = rng.choice([0, 0.3, 1, 3])
    heavy = rng.random() < 0.5
    now, rows = 0, []
    for number in range(rng.choice([1, 4, 12, 25])):
        cap = max(1, longest - 1)
        prompt = min(cap, rng.choice([rng.randint(1, cap), 1 + rng.randrange(4 * block_size)]))
        if rng.random() < 0.3:  # round block edges
            prompt = max(1, min(cap, prompt // block_size * block_size + rng.choice([-1, 0, 1])))
        room = longest - prompt
        output = rng.randint(1, max(1, room if heavy else min(room, 2 * block_size)))
        if "max_model_len" in config and rng.random() < 0.2:
            output += rng.randint(1, 20)  # stopped by max_model_len
        row = {"request_id": f"r{number}"}
        row["arrival_time" if is_timed else "arrival_step"] = (
            round(now * 0.013, 6) if is_timed else int(now)
        )
        row |= {"prompt_tokens": prompt, "output_tokens": output, "segments": ""}
        row["segments"] = _segments(rng, labels, rows, prompt)
        rows.append(row)
        if rng.random() < 0.7 and rate:
            now += rng.expovariate(rate)
        if rng.random() < 0.03:
            now += 60  # idle for a while
    return rows


def _segments(rng: Random, labels: dict[str, int], rows: list[dict], prompt: int) -> str:
    """Heads of prompts: a shared text, a whole earlier conversation, a text said twice, or none."""
    kind = rng.choice(["none", "shared", "turn", "turn", "mixed"])
    parts: list[tuple[str, int]] = []
    if kind == "turn" and rows:
        past = rng.choice(rows)
        parts = [_parted(part) for part in past["segments"].split(";") if part]
        private = past["prompt_tokens"] - sum(length for _, length in parts)
        if private:
            parts.append((f"p{past['request_id']}", private))
            past["segments"] = ";".join(f"{label}:{length}" for label, length in parts)
        parts.append((f"@{past['request_id']}", rng.randint(1, past["output_tokens"])))
    elif kind in ("shared", "mixed"):
        label = rng.choice(sorted(labels))
        parts = [(label, labels[label])]
        if kind == "mixed":
            parts *= rng.choice([1, 2, 3])
            parts.append((rng.choice(sorted(labels)), rng.randint(1, 9)))
    kept, left = [], prompt
    for label, length in parts:
        length = min(length, left)
        if length:
            kept.append(f"{label}:{length}")
            left -= length
    return ";".join(kept)


def _parted(part: str) -> tuple[str, int]:
    label, length = part.rsplit(":", 1)
    return label, int(length)


def v0_case(seed: int) -> tuple[dict, list[dict]]:
    """Engine arguments and a trace for vLLM 0.2.0, without beams."""
    rng = Random(f"v0 {seed}")
    block_size = rng.choice([1, 2, 4, 8, 16, 16, 32])
    blocks = rng.choice([6, 12, 20, 40, 64])
    roof = blocks * block_size
    longest = max(2, rng.choice([roof // 3, roof // 2, roof]))
    config = {
        "oracle": "v0.2.0",
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": 10_000,
        "block_size": block_size,
        "max_num_batched_tokens": max(2, rng.choice([longest // 2, longest, 2 * longest])),
        "max_model_len": longest,
    }
    for name, choices in {
        "max_num_seqs": [None, None, 8, 3],
        "watermark": [None, 0.0, 0.05, 0.1, 0.2],
        "preemption_mode": [None, None, "swap"],
    }.items():
        value = rng.choice(choices)
        if value is not None:
            config[name] = value
    rate, most = rng.choice([0, 0.3, 1, 3]), rng.choice([1, 1, 2, 3])
    now, rows = 0.0, []
    for number in range(rng.choice([1, 4, 10, 20])):
        prompt = rng.choice([rng.randint(1, longest), 1 + rng.randrange(3 * block_size)])
        prompt = min(prompt, longest + rng.choice([0, 0, 0, 0, 5]))
        samples = rng.randint(1, most)
        room = max(1, longest - prompt)
        outputs = [
            rng.choice([1, 2, rng.randint(1, room), room + rng.randint(0, 3)])
            for _ in range(samples)
        ]
        if rng.random() < 0.2:
            outputs = outputs[:1]
        row = {"request_id": f"r{number}", "arrival_step": int(now), "prompt_tokens": prompt}
        rows.append(row | {"output_tokens": "|".join(map(str, outputs)), "n": samples})
        if rate and rng.random() < 0.7:
            now += rng.expovariate(rate)
        if rng.random() < 0.03:
            now += 60
    return config, rows
