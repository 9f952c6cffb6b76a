"""Trace readers against published counts (EXPECTED.json), odd files (quirks) and random damage."""

from __future__ import annotations

import contextlib
import gzip
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.engine.request import Span, answer_stream
from kvsim.errors import TraceError
from kvsim.workload.traces import (
    FORMATS,
    ReadOptions,
    convert_trace,
    inspect_trace,
    read_timings,
    read_trace,
    write_native,
)
from kvsim.workload.workload import Workload, columns
from tests.shared import SHARED, needs_shared

TRACES = SHARED / "data" / "traces"
QUIRKS = Path(__file__).parent / "data" / "quirks"
EXPECTED = (
    json.loads((TRACES / "EXPECTED.json").read_text())
    if (TRACES / "EXPECTED.json").is_file()
    else {}
)
QUIRK_TABLE = json.loads((QUIRKS / "expected.json").read_text())
SKIP = ReadOptions(skip_bad_rows=True)
NATIVE = "request_id,arrival_s,prompt_tokens,output_tokens\na,0,5,2\nb,1.25,7,3\n"

# kvsim's choice where the quirks' README leaves one: what a strict reading gives (requests, or a
# part of the error) and what skip_bad_rows gives where that differs
STRICT: dict[str, int | str] = {
    "01_bom_azure.csv": 3,
    "02_crlf_no_final_newline_azure.csv": 3,
    "03_missing_header_azure.csv": ":1: no header: expected TIMESTAMP,ContextTokens",
    "04_negative_arrival_mooncake.jsonl": ":1: 1 arrival before zero",
    "05_unsorted_and_restart_ragpulse.jsonl": "2 inversions, largest backward step 604453 s",
    "06a_duplicate_ids_sharegpt.json": 3,
    "06b_duplicate_session_id_agentic.jsonl": 3,
    "07_nan_inf_blank_negative_burstgpt.csv": ":9: Request tokens: '12.5' is not a whole number",
    "08_zero_tokens_burstgpt.csv": 5,
    "09_output_over_max_len_mooncake.jsonl": 4,
    "10a_gzip_mooncake.jsonl.gz": 5,
    "10b_gzip_named_csv.csv": 3,
    "11_trailing_comma_sharegpt.json": ":2: column 146: not JSON",
    "12_truncated_sharegpt.json": "truncated at byte 1287: 5 complete records before it",
    "13_blank_lines_mooncake.jsonl": 2,
    "14_huge_ints_mooncake.jsonl": ":5: timestamp: '1753780607550317897' is outside the clock",
    "15_mixed_tz_azure.csv": 6,
    "16_git_lfs_pointer_burstgpt.csv": "Git LFS pointer, not the data of 52,283,111 bytes",
    "17_columns_inserted_burstgpt_v3.csv": 4,
    "18_hash_ids_mismatch.jsonl": ":2: hash_ids: 2 ids where ceil(input_length / 512) is 3",
    "19_sharegpt_odd_turns.json": 4,
    "20_utf16le_bom_azure.csv": 3,
    "21_seconds_in_a_ms_format_mooncake.jsonl": 4,
    "22_three_second_batches_mooncake.jsonl": 32,
    "23_html_error_page.json": "looks like HTML",
    "24_pdf_string_is_code_servegen.json": "window '43200': input_tokens: is not a dict of numbers",
    "25a_empty.csv": "no requests",
    "25b_header_only.csv": "no requests",
    "26_concatenated_headers_azure.csv": ":4: header: appears again",
    "27_quoted_thousands_and_semicolons.csv": "expected comma-separated values",
}
SKIPPING = {
    "07_nan_inf_blank_negative_burstgpt.csv": 3,
    "12_truncated_sharegpt.json": 5,
    "14_huge_ints_mooncake.jsonl": 5,
    "18_hash_ids_mismatch.jsonl": 5,
    "26_concatenated_headers_azure.csv": 3,
}


def test_every_quirk_has_a_rule() -> None:
    assert set(STRICT) == set(QUIRK_TABLE)


