"""`kvsim plan` and `kvsim doctor` as a user types them, against figures from outside the code."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvsim.cli import app
from kvsim.errors import ConfigError, UserError
from kvsim.memory.kv import Group, Layout, Pool
from kvsim.plan.flags import FLAGS, other_flags
from kvsim.plan.plan import make_plan
from kvsim.plan.reading import read_asked
from kvsim.plan.steady import Flow, Replica, limits_of, room, state_at
from tests.kv_capacity import CASES, read_cases
from tests.test_start_log import APHRODITE, ERROR, METRICS, V0, V1, coloured, wrapped

STARTS = ("    kvsim plan ", "    kvsim doctor ")


def run(*words: str, stdin: str | None = None, status: int = 0) -> str:
    done = CliRunner().invoke(app, list(words), input=stdin)
    if isinstance(done.exception, UserError):
        assert status == 1
        return str(done.exception)
    assert done.exit_code == status, done.output
    return done.output


def figures(line: str, status: int = 0) -> dict:
    return json.loads(run("plan", *shlex.split(line), "--json", status=status))


# worked answers of people who asked


def test_five_people_with_128k_on_a_70b_need_40_gib_each():
    # 327,680 B a token, 40.0 GiB a user (vllm#12400)
    found = figures("llama-3-70b --gpu b200 -tp 8 --max-model-len 131072")
    assert found["block_bytes"] * 8 / 16 == 327_680
    assert found["needed_gib"] * 8 == 40.0
    half = figures("llama-3-70b --gpu b200 -tp 8 --max-model-len 131072 --kv-cache-dtype fp8")
    assert half["needed_gib"] * 8 == 20.0


def test_a_405b_is_516096_bytes_a_token():
    found = figures("llama-3.1-405b --gpu h100 -tp 8 --max-model-len 120000 -q fp8")
    assert found["block_bytes"] * 8 / 16 == 516_096
    assert found["needed_gib"] * 8 == pytest.approx(57.7, abs=0.05)


def test_two_requests_fill_a_48_gb_card_and_max_num_seqs_never_mattered():
    # QwQ-32B FP8, 32,000 of context, max_num_seqs 20: 1.2 requests (vllm#14412)
    line = "qwq-32b-fp8 --gpu a6000 --max-model-len 32000 --max-num-seqs 20 --engine vllm@0.8"
    found = figures(line)
    assert found["requests_at_once"] == pytest.approx(1.2, abs=0.25)
    screen = run("plan", *shlex.split(line))
    assert "binding limit: KV memory: 1." in screen and "max_num_seqs 20" in screen


def test_70b_fp8_on_one_80_gb_card_does_not_start_at_16k():
    # llm-d-benchmark#621
    line = "llama-3.3-70b -q fp8 --gpu h100 --max-model-len 16384 --gpu-memory-utilization 0.95"
    found = figures(f"{line} --engine vllm@0.8", status=0)
    assert not found["starts"] and found["remedies"]
    assert "DOES NOT START" in run(
        "plan", *shlex.split(line), "--engine", "vllm@0.8", "--check", status=1
    )


def test_a_negative_pool_is_shown_as_negative():
    # 8 GB card: 5.60 - 5.20 - 1.42 = -1.05 GiB (vllm#13882)
    line = "qwen2.5-7b-instruct-awq --gpu rtx-4060-8gb --gpu-memory-utilization 0.7"
    line += " --max-model-len 4096 --weights-gib 5.2032 --engine vllm@0.6"
    assert figures(line)["gib"]["kv"] == pytest.approx(-1.05, abs=0.1)
    screen = run("plan", *shlex.split(line))
    assert "-1.0" in screen and "starts gpu_memory_utilization 0.95" in screen


def test_14b_does_not_take_tensor_parallel_5():
    # Qwen3-14B TP5 is rejected (llm-d-planner accuracy report)
    text = run("plan", "qwen3-14b", "--gpu", "h100", "-tp", "5", status=1)
    assert "tensor parallel 5 does not divide" in text and "1, 2, 4, 8" in text


def test_windows_get_a_table_and_no_bytes_of_a_token():
    # of a sliding-window model there is no one figure a token (vllm#43308, #51041)
    found = figures("gemma-3-27b-it --gpu h100 -tp 2")
    short, *_, long = found["requests_at_once_by_tokens"].values()
    assert short / long < 131_072 / 2048 / 4
    assert "B/token" not in run("plan", "gemma-3-27b-it", "--gpu", "h100", "-tp", "2")


def test_auto_is_the_longest_that_fits():
    found = figures("qwen3-32b-awq --gpu 4090 --max-model-len auto")
    assert found["starts"] and found["limits"]["max_model_len"] < 40_960
    longer = found["limits"]["max_model_len"] + 16
    assert not figures(f"qwen3-32b-awq --gpu 4090 --max-model-len {longer}")["starts"]


CASES_BY_ID = {case["id"]: case for case in read_cases()} if CASES.is_file() else {}


@pytest.mark.skipif(not CASES_BY_ID, reason="needs the published cases")
def test_the_pool_of_a_public_log_comes_out_of_its_terms():
    case = CASES_BY_ID["v0-r1q7b-v100-32"]
    line = (
        f"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --dtype half --gpu v100-32gb --engine vllm@0.7"
        f" --gpu-memory-gib {case['gpu_total_gib']} --gpu-memory-utilization {case['gmu']}"
        f" --weights-gib {case['weights_gib']} --activation-gib {case['activation_gib']}"
        f" --runtime-gib {case['non_torch_gib']} --max-model-len {case['max_model_len']}"
    )
    found = figures(line)
    assert found["gib"]["kv"] == pytest.approx(case["avail_kv_gib"], abs=0.015)
    assert found["num_blocks"] == pytest.approx(case["gpu_blocks"], rel=0.002)
    assert found["requests_at_once"] == pytest.approx(case["max_concurrency"], rel=0.002)


# serve lines


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve Qwen/Qwen3-32B --tensor-parallel-size=4 --max-model-len 16k --port 80",
        "CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=x nohup /opt/bin/vllm serve Qwen/Qwen3-32B \\\n  -tp 4 "
        "\\\n  --max_model_len 16k --served-model-name a b --trust-remote-code > log 2>&1 &",
        "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B -tp 4 "
        "--max-model-len 16000 --disable-log-requests",
        "docker run --gpus all -v ~/.c:/root/.c -p 8000:8000 --ipc=host "
        "vllm/vllm-openai:latest --model Qwen/Qwen3-32B -tp 4 --max-model-len 16k -O3",
        "—tensor-parallel-size 4 --model Qwen/Qwen3-32B --max-model-len 16k # as before",
    ],
)
def test_a_pasted_line_is_read_in_all_its_forms(line):
    asked = read_asked(["--serve", line]).asked
    assert (asked.model, asked.tensor_parallel_size) == ("Qwen/Qwen3-32B", 4)
    assert asked.max_model_len == 16_000


def test_an_images_tag_is_the_engine_and_flags_beside_a_line_go_before_it():
    line = "docker run vllm/vllm-openai:v0.19.1 --model m --max-model-len 16K --enable-lora"
    reading = read_asked(["--serve", line, "--max-model-len", "1k"])
    assert (reading.asked.engine, reading.asked.max_model_len) == ("vllm@0.19.1", 1000)
    assert reading.unmodelled == ["--enable-lora"]
    assert read_asked(["--serve", line]).asked.max_model_len == 16_384


def test_all_faults_come_at_once_with_the_nearest_flag():
    line = "vllm serve m --max-modle-len 3 -tp 0 --gpu-memory-utilization 9"
    with pytest.raises(ConfigError) as caught:
        read_asked(["--serve", line, "--rate", "x"])
    text = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 4
    for part in ("nearest is --max-model-len", "-tp: '0'", "not in 0..1", "--rate: 'x'"):
        assert part in text
    for line in ("sglang serve m", "vllm serve 'm", "vllm serve m --port", "vllm serve a b"):
        with pytest.raises(ConfigError, match="--serve: "):
            read_asked(["--serve", line])


def test_what_is_not_in_the_catalogue_is_named_all_at_once():
    text = run("plan", "qwen9-1b", "--gpu", "a100", "--engine", "vlm", status=1)
    for part in ("nearest is 'qwen", "config.json", "a100-40gb, a100-80gb", "vllm@VERSION"):
        assert part in text


def test_a_yaml_file_has_the_flags_as_keys(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("model: llama-3-8b\ngpu: h100\nmax-model-len: 4k\n")
    assert figures(f"{file} --max-model-len 2k")["limits"]["max_model_len"] == 2000
    assert figures(f"{file}")["limits"]["max_model_len"] == 4000
    file.write_text("model: llama-3-8b\ngpuu: h100\nmax_num_seqs: many\nrate: true\n")
    with pytest.raises(ConfigError) as caught:
        read_asked([str(file)])
    assert [fault.partition(": ")[0] for fault in caught.value.faults] == [
        f"{file}:{n}" for n in (2, 3, 4)
    ]
    assert "nearest is 'gpu'" in caught.value.faults[0]


def test_no_flag_is_listed_twice():
    others = other_flags()
    assert not set(FLAGS) & (others.switches | others.values)
    assert not others.switches & others.values


WORDS = st.sampled_from(
    ["vllm", "serve", "docker", "run", "qwen3-8b", "-tp", "--max-model-len", "--gpu", "h100", "0",
     "-1", "1e400", "nan", "=", "--", "-", "--=", "'", '"', "\\", "|", "--no-", "--shape", "#",
     "16k", "--port", "--kv-cache-dtype", "x.yaml", "\x00", "--enforce-eager=maybe", "-O3", "auto"]
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS | st.text(max_size=12), max_size=12), st.booleans())
def test_any_line_is_read_or_refused_in_words(words, is_pasted):
    try:
        line = ["--serve", " ".join(words), "--gpu", "h100"] if is_pasted else words
        make_plan(read_asked(line))
    except UserError as error:
        assert str(error)


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("server.log").write_text(V0)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    lines = [line for line in readme.splitlines() if line.startswith(STARTS)]
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert len(commands) == 2
    for words in commands:
        assert "binding limit: KV memory" in run(*words)


def test_a_plan_takes_under_a_second():
    line = [sys.executable, "-m", "kvsim", "plan", "gemma-3-27b-it", "--gpu", "h100"]
    line += ["--input-len", "1200", "--output-len", "300", "--rate", "2"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(line, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 1.0


# the steady state


def test_a_steady_flow_obeys_little_and_its_limits_come_in_order():
    # a step of 10 ms whatever its load: 101 tokens take 10 ms to the first, 1 s to the last
    pool = Pool(Layout((Group(16, None, False),), 1), 10_000, 2048)
    replica = Replica(pool, 50, 2048, lambda load: 0.01)
    flow = Flow(160, 101)
    state = state_at(flow, replica, 2.0)
    assert state.tpot_s == pytest.approx(0.01)
    assert state.e2el_s - state.ttft_s == pytest.approx(1.0)
    assert state.running == pytest.approx(2.0 * state.e2el_s)
    assert limits_of(flow, replica)[0].name == "max_num_seqs"
    assert limits_of(flow, replica)[0].rate_per_s == pytest.approx(50 / 1.02, rel=0.02)
    assert room(flow, pool, 50).by_mean == pytest.approx(10_000 / 14)


def test_steps_that_cannot_keep_up_have_no_steady_state():
    pool = Pool(Layout((Group(16, None, False),), 1), 10**6, 2048)
    # 1 ms a prompt token: 160 of them a request, so 6.25 requests a second at most
    replica = Replica(pool, 10_000, 2048, lambda load: 0.001 + 0.001 * load.prompt_tokens)
    flow = Flow(160, 2)
    assert state_at(flow, replica, 5.0) is not None
    assert state_at(flow, replica, 6.3) is None
    assert limits_of(flow, replica)[-1].rate_per_s == pytest.approx(6.25, rel=0.1)


def test_no_more_run_than_the_pool_admits_and_the_rest_is_said():
    # a plan that forgot the reserve had 96 in a batch, 29 were admitted (aiconfigurator#1396)
    line = "deepseek-v3 --gpu h200 -tp 8 --max-model-len 65536 --input-len 4000 --output-len 1000"
    found = figures(f"{line} --users 200")
    most = found["workload"]["by_mean"]
    assert found["workload"]["state"]["running"] == pytest.approx(most, rel=0.01)
    assert most < 200 and not found["fits"]
    assert "wait for KV memory" in run("plan", *shlex.split(f"{line} --users 200"))
    over = f"{line} --rate 50"
    assert figures(over)["workload"]["state"] is None
    assert "wait ever longer" in run("plan", *shlex.split(over), "--check", status=1)


# the doctor


def test_a_log_is_reproduced_and_its_constants_come_back(tmp_path):
    log, out = tmp_path / "v0.log", tmp_path / "learnt.yaml"
    log.write_text(wrapped(coloured(V0)))
    text = run("doctor", str(log), "--gpu", "a100-40gb", "--calibrate", str(out))
    assert "5,690 to 5,696" in text and "max_num_seqs 2,0" in text
    assert "no figure contradicts another" in text
    found = figures(str(out))
    assert found["gib"]["kv"] == pytest.approx(11.12, abs=0.005)
    assert found["num_blocks"] == pytest.approx(5691, abs=3)
    assert "already exists" in run("doctor", str(log), "--calibrate", str(out), status=1)


def test_each_kind_of_log_is_read_from_stdin():
    text = run("doctor", "-", stdin=V1)
    assert "178,880" in text and "agrees" in text
    text = run(
        "doctor", "-", "--model", "qwen3-8b", "--gpu", "3090", "--check", stdin=ERROR, status=1
    )
    assert "FAILS" in text and "-0.92 GiB" in text and "remedies" in text
    assert "573" in run("doctor", "-", stdin=METRICS)
    text = run("doctor", "-", "--model", "pixtral-12b", stdin=APHRODITE)
    assert "7,259" in text and "contradicts" in text
    assert "no figure" in run("doctor", "-", stdin="hello")
    assert "cannot be read" in run("doctor", str(Path("no") / "such"), status=1)


def test_one_changed_figure_is_a_contradiction():
    text = run("doctor", "-", stdin=V0.replace("11.12x", "11.92x"))
    assert "CONTRADICTION" in text and "11.92" in text


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.integers(0, len(V0)), st.integers(0, 60))
def test_any_log_is_read_or_refused_in_words(noise, place, gone):
    text = V0[:place] + noise + V0[place + gone :]
    done = CliRunner().invoke(app, ["doctor", "-", "--gpu", "h100"], input=text)
    assert done.exit_code == 0 or isinstance(done.exception, UserError), done.exception
