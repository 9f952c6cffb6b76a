"""How fast the kernels are on the GPU at hand, beside a plain copy, torch's SDPA and themselves on
contiguous KV. Needs torch, triton and numpy.

    python -m gpu_backend.bench            # one table
    python -m gpu_backend.bench --sweep    # decode again, with every number of splits
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gpu_backend.bench_cases import CASES, Case
from gpu_backend.bench_runs import make_runs, splits_of, worst_error
from gpu_backend.kernels.combine_splits import MAX_SPLITS

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device."""

TARGET_BANDWIDTHS = ((1.5e9, 3.9e12), (300e6, 3.4e12))
"""On an H200, decode of at least so many bytes of KV moves so many bytes/s; the largest first."""
TARGET_SMALL = (16, 256, 15e-6)
"""Decode of up to so many sequences of up to so many tokens takes, in a CUDA graph, seconds."""
TARGET_PAGING = 1.05
"""What decode of paged KV may take, to that of contiguous KV."""
MAX_ERROR = 2.0**-5
"""To a head's largest value; SDPA rounds weights and output to 8 bits, as the kernels do."""
COPY_BYTES = 2 << 30
ROUNDS = 21
FLUSH_CACHES = 4  # times L2, read between two rounds


class Machine(NamedTuple):
    """Where the kernels run; num_processors are its multiprocessors."""

    device: torch.device
    num_processors: int
    timer: Timer


class Row(NamedTuple):
    """A case, timed: seconds of one layer's call; None where there is no such thing. error: how far
    its kernels are from SDPA or torch."""

    case: Case
    num_splits: int
    error: float
    seconds: float
    contiguous_seconds: float | None
    sdpa_seconds: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.case.moved_bytes / self.seconds

    @property
    def paging(self) -> float | None:
        return self.contiguous_seconds and self.seconds / self.contiguous_seconds


def measure(case: Case, machine: Machine) -> Row:
    """Compare the case's kernels with SDPA (or plain torch), then time them."""
    num_splits = splits_of(case, machine.num_processors)
    runs = make_runs(case, machine.device, num_splits)
    error = max(worst_error(runs, run) for run in (runs.paged, runs.contiguous) if run)

    def timed(run: Callable[[], object] | None) -> float | None:
        return run and machine.timer(run) / case.num_layers

    seconds = timed(runs.paged)
    assert seconds is not None
    return Row(case, num_splits, error, seconds, timed(runs.contiguous), timed(runs.sdpa))