@pytest.mark.parametrize("name", sorted(STRICT))
def test_a_quirk_loads_or_fails_as_ruled(name: str) -> None:
    want, given_format = STRICT[name], QUIRK_TABLE[name]["format"]
    if isinstance(want, int):
        assert len(read_trace(QUIRKS / name, given_format)) == want
        assert len(read_trace(QUIRKS / name)) == want
        return
    with pytest.raises(TraceError) as raised:
        read_trace(QUIRKS / name, given_format)
    assert want in str(raised.value)
    assert all(line.startswith(name) for line in str(raised.value).splitlines())


@pytest.mark.parametrize("name", sorted(SKIPPING))
def test_skipping_bad_rows_adds_up(name: str) -> None:
    workload = read_trace(QUIRKS / name, options=SKIP)
    summary = inspect_trace(QUIRKS / name, options=SKIP)
    assert len(workload) == summary.requests == SKIPPING[name]
    assert summary.rows_read == summary.requests + sum(summary.dropped.values())


def test_bad_rows_are_named_with_line_and_field() -> None:
    with pytest.raises(TraceError) as raised:
        read_trace(QUIRKS / "07_nan_inf_blank_negative_burstgpt.csv")
    lines = [line.split(":")[1] for line in str(raised.value).splitlines()]
    assert lines == ["3", "4", "5", "7", "8", "9"]
    workload = read_trace(QUIRKS / "07_nan_inf_blank_negative_burstgpt.csv", options=SKIP)
    assert workload.prompt_tokens.tolist() == [472, 100, 60]
    assert any(
        note.startswith("Total tokens") and note.endswith("in 1 row") for note in workload.notes
    )


def test_mixed_offsets_are_one_clock() -> None:
    want = QUIRK_TABLE["15_mixed_tz_azure.csv"]["arrivals_s_if_naive_is_utc"]
    workload = read_trace(QUIRKS / "15_mixed_tz_azure.csv")
    assert workload.arrival_ns.tolist() == [round(s * 1e9) for s in want]
    assert any("read as UTC" in note for note in workload.notes)


def test_arrivals_before_zero_move_only_when_asked() -> None:
    path = QUIRKS / "04_negative_arrival_mooncake.jsonl"
    workload = read_trace(path, options=ReadOptions(rebase=True))
    assert workload.arrival_ns.tolist() == [0, 250_000_000, 260_000_000]
    assert inspect_trace(path).arrivals_before_zero == 1


def test_a_trace_that_goes_back_is_sorted_only_when_asked() -> None:
    path = QUIRKS / "05_unsorted_and_restart_ragpulse.jsonl"
    workload = read_trace(path, options=ReadOptions(sort=True))
    assert workload.prompt_tokens.tolist() == [1105, 1106, 1100, 1101, 1103, 1102, 1104, 1107]
    summary = inspect_trace(path)
    assert (summary.backward_steps, summary.largest_backward_step_s) == (2, 604453.0)


def test_repeated_ids_are_made_unique() -> None:
    workload = read_trace(QUIRKS / "06a_duplicate_ids_sharegpt.json")
    assert workload.request_ids == ["dup_0", "dup_0#2", "dup_0#3"]


def test_two_lines_with_one_session_id_are_two_sessions() -> None:
    workload = read_trace(QUIRKS / "06b_duplicate_session_id_agentic.jsonl")
    assert workload.session.tolist() == [0, 0, 1]
    assert workload.after.tolist() == [-1, 0, -1]
    assert workload.think_ns.tolist() == [0, 5_000_000, 0]
    assert any("a session without sub-requests" in note for note in workload.notes)


def test_huge_hash_ids_stay_distinct_and_become_small() -> None:
    path = QUIRKS / "14_huge_ints_mooncake.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = lines[4].replace('"1753780607550317897"', "4")
    assert inspect_trace(path, options=SKIP).distinct_blocks == 10  # row 5 has the eleventh
    workload = read_trace(path, options=SKIP)
    assert workload.spans is not None and workload.spans[:, 0].max() < 100
    assert workload.prompt_tokens.tolist()[-1] == 1000


def test_all_eleven_ids_are_distinct_once_the_stamp_is_mended(tmp_path: Path) -> None:
    text = (QUIRKS / "14_huge_ints_mooncake.jsonl").read_text()
    path = tmp_path / "mended.jsonl"
    path.write_text(text.replace('"1753780607550317897"', '"4"'))
    want = QUIRK_TABLE["14_huge_ints_mooncake.jsonl"]["distinct_hash_ids"]
    assert inspect_trace(path).distinct_blocks == want
    assert read_trace(path).arrival_ns.tolist() == [
        0,
        10**6,
        2 * 10**6,
        3 * 10**6,
        4 * 10**6,
        5 * 10**6,
    ]


