"""CPU seconds and peak memory of whole `kvsim run` processes, on the peers' workload.

Lengths and gaps as in the comparison of simulators that this repository's README cites: seed 1234,
prompts lognormal (mean 205, sigma 1.0, clipped to 4..1024), answers lognormal (mean 305, sigma 0.9,
clipped to 2..1024), then Poisson gaps, first arrival at 0; one A100, batch cap 128, token budget
4096. Each process reads the trace, simulates, and writes summary.json and both Parquet tables.

Run: python benchmarks/simulator.py [--repeats N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvsim.workload.traces import write_native
from kvsim.workload.workload import columns

CONFIG = """\
engine: {preset: llama-2-7b/a100-80gb, max_num_seqs: 128, max_num_batched_tokens: 4096}
kv: {policy: {kind: paged}}
workload: {kind: trace, format: native, path: trace.parquet}
"""
CASES = [(n, rate) for n in (2_000, 10_000, 50_000) for rate in (6, 20)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'requests':>8} {'req/s':>5} {'CPU s':>7} {'wall s':>7} {'peak MB':>8}   (medians)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG)
        for num_requests, rate in CASES:
            write_trace(folder / "trace.parquet", num_requests, rate)
            runs = [run(folder) for _ in range(repeats)]
            cpu, wall, peak = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"{num_requests:>8,} {rate:>5} {cpu:>7.2f} {wall:>7.2f} {peak:>8.0f}", flush=True)


def write_trace(path: Path, num_requests: int, rate: float) -> None:
    generator = np.random.default_rng(1234)

    def lognormal(mean: float, sigma: float, low: int, high: int) -> np.ndarray:
        drawn = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_requests)
        return np.clip(np.rint(drawn), low, high).astype(np.int64)

    prompt = lognormal(205, 1.0, 4, 1024)
    output = lognormal(305, 0.9, 2, 1024)
    arrival_s = np.cumsum(generator.exponential(1 / rate, num_requests))
    arrival_s -= arrival_s[0]
    write_native(columns(np.rint(arrival_s * 1e9).astype(np.int64), prompt, output), path)


def run(folder: Path) -> tuple[float, float, float]:
    """CPU s, wall s, peak MB of one process."""
    import time

    command = [sys.executable, "-m", "kvsim", "run", str(folder / "config.yaml")]
    command += ["-o", str(folder / "out"), "--overwrite", "--quiet", "--no-charts"]
    start = time.perf_counter()
    child = os.spawnv(os.P_NOWAIT, sys.executable, command)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"kvsim failed: {' '.join(command)}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - start, used.ru_maxrss / 1024


if __name__ == "__main__":
    main()
