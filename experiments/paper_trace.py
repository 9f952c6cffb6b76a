"""The requests of the PagedAttention paper's ShareGPT runs, as a kvsim trace.

    python experiments/paper_trace.py LENGTHS.csv results/paper_trace.csv

LENGTHS.csv holds the authors' length pairs (`input_len,output_len`, in file order; no licence, so
it is not in this repository). The rule is that of the authors' artifact: pairs with fewer than
2048 tokens in all, the first as many as there are requests, shuffled with seed 0; the requests of
each 10 ms, a Poisson number with seed 0, arrive at its start.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import numpy as np

from kvsim.workload.traces import write_native
from kvsim.workload.workload import Workload, columns

QUANTUM_NS = 10_000_000
MAX_TOKENS = 2048


def paper_trace(lengths: Path, rate_per_s: float, duration_s: float) -> Workload:
    quanta = round(duration_s * 1e9) // QUANTUM_NS
    mean = rate_per_s * QUANTUM_NS / 1e9
    counts = np.random.RandomState(0).poisson(lam=mean, size=quanta)
    arrival_ns = np.repeat(np.arange(quanta) * QUANTUM_NS, counts)
    with lengths.open(newline="") as file:
        pairs = [(int(row["input_len"]), int(row["output_len"])) for row in csv.DictReader(file)]
    pairs = [pair for pair in pairs if sum(pair) < MAX_TOKENS][: len(arrival_ns)]
    random.Random(0).shuffle(pairs)
    prompt, output = np.array(pairs, np.int64).T
    return columns(arrival_ns, prompt, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per s")
    parser.add_argument("--duration", type=float, default=900.0, help="s")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_native(paper_trace(args.lengths, args.rate, args.duration), args.out)


if __name__ == "__main__":
    main()