def test_burstgpt_columns_go_by_name() -> None:
    want = QUIRK_TABLE["17_columns_inserted_burstgpt_v3.csv"]
    path = QUIRKS / "17_columns_inserted_burstgpt_v3.csv"
    workload = read_trace(path)
    assert workload.prompt_tokens.tolist() == want["prompt_tokens"]
    assert workload.arrival_ns[0] == want["first_arrival_s"]
    assert workload.session.tolist() == [0, -1, 0, -1]
    closed = read_trace(path, options=ReadOptions(sessions="closed"))
    assert closed.after.tolist() == [-1, -1, 0, -1]
    assert closed.think_ns[2] == (82 - 43) * 10**9  # the next turn less the elapsed time


def test_prompts_without_hash_ids_keep_to_themselves() -> None:
    workload = read_trace(QUIRKS / "18_hash_ids_mismatch.jsonl", options=SKIP)
    lengths = [sum(span.length for span in workload.prompt(i)) for i in range(len(workload))]
    assert lengths == [1300] * 5
    alone = [workload.prompt(i)[0].stream for i in (1, 2)]  # rows 4 and 5 of the file
    assert len(workload.prompt(1)) == len(workload.prompt(2)) == 1
    assert workload.spans is not None and all(
        (workload.spans[:, 0] == one).sum() == 1 for one in alone
    )


def test_a_wrong_unit_and_a_coarse_clock_are_hinted_at() -> None:
    unit = QUIRKS / "21_seconds_in_a_ms_format_mooncake.jsonl"
    assert any("time_unit: s" in note for note in read_trace(unit).notes)
    mended = read_trace(unit, options=ReadOptions(time_unit="s"))
    assert mended.arrival_ns[-1] == 61_114_000_000 and not mended.notes
    coarse = read_trace(QUIRKS / "22_three_second_batches_mooncake.jsonl")
    assert any("4 instants only" in note for note in coarse.notes)
    assert coarse.prompt_tokens[:8].tolist() == [900 + 7 * i for i in range(8)]


# -- published counts ------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_published_counts_are_reproduced(name: str) -> None:
    got = inspect_trace(TRACES / name).as_dict()
    for key, value in EXPECTED[name].items():
        if key in got:
            assert got[key] == pytest.approx(value, abs=1e-7), key
        else:
            assert name.startswith("vllm_measured"), key


@needs_shared
@pytest.mark.parametrize("name", [n for n in sorted(EXPECTED) if "multi_turn" not in n])
def test_the_workload_agrees_with_the_summary(name: str) -> None:
    want = EXPECTED[name]
    workload = read_trace(TRACES / name, options=ReadOptions(sort=True))
    assert len(workload) == want["requests"]
    assert workload.prompt_tokens.sum() == want["sum_prompt"]
    assert workload.output_tokens.sum() == want["sum_output"]
    assert (np.diff(workload.arrival_ns[workload.after < 0]) >= 0).all()
    if workload.spans is not None:
        spans = np.add.reduceat(workload.spans[:, 2], workload.span_offsets[:-1])
        assert (spans == workload.prompt_tokens).all()
        assert len(np.unique(workload.spans[:, 0])) >= want["distinct_blocks"]


@needs_shared
@pytest.mark.parametrize("name", [n for n in sorted(EXPECTED) if n.startswith("vllm_measured")])
def test_measured_times_are_reproduced(name: str) -> None:
    want, got = EXPECTED[name], read_timings(TRACES / name)
    outputs = read_trace(TRACES / name).output_tokens
    ttft = (got.first_token_ns - got.queued_ns) / 1e9
    e2e = (got.last_token_ns - got.queued_ns) / 1e9
    tpot = (got.last_token_ns - got.first_token_ns)[outputs > 1] / 1e6 / (outputs[outputs > 1] - 1)
    assert (got.last_token_ns.max() - got.queued_ns.min()) / 1e9 == pytest.approx(
        want["makespan_s"], abs=1e-3
    )
    assert ttft.mean() == pytest.approx(want["ttft_s"]["mean"], abs=1e-3)
    assert e2e.mean() == pytest.approx(want["e2e_s"]["mean"], abs=1e-3)
    assert tpot.mean() == pytest.approx(want["tpot_ms"]["mean"], abs=1e-2)


