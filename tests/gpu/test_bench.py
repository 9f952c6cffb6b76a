"""The benchmark but for its clock: every kernel at sizes that the interpreter can do."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from gpu_backend import bench, bench_runs
from gpu_backend.bench import Machine, Row, copy_bandwidth, line, measure, report, sweep, verdicts
from gpu_backend.bench_cases import CASES, Case
from tests.gpu.batches import DEVICE, worst

GB = 10**9
TINY = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
TINY_CASES = [
    Case("decode", 3, 150, **TINY),
    Case("decode", 3, 150, is_ragged=True, num_layers=2, block_size=8, **TINY),
    Case("decode", 2, 40, dtype="bf16, fp8 KV", **TINY),
    Case("decode", 2, 40, dtype="fp16", is_ragged=True, **TINY),
    Case("prefill", 2, 40, num_new=40, **TINY),
    Case("prefill", 3, 40, num_new=40, is_ragged=True, **TINY),
    Case("prefill", 2, 90, num_new=20, **TINY),
    Case("prefill", 2, 90, num_new=20, is_ragged=True, num_layers=2, **TINY),
    Case("store", 2, 9, num_layers=2, **TINY),
    Case("move", 2, 40, num_layers=2, **TINY),
]


def one_ms(run):
    """A clock that runs what it is to time, and then says that it took 1 ms."""
    run()
    return 1e-3


MACHINE = Machine(torch.device(DEVICE), 4, one_ms)


@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_the_kernels_agree_with_sdpa_and_with_torch(case):
    row = measure(case, MACHINE)
    assert row.error <= (0 if case.kernel in ("store", "move") else bench.MAX_ERROR)
    assert row.seconds == pytest.approx(1e-3 / case.num_layers)
    assert (row.contiguous_seconds is None) == (case.kernel != "decode")
    assert (row.sdpa_seconds is None) == (case.kernel in ("store", "move"))


@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_sdpa_is_asked_for_the_same_attention(case):
    """Against each sequence by itself: a mask that were wrong in both would not show above."""
    if case.kernel in ("store", "move"):
        return
    inputs = bench_runs.make_inputs(case, MACHINE.device)
    runs = bench_runs.make_runs(case, MACHINE.device, 1)
    found = runs.packed(runs.sdpa())
    for seq, length in enumerate(case.lengths):
        rows = slice(*inputs.query_starts[seq : seq + 2].tolist())
        q = inputs.q[rows].double().movedim(0, 1)
        k, v = inputs.dense[-1, :, seq, :length].double().movedim(1, 2)
        seen = torch.ones(q.shape[1], length, dtype=torch.bool, device=q.device)
        exact = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen.tril(length - q.shape[1]), enable_gqa=True
        )
        assert worst(found[rows], exact.movedim(0, 1)) <= 2.0**-6


def test_bytes_and_flops_are_those_counted_by_hand():
    case = Case("decode", 64, 8192)
    assert case.kv_bytes == 64 * 8192 * 2 * 8 * 128 * 2 == 2_147_483_648
    assert case.moved_bytes == case.kv_bytes + 2 * 64 * 32 * 128 * 2
    ragged = Case("decode", 4, 1000, is_ragged=True)
    assert sorted(ragged.lengths) == [250, 500, 750, 1000]
    assert ragged.kv_bytes == 2500 * 4096
    assert Case("decode", 1, 100, dtype="bf16, fp8 KV").kv_bytes == 100 * 2048
    prefill = Case("prefill", 2, 3, num_new=2, num_heads=2, num_kv_heads=1, head_dim=64)
    assert prefill.moved_bytes == 2 * 3 * 256 + 2 * 4 * 2 * 64 * 2
    assert prefill.flops == 2 * (2 + 3) * 2 * 4 * 64  # queries see 2 and 3 tokens
    assert Case("store", 2, 10).moved_bytes == 20 * (4096 + 4096)
    assert Case("move", 2, 32).moved_bytes == 2 * 2 * 32 * 4096
    row = Row(case, 1, 0.0, 1e-3, None, None)
    assert row.bytes_per_s == pytest.approx(2.148532e12, rel=1e-6)
    assert copy_bandwidth(MACHINE, 1 << 20) == pytest.approx(2 * 2**20 / 1e-3)


@pytest.mark.parametrize(
    ("case", "seconds", "contiguous", "expected"),
    [
        (Case("decode", 64, 8192), 0.54e-3, 0.53e-3, [True, True]),  # 3.98 TB/s
        (Case("decode", 64, 8192), 0.56e-3, 0.53e-3, [False, False]),  # 3.84 TB/s, 1.057
        (Case("decode", 64, 1280), 96e-6, 96e-6, [True, True]),  # 336.6 MB at 3.51 TB/s
        (Case("decode", 64, 1280), 100e-6, 96e-6, [False, True]),  # 3.37 TB/s
        (Case("decode", 16, 256), 14e-6, 14e-6, [True, True]),
        (Case("decode", 16, 256), 16e-6, 14e-6, [False, False]),
        (Case("decode", 17, 256), 16e-6, 16e-6, [True]),
        (Case("prefill", 1, 512, num_new=512), 1.0, None, []),
    ],
)
def test_a_target_is_met_or_missed(case, seconds, contiguous, expected):
    row = Row(case, 1, 0.0, seconds, contiguous, None)
    assert [is_met for _, is_met in verdicts(row)] == expected
    assert line(row, 4e12).count("MISSED") == expected.count(False)


def test_a_wrong_kernel_is_not_praised_for_its_speed(monkeypatch):
    def zeros(q, kv, tables, lengths, scale, *, scratch, out):
        return out.zero_()

    monkeypatch.setattr(bench_runs, "decode_attention", zeros)
    row = measure(TINY_CASES[0], MACHINE)
    assert verdicts(row) == [("WRONG by 1:", False)]


def test_the_report_has_a_line_a_case_and_the_sweep_one_a_decode():
    cases = [TINY_CASES[2], TINY_CASES[4], TINY_CASES[9]]
    copied, header, *lines, _, said = report(MACHINE, cases, copy_bytes=1 << 20)
    assert "0.00 TB/s" in copied and header == bench.HEADER
    assert [line.split()[0] for line in lines] == ["decode", "prefill", "move"]
    assert lines[0].split()[-10:-6] == ["1.00", "1.000", "<", "15"]
    assert said == "targets (of an H200): 1 of 2 met"
    one_head = Case("decode", 1, 20, num_heads=2, num_kv_heads=1, head_dim=64)
    header, text = sweep(MACHINE, [*cases[1:], one_head])
    assert header.split()[-7:] == ["1", "2", "4", "8", "16", "32", "64"]
    assert text.split()[:4] == ["1", "x", "20", "even"] and text.split()[4:] == [
        "[1,000.0]",
        *["1,000.0"] * 6,
    ]


def test_the_cases_are_what_the_targets_and_the_cache_ask_for():
    assert {case.kernel for case in CASES} == {"decode", "prefill", "store", "move"}
    decode = [case for case in CASES if case.kernel == "decode"]
    for low, high in ((0, 50e6), (300e6, 1.5e9), (1.5e9, 4e9)):  # an H200 has 50 MB of L2
        shown = {case.is_ragged for case in decode if low <= case.kv_bytes < high}
        assert shown == {False, True}
    small = [case for case in decode if case.num_seqs <= 16 and case.context <= 256]
    assert all(case.num_layers * case.kv_bytes > 0 for case in small) and len(small) >= 3
    assert all(case.num_layers * case.kv_bytes < 5e9 for case in CASES)


def test_without_a_gpu_it_says_so_and_needs_nothing_of_the_simulator():
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "gpu_backend.bench"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: gpu_backend.bench times kernels on a GPU, and torch shows none here\n"
    )
    code = (
        "import sys, gpu_backend.bench; "
        "print(*{'kvsim', 'typer', 'pandas', 'pydantic', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "\n"
