"""Start-up logs and /metrics pages, as people paste them."""

from __future__ import annotations

import pytest

from kvsim.memory import find_engine, find_model, findings
from kvsim.memory.kv import Limits, layout
from kvsim.memory.start_log import read_start_log

V0 = """\
INFO 01-13 11:35:10 llm_engine.py:234] Initializing an LLM engine (v0.6.6.post1) with config: \
model='meta-llama/Meta-Llama-3-8B', dtype=torch.bfloat16, max_seq_len=8192, \
tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=False, \
kv_cache_dtype=auto
INFO 01-13 11:35:21 model_runner.py:1099] Loading model weights took 14.9595 GB
INFO 01-13 11:35:23 worker.py:241] the current vLLM instance can use total_gpu_memory (39.50GiB) \
x gpu_memory_utilization (0.90) = 35.55GiB
INFO 01-13 11:35:23 worker.py:241] model weights take 14.96GiB; non_torch_memory takes 0.10GiB; \
PyTorch activation peak memory takes 9.37GiB; the rest of the memory reserved for KV Cache is \
11.12GiB.
INFO 01-13 11:35:23 gpu_executor.py:76] # GPU blocks: 5691, # CPU blocks: 2048
INFO 01-13 11:35:23 gpu_executor.py:80] Maximum concurrency for 8192 tokens per request: 11.12x
"""
V1 = """\
(EngineCore pid=812) INFO 05-02 09:10:11 [core.py:58] Initializing a V1 LLM engine (v0.19.0) \
with config: model='Qwen/Qwen3-235B-A22B-FP8', dtype=torch.bfloat16, max_seq_len=40960, \
tensor_parallel_size=4, pipeline_parallel_size=1, quantization=fp8, enforce_eager=True
(Worker_TP0 pid=900) INFO 05-02 09:11:11 [gpu_worker.py:104] Available KV cache memory: 8.11 GiB
(Worker_TP1 pid=901) INFO 05-02 09:11:11 [gpu_worker.py:104] Available KV cache memory: 8.02 GiB
(EngineCore pid=812) INFO 05-02 09:11:12 [kv_cache_utils.py:829] GPU KV cache size: 178,880 tokens
(EngineCore pid=812) INFO 05-02 09:11:12 [kv_cache_utils.py:833] Maximum concurrency for 40,960 \
tokens per request: 4.37x
"""
ERROR = """\
ValueError: To serve at least one request with the models's max seq len (32768), (4.50 GiB KV \
cache is needed, which is larger than the available KV cache memory (3.58 GiB). Based on the \
available memory, the estimated maximum model length is 26032. Try increasing \
`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""
METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False",\
gpu_memory_utilization="0.82",num_cpu_blocks="1024",num_gpu_blocks="573",\
swap_space_bytes="4294967296"} 1.0
"""

APHRODITE = """\
INFO:     GPU memory breakdown:
INFO:       Total GPU memory: 47.53 GiB
INFO:       Memory utilization: 90%
INFO:       Model weights: 23.87 GiB
INFO:       Reserved for KV cache: 17.72 GiB
INFO:       KV cache for 8192 tokens: 1.25 GiB
INFO:       Wasted memory: 0.11 GiB
INFO:       Peak activations memory: 1.08 GiB
INFO:     # GPU blocks: 7259, # CPU blocks: 1638
INFO:     Minimum concurrency: 14.18x
INFO:     Maximum sequence length allowed in the cache: 116144
"""


def coloured(text: str) -> str:
    return text.replace("INFO", "\x1b[32mINFO\x1b[0m")


def wrapped(text: str) -> str:
    """As a terminal of 60 columns breaks it, at spaces."""
    out = []
    for line in text.splitlines():
        words, width = line.split(" "), 0
        for word in words:
            out.append(word)
            width += len(word) + 1
            out.append("\n  " if width > 60 else " ")
            width = 0 if width > 60 else width
        out.append("\n")
    return "".join(out)


def unprefixed(text: str) -> str:
    return "\n".join(line.partition("] ")[2] or line for line in text.splitlines())


@pytest.mark.parametrize("damage", [str, coloured, wrapped, unprefixed])
def test_a_v0_log_gives_every_term_of_its_sum(damage):
    log = read_start_log(damage(V0))
    printed = log.printed
    assert (printed.total_gib, printed.gpu_memory_utilization) == ("39.50", 0.9)
    terms = (printed.weights_gib, printed.runtime_gib, printed.activation_gib, printed.kv_gib)
    assert terms == ("14.96", "0.10", "9.37", "11.12")
    assert (printed.num_blocks, printed.num_host_blocks) == (5691, 2048)
    assert (printed.max_model_len, printed.concurrency) == (8192, "11.12")
    model = find_model("llama-3-8b")
    cut = layout(model, model.layers, find_engine("vllm-0.1"), Limits(8192))
    assert findings(printed, cut) == []
    assert findings(printed._replace(concurrency="11.21"), cut) != []


@pytest.mark.parametrize("damage", [str, coloured, wrapped])
def test_a_v1_log_gives_each_rank_and_how_it_was_started(damage):
    log = read_start_log(damage(V1))
    assert log.kv_gib_by_rank == ("8.11", "8.02")
    assert (log.printed.kv_gib, log.printed.tokens) == ("8.02", 178_880)
    assert (log.engine_version, log.model) == ("0.19.0", "Qwen/Qwen3-235B-A22B-FP8")
    assert (log.tensor, log.pipeline, log.quantization) == (4, 1, "fp8")
    assert (log.dtype, log.enforce_eager) == ("bfloat16", True)
    model = find_model(log.model)
    cut = layout(model, model.layers, find_engine("vllm-0.16"), Limits(40_960), tensor=4)
    assert findings(log.printed, cut, num_ranks=4) == []


def test_an_error_text_gives_what_was_needed():
    printed = read_start_log(wrapped(ERROR)).printed
    assert (printed.needed_gib, printed.kv_gib) == ("4.50", "3.58")
    assert (printed.max_model_len, printed.estimated_max_len) == (32_768, 26_032)
    model = find_model("qwen3-8b")
    cut = layout(model, model.layers, find_engine("vllm-0.8"), Limits(32_768))
    assert [finding.kind for finding in findings(printed, cut)] == ["fails"]


def test_the_breakdown_of_a_fork_is_read_too():
    printed = read_start_log(coloured(APHRODITE)).printed
    assert (printed.total_gib, printed.gpu_memory_utilization) == ("47.53", 0.9)
    assert (printed.kv_gib, printed.num_blocks, printed.tokens) == ("17.72", 7259, 116_144)
    model = find_model("pixtral-12b")
    cut = layout(model, model.layers, find_engine("vllm-0.1"), Limits(8192))
    assert findings(printed, cut) == []


def test_a_metrics_page_gives_the_pool():
    log = read_start_log(METRICS)
    assert (log.printed.num_blocks, log.printed.num_host_blocks) == (573, 1024)
    assert (log.printed.swap_gib, log.printed.gpu_memory_utilization) == (4.0, 0.82)
    assert (log.block_size, log.kv_dtype) == (16, "auto")
    none = METRICS.replace('num_gpu_blocks="573"', 'num_gpu_blocks="None"')
    assert read_start_log(none).printed.num_blocks is None


def test_the_last_start_of_a_log_counts_and_nothing_is_made_up():
    log = read_start_log(V0 + V1)
    assert log.printed.tokens == 178_880
    assert log.printed.total_gib is None
    assert set(read_start_log("hello")) == {read_start_log("").printed, (), None}