@needs_shared
def test_vidur_and_azure_files_agree() -> None:
    """vidur's splitwise files are the Azure data, equal to 0.2 us."""
    azure = read_trace(TRACES / "AzureLLMInferenceTrace_conv.csv", options=ReadOptions(limit=3000))
    vidur = read_trace(TRACES / "vidur_splitwise_conv.csv")
    assert (azure.prompt_tokens == vidur.prompt_tokens).all()
    assert np.abs(azure.arrival_ns - vidur.arrival_ns).max() <= 200


@needs_shared
def test_sharegpt_tokens_are_counted() -> None:
    pytest.importorskip("tiktoken")
    want = json.loads((TRACES / "sharegpt_handwritten.expected.json").read_text())["per_record"]
    want = [record for record in want if len(record["roles"]) >= 2]
    counted = ReadOptions(tokenizer="cl100k_base")
    workload = read_trace(TRACES / "sharegpt_handwritten.json", options=counted)
    assert workload.prompt_tokens.tolist() == [record["tokens_cl100k"][0] for record in want]
    assert workload.output_tokens.tolist() == [record["tokens_cl100k"][1] for record in want]
    estimated = read_trace(TRACES / "sharegpt_handwritten.json")
    assert estimated.prompt_tokens[0] == round(54 / 4.54)
    assert any("estimated" in note for note in estimated.notes)


@needs_shared
def test_whole_chats_quote_their_history() -> None:
    path = TRACES / "sharegpt_v3_multi_turn_lengths.jsonl"
    workload = read_trace(path, options=ReadOptions(sessions="closed"))
    rows = np.flatnonzero(workload.session == 2)
    # human 12, gpt 40, human 150, gpt 425, human 8, gpt 51, ...
    assert workload.prompt_tokens[rows[:3]].tolist() == [12, 12 + 40 + 150, 12 + 40 + 150 + 425 + 8]
    assert workload.after[rows[:3]].tolist() == [-1, rows[0], rows[1]]
    assert workload.prompt(int(rows[1]))[1] == Span(answer_stream(int(rows[0])), 0, 40)
    assert len(rows) == 8  # nine gpt turns, of which one answers no question


@needs_shared
def test_a_folder_of_weka_sessions_shares_nothing_between_them() -> None:
    folder = TRACES / "weka_traces"
    summary = inspect_trace(folder)
    parts = [EXPECTED[f"weka_traces/{path.name}"] for path in folder.glob("*.json")]
    for key in ("requests", "sum_prompt", "distinct_blocks", "infinite_cache_prefix_hit_blocks"):
        assert getattr(summary, key) == sum(part[key] for part in parts)
    assert summary.facts["subagents"] == 2 and summary.sessions == 5
    whole = read_trace(folder, options=ReadOptions(subagents=True))
    assert len(whole) == summary.requests + 12
    agent = whole.prompt_tokens.sum() - summary.sum_prompt
    assert agent == 677_797  # totals.subagent_tokens.input of trace_0291


@needs_shared
def test_weka_turns_wait_for_the_answer_before_them() -> None:
    workload = read_trace(TRACES / "weka_traces" / "trace_0012.json")
    assert workload.after.tolist() == list(range(-1, 13))
    assert workload.think_ns[1:4].tolist() == [7 * 10**9, 6 * 10**9, 5 * 10**9]
    opened = read_trace(
        TRACES / "weka_traces" / "trace_0012.json", options=ReadOptions(sessions="open")
    )
    assert (opened.after == -1).all() and opened.arrival_ns[-1] == 199 * 10**9


@needs_shared
def test_aiperf_turns_follow_their_session() -> None:
    path = TRACES / "synthetic_aiperf_mooncake_sessions.jsonl"
    with pytest.raises(TraceError, match=":6: output_length: is missing"):
        read_trace(path)
    workload = read_trace(path, options=SKIP)
    assert workload.prompt_tokens.tolist()[:3] == [300, 300 + 40 + 150, 1300]
    assert workload.after.tolist() == [-1, 0, -1, -1, -1]
    assert workload.think_ns[1] == 2_500_000_000 and workload.arrival_ns[2] == 800_500_000
    assert workload.prompt(1)[:2] == (Span(0, 0, 300), Span(answer_stream(0), 0, 40))