def copy_bandwidth(machine: Machine, num_bytes: int = COPY_BYTES) -> float:
    """Bytes/s, read and written, of a plain copy of num_bytes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / machine.timer(lambda: target.copy_(source))


def verdicts(row: Row) -> list[tuple[str, bool]]:
    """The targets that a case has, and whether it meets them."""
    case, found = row.case, []
    if row.error > MAX_ERROR:
        return [(f"WRONG by {row.error:.2g}:", False)]
    if case.kernel != "decode":
        return []
    num_seqs, context, seconds = TARGET_SMALL
    if case.num_seqs <= num_seqs and case.context <= context:
        found.append((f"< {seconds * 1e6:.0f} us", row.seconds < seconds))
    for kv_bytes, bytes_per_s in TARGET_BANDWIDTHS:
        if case.kv_bytes >= kv_bytes:
            found.append((f">= {bytes_per_s / 1e12:.1f} TB/s", row.bytes_per_s >= bytes_per_s))
            break
    if row.paging is not None:
        found.append((f"paged <= {TARGET_PAGING}", row.paging <= TARGET_PAGING))
    return found


HEADER = (
    f"{'kernel':<8}{'sequences x tokens':<27}{'block':>5} {'dtype':<13}{'heads':<10}"
    f"{'KV MB':>8}{'splits':>7}{'us':>9}{'TB/s':>6}{'copy %':>7}{'TFLOP/s':>8}{'SDPA':>6}"
    f"{'paged':>7}  targets"
)
NOTES = (
    "us: one layer's call, median, in a CUDA graph, L2 flushed. copy %: of the copy's bytes/s. "
    "SDPA: torch's time\non contiguous KV (ragged: padded), over ours. paged: our time over ours "
    "on contiguous KV."
)


def line(row: Row, copy_bytes_per_s: float) -> str:
    """A row as text, under HEADER."""
    case = row.case
    tokens = f"{case.num_seqs} x {case.context:,}"
    if case.kernel == "prefill" and case.num_new < case.context:
        tokens = f"{case.num_seqs} x {case.num_new:,} of {case.context:,}"
    tokens = f"{tokens} {'ragged' if case.is_ragged else 'even'}"
    heads = f"{case.num_heads}/{case.num_kv_heads}x{case.head_dim}"
    flops = f"{case.flops / row.seconds / 1e12:.0f}" if case.kernel == "prefill" else ""
    sdpa = f"{row.sdpa_seconds / row.seconds:.2f}" if row.sdpa_seconds else ""
    paging = f"{row.paging:.3f}" if row.paging else ""
    splits = str(row.num_splits) if case.kernel == "decode" else ""
    said = ", ".join(
        f"{target} {'met' if is_met else 'MISSED'}" for target, is_met in verdicts(row)
    )
    return (
        f"{case.kernel:<8}{tokens:<27}{case.block_size:>5} {case.dtype:<13}{heads:<10}"
        f"{case.kv_bytes / 1e6:>8,.1f}{splits:>7}{row.seconds * 1e6:>9,.1f}"
        f"{row.bytes_per_s / 1e12:>6.2f}{100 * row.bytes_per_s / copy_bytes_per_s:>7.0f}"
        f"{flops:>8}{sdpa:>6}{paging:>7}  {said}"
    ).rstrip()


def report(machine: Machine, cases: list[Case], *, copy_bytes: int = COPY_BYTES) -> Iterator[str]:
    """The table, a line as soon as it is known."""
    copy_bytes_per_s = copy_bandwidth(machine, copy_bytes)
    yield f"copy of {copy_bytes / 1e9:.2f} GB: {copy_bytes_per_s / 1e12:.2f} TB/s read and written"
    yield HEADER
    met = []
    for case in cases:
        row = measure(case, machine)
        met += [is_met for _, is_met in verdicts(row)]
        yield line(row, copy_bytes_per_s)
    yield NOTES
    yield f"targets (of an H200): {sum(met)} of {len(met)} met"


def sweep(machine: Machine, cases: list[Case]) -> Iterator[str]:
    """Microseconds of decode by number of splits; [] around the number that is chosen."""
    counts = [1 << n for n in range(MAX_SPLITS.bit_length())]
    yield f"{'decode: us by splits':<27}" + "".join(f"{count:>10}" for count in counts)
    for case in cases:
        if case.kernel == "decode":
            chosen = splits_of(case, machine.num_processors)
            text = f"{case.num_seqs} x {case.context:,} {'ragged' if case.is_ragged else 'even'}"
            text = f"{text:<27}"
            for count in counts:
                run = make_runs(case, machine.device, count).paged
                found = f"{machine.timer(run) / case.num_layers * 1e6:,.1f}"
                text += f"{f'[{found}]' if count == chosen else found:>10}"
            yield text


def cuda_machine() -> Machine:
    """The current GPU, timed by CUDA events around a graph of the call: no launch of the host's is
    in it. Between two rounds L2 is filled with other data, which are read only, so that nothing
    of them is left to be written while the clock runs."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    other = torch.zeros(FLUSH_CACHES * properties.L2_cache_size // 4, device=device)

    def seconds(run: Callable[[], object]) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and takes memory, before the capture
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.sum()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    return Machine(device, properties.multi_processor_count, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="decode with every number of splits")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: gpu_backend.bench times kernels on a GPU, and torch shows none here")
    machine = cuda_machine()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for text in (sweep if arguments.sweep else report)(machine, CASES):
        print(text, flush=True)


if __name__ == "__main__":
    main()