@needs_shared
def test_servegen_keeps_rates_and_lengths() -> None:
    folder = TRACES / "servegen" / "multimodal" / "mm-image"
    rows = [line.split(",") for line in (folder / "chunk-29-trace.csv").read_text().split()]
    expected = sum(float(row[1]) * 600 for row in rows)
    counts = [len(read_trace(folder, options=ReadOptions(seed=seed))) for seed in range(5)]
    assert np.mean(counts) == pytest.approx(expected, rel=0.03)
    one, two = (read_trace(folder, options=ReadOptions(seed=1)) for _ in range(2))
    assert (one.arrival_ns == two.arrival_ns).all() and (
        one.output_tokens == two.output_tokens
    ).all()
    assert abs(np.corrcoef(one.prompt_tokens, one.output_tokens)[0, 1]) < 0.1
    early = read_trace(folder, options=ReadOptions(seed=1, duration_s=3600))
    assert (early.arrival_ns == one.arrival_ns[: len(early)]).all()
    assert early.arrival_ns[-1] < 3600 * 10**9 <= one.arrival_ns[len(early)]


def test_servegen_strings_are_never_evaluated(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text("0,1,1,Gamma,1,1\r\n43200,1,1,Gamma,1,1\r\n")
    text = (QUIRKS / "24_pdf_string_is_code_servegen.json").read_text()
    (tmp_path / "chunk-0-dataset.json").write_text(text)
    with pytest.raises(TraceError, match="nothing was evaluated"):
        read_trace(tmp_path)
    workload = read_trace(tmp_path, options=SKIP)
    assert set(workload.prompt_tokens.tolist()) == {12, 40}  # 43200 falls back to an idle window
    assert any("without a distribution of lengths" in note for note in workload.notes)


def test_a_vllm_benchmark_result_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    lists = {"input_lens": [10, 20], "output_lens": [5, 0], "start_times": [100.5, 101.25]}
    path.write_text(json.dumps({"date": "20260101-000000", "request_throughput": 2.0, **lists}))
    workload = read_trace(path)
    assert workload.arrival_ns.tolist() == [0, 750_000_000]
    assert any("failed in the benchmark: 1 request " in note for note in workload.notes)
    path.write_text(json.dumps({"request_throughput": 2.0}))
    with pytest.raises(TraceError, match="--save-detailed"):
        read_trace(path)


def plain_mooncake(num_rows: int) -> list[dict[str, object]]:
    return [
        {
            "timestamp": 5 * i,
            "input_length": 512 * (i % 3) + 9,
            "output_length": i,
            "hash_ids": [0, *range(i, i + 2)][: i % 3 + 1],
        }
        for i in range(num_rows)
    ]


def test_plain_rows_and_parsed_rows_are_the_same(tmp_path: Path) -> None:
    rows = plain_mooncake(50)
    plain, turned = tmp_path / "plain.jsonl", tmp_path / "turned.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    turned.write_text("".join(json.dumps(dict(reversed(row.items()))) + "\n" for row in rows))
    assert same(read_trace(plain), read_trace(turned))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"timestamp": 5,', '"timestamp": 05,', ":2: row: not JSON"),
        ("[0, 2, 3]", "[0, , 3]", ":3: row: not JSON"),
        ('"timestamp": 10,', '"timestamp": 99999999999999999999,', ":3: timestamp: 9999"),
        ('"input_length": 521,', '"input_length": 5210,', ":2: hash_ids: 2 ids where ceil"),
        ("]}\n{", "]} {", ":1: row: not JSON"),
    ],
)
def test_the_quick_way_is_no_more_lenient(tmp_path: Path, old: str, new: str, fault: str) -> None:
    path = tmp_path / "trace.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in plain_mooncake(20))
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TraceError, match=fault):
        read_trace(path)


# -- own format, packing, streaming ----------------------------------------------------------------


def same(one: Workload, two: Workload) -> bool:
    names = ("arrival_ns", "prompt_tokens", "output_tokens", "num_samples", "after", "think_ns")
    arrays = all(
        np.array_equal(getattr(one, name), getattr(two, name)) for name in (*names, "session")
    )
    spans = (one.spans is None) == (two.spans is None)
    if spans and one.spans is not None:
        spans = np.array_equal(one.spans, two.spans) and np.array_equal(
            one.span_offsets, two.span_offsets
        )
    return arrays and spans and one.request_ids == two.request_ids


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 6))
    whole = st.integers(0, 2**40)
    arrivals = sorted(draw(st.lists(whole, min_size=n, max_size=n)))
    after = [draw(st.integers(-1, i - 1)) for i in range(n)]
    spans, offsets, prompts = [], [0], []
    for i in range(n):
        streams = [*range(4), *(answer_stream(j) for j in range(i))]
        one = st.tuples(st.sampled_from(streams), st.integers(0, 99), st.integers(1, 99))
        row = draw(st.lists(one, min_size=1, max_size=3))
        spans += row
        offsets.append(len(spans))
        prompts.append(sum(length for _, _, length in row))
    has_spans = draw(st.booleans())
    names = st.text('ab," é\u2028#', min_size=1)
    ids = draw(st.lists(names, min_size=n, max_size=n, unique=True))
    return columns(
        np.array(arrivals),
        np.array(prompts),
        np.array(draw(st.lists(st.integers(0, 999), min_size=n, max_size=n))),
        num_samples=np.array(draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))),
        after=np.array(after),
        think_ns=np.array(draw(st.lists(whole, min_size=n, max_size=n))),
        session=np.array(draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n))),
        request_ids=ids if draw(st.booleans()) else None,
        spans=np.array(spans) if has_spans else None,
        span_offsets=np.array(offsets) if has_spans else None,
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_native_format_gives_back_what_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("native")

    @settings(max_examples=60, deadline=None)
    @given(workloads())
    def check(workload: Workload) -> None:
        path = folder / f"trace{suffix}"
        write_native(workload, path)
        assert same(read_trace(path, options=ReadOptions(sort=False)), workload)
        assert list(folder.iterdir()) == [path]

    check()


def read_by_conversion(path: Path, out: Path, options: ReadOptions) -> Workload:
    convert_trace(path, out, options=options)
    return read_trace(out)


@needs_shared
@pytest.mark.parametrize(
    "name",
    [
        "AzureLLMInferenceTrace_code.csv",
        "synthetic_burstgpt_v3.csv",
        "mooncake_synthetic_trace.jsonl",
        "synthetic_qwen_bailian_blksz_16.jsonl",
        "weka_traces/trace_0291.json",
        "synthetic_aiperf_mooncake_sessions.jsonl",
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_converted_trace_reads_the_same(tmp_path: Path, name: str, suffix: str) -> None:
    direct = read_trace(TRACES / name, options=SKIP)
    converted = read_by_conversion(TRACES / name, tmp_path / f"out{suffix}", SKIP)
    summary = inspect_trace(tmp_path / f"out{suffix}")
    assert (summary.format, summary.requests) == ("native", len(direct))
    if direct.spans is not None and converted.spans is not None:
        # private streams may have other numbers: compare which spans share a stream
        for workload in (direct, converted):
            _, numbers = np.unique(workload.spans[:, 0], return_inverse=True)
            workload.spans[:, 0] = _by_first_use(numbers)
    assert same(direct, converted)


def _by_first_use(numbers: np.ndarray) -> np.ndarray:
    seen: dict[int, int] = {}
    return np.array([seen.setdefault(int(number), len(seen)) for number in numbers])


def test_an_unfinished_conversion_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        convert_trace(QUIRKS / "05_unsorted_and_restart_ragpulse.jsonl", tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match=r"written as \.csv or \.parquet"):
        convert_trace(QUIRKS / "01_bom_azure.csv", tmp_path / "out.xlsx")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_packing_and_encoding_go_by_content(tmp_path: Path, encoding: str, is_packed: bool) -> None:
    data = NATIVE.replace("\n", "\r\n").encode(encoding)
    path = tmp_path / "trace.dat"
    path.write_bytes(gzip.compress(data) if is_packed else data)
    workload = read_trace(path)
    assert workload.request_ids == ["a", "b"]
    assert workload.arrival_ns.tolist() == [0, 1_250_000_000]


def test_a_block_edge_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"r{i},{i}.5,{i % 7},{i}\n" for i in range(2000))
    path = tmp_path / "trace.csv"
    path.write_text("request_id,arrival_s,prompt_tokens,output_tokens\n" + rows)
    whole = read_trace(path)
    monkeypatch.setattr("kvsim.workload.traces.csv_rows.CSV_BYTES", 97)
    assert same(read_trace(path), whole)
    records = json.dumps(
        [
            {"id": i, "conversations": [{"from": "human", "value": "é" * i}, {"value": 'x\\"'}]}
            for i in range(300)
        ],
        indent=1,
        ensure_ascii=False,
    )
    chats = tmp_path / "chats.json"
    chats.write_text(records)
    whole = read_trace(chats)
    monkeypatch.setattr("kvsim.workload.traces.json_array.PIECE_BYTES", 13)
    assert len(whole) == 300 and same(read_trace(chats), whole)


@pytest.mark.parametrize("end", range(60, 160, 7))
def test_a_cut_array_says_how_many_records_are_whole(tmp_path: Path, end: int) -> None:
    record = {"id": "a", "n": True, "conversations": [{"value": "\\u00e9 hi"}, {"value": "ok"}]}
    text = json.dumps([record] * 9)
    path = tmp_path / "cut.json"
    path.write_text(text[:end])
    complete = (end - 1) // (len(json.dumps(record)) + 2) if end > 0 else 0
    with pytest.raises(TraceError, match=f"truncated at byte {end}: {complete} complete records"):
        read_trace(path, "sharegpt")


def test_options_that_a_format_does_not_heed_are_refused() -> None:
    path = QUIRKS / "01_bom_azure.csv"
    with pytest.raises(TraceError, match="format azure has no use for it"):
        read_trace(path, options=ReadOptions(time_unit="s"))
    with pytest.raises(TraceError, match="'azur' is not one of auto"):
        read_trace(path, "azur")
    with pytest.raises(TraceError, match="no such file"):
        read_trace(QUIRKS / "nothing.csv")
    with pytest.raises(TraceError, match="tokenizer 'no-such'"):
        read_trace(
            QUIRKS / "06a_duplicate_ids_sharegpt.json", options=ReadOptions(tokenizer="no-such")
        )


def test_the_first_rows_alone_can_be_read() -> None:
    path = QUIRKS / "22_three_second_batches_mooncake.jsonl"
    workload, whole = read_trace(path, options=ReadOptions(limit=10)), read_trace(path)
    assert workload.prompt_tokens.tolist() == whole.prompt_tokens[:10].tolist()
    assert workload.spans is not None and len(workload.spans) == workload.span_offsets[-1] == 20


# -- damage ----------------------------------------------------------------------------------------

SEEDS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690+00:00,396,109\n",
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
    "Total tokens,Log Type\n5.0,abc,2,GPT-4,472,18,490,API log\n9,abc,2,GPT-4,1,2,3,x\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,5,6\n5.8926549999999995,7,8\n",
    "splitwise": "arrival_timestamp,prompt_size,token_size\n0.0,5,6\n",
    "native": "arrival_s,prompt_tokens,output_tokens,num_samples,session,after,think_s,spans\n"
    "0,5,6,1,-1,-1,0,3:0:5\n1,11,6,1,0,0,0.5,3:0:5;a0:0:6\n",
    "mooncake": '{"timestamp": 1, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2.5, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n',
    "aiperf": '{"session_id": "s", "timestamp": 0, "input_length": 5, "output_length": 4}\n'
    '{"session_id": "s", "delay": 3, "text_input": "hi there", "output_length": 4}\n',
    "qwen": '{"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 17, '
    '"output_length": 3, "hash_ids": [0, 1]}\n',
    "ragpulse": '{"timestamp": "27", "input_length": 31, "output_length": 12, "hash_ids": '
    '{"sys_prompt": [1]}, "session_id": "a"}\n',
    "weka": '{"id": "t", "block_size": 64, "requests": [{"t": 0.0, "in": 65, "out": 3, '
    '"hash_ids": [1], "api_time": 1.5, "think_time": 0.5}, {"type": "subagent", "t": 1, '
    '"requests": [{"t": 0, "in": 5, "out": 1}]}]}',
    "llmservingsim": '{"input_toks": 5, "output_toks": 6, "arrival_time_ns": 7}\n{"arrival_time_ns"'
    ': 9, "sub_requests": [{"input_toks": 5, "output_toks": 6, "tool_duration_ns": 3}]}\n',
    "vllm_bench": '{"input_lens": [1, 2], "output_lens": [3, 4], "start_times": [0.5, 1.5]}',
    "vllm_measured": '{"request_id": "a", "input_toks": 5, "output_toks": 6, "queued_ts": 1.5}\n',
    "sharegpt": '[{"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt",'
    ' "value": "ho"}]}, {"items": ["{\\"value\\": \\"x\\"}", {"role": "u", "content": "y"}]}]',
    "sharegpt_lengths": '{"conversation": 0, "turns": [["human", 62], ["gpt", 398]]}\n',
    "servegen": "0,0.05,1.5,Gamma,0.39,51.9\r\n600,0.05,1.5,Weibull,0.9,20\r\n",
}
TOKENS = [
    b"",
    b",",
    b'"',
    b"\n",
    b"-1",
    b"nan",
    b"1e999",
    b"9" * 40,
    b"null",
    b"[]",
    b"{}",
    b"\xff",
]
TOKENS += [
    b"0",
    b"true",
    b"\x00",
    b"[" * 3000,
    b"1.5",
    b"\xe2\x80\xa8",
    b"1_0",
    b"\xd9\xa3",
    b'"a"',
]


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        data[start:end] = draw(st.sampled_from(TOKENS) | st.binary(max_size=4))
    return bytes(data)


def only_trace_errors(path: Path, format_name: str) -> None:
    lenient = ReadOptions(skip_bad_rows=True, sort=True, rebase=True)
    for name in (format_name, "auto"):
        for options in (ReadOptions(), lenient):
            try:
                workload = read_trace(path, name, options=options)
            except TraceError as error:
                assert str(error) and len(str(error)) < 4000
                continue
            assert len(workload) and (workload.prompt_tokens >= 0).all()
            assert (workload.after < np.arange(len(workload))).all()
            assert (workload.arrival_ns >= 0).all() and (workload.think_ns >= 0).all()
            if workload.spans is not None:
                ends = workload.span_offsets
                total = np.concatenate([[0], np.cumsum(workload.spans[:, 2])])
                assert (total[ends[1:]] - total[ends[:-1]] == workload.prompt_tokens).all()
    with contextlib.suppress(TraceError):
        inspect_trace(path, format_name)


@pytest.mark.parametrize("format_name", sorted(FORMATS))
def test_only_trace_errors_leave_a_reader(tmp_path: Path, format_name: str) -> None:
    is_pair = format_name == "servegen"
    path = tmp_path / ("chunk-1-trace.csv" if is_pair else "trace")
    dataset = b'{"0": {"input_tokens": "{5: 0.5, 6: 0.5}", "output_tokens": "{3: 1.0}"}}'
    seed = SEEDS[format_name].encode()
    if is_pair:
        (tmp_path / "chunk-1-dataset.json").write_bytes(dataset)
    path.write_bytes(seed)
    assert len(read_trace(path, format_name))
    assert len(read_trace(path)) == len(read_trace(path, format_name))

    @settings(
        max_examples=80,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )
    @given(damaged(seed) | st.binary(max_size=60), damaged(dataset))
    def check(data: bytes, lengths: bytes) -> None:
        path.write_bytes(data)
        if is_pair:
            (tmp_path / "chunk-1-dataset.json").write_bytes(lengths)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            only_trace_errors(path, format_name)

    check()


def test_damaged_gzip_and_parquet_are_trace_errors(tmp_path: Path) -> None:
    packed = gzip.compress(NATIVE.encode())
    write_native(read_trace(QUIRKS / "01_bom_azure.csv"), tmp_path / "good.parquet")
    parquet = (tmp_path / "good.parquet").read_bytes()
    path = tmp_path / "bad"

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(damaged(packed) | damaged(parquet))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        only_trace_errors(path, "native")

    check()
