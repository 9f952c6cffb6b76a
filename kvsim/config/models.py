"""Config models: one experiment, whose YAML has this shape key by key."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from kvsim.config.base import Model, PositiveInt, Share
from kvsim.config.workloads import SyntheticWorkload, TraceWorkload
from kvsim.errors import ConfigError
from kvsim.latency.catalog import find_device, find_engine_costs, find_kernels, with_constants
from kvsim.latency.demand import operators
from kvsim.latency.roofline import EngineCosts, Machine
from kvsim.memory.catalog import find_model
from kvsim.memory.weights import Parallel, check_parallel

DEFAULT_KIND = "linear"  # of a step time, the one choice whose kind may be left out
Milliseconds = Annotated[float, Field(gt=0, le=1e12)]


PerStep = Annotated[float, Field(ge=0, le=1e6)]
TableTokens = Annotated[list[PositiveInt], Field(min_length=2, max_length=1000)]
TableMs = Annotated[list[PerStep], Field(min_length=2, max_length=1000)]


class LinearStepTime(Model):
    """base + prompt_step (if the step has prompt tokens) + per_prompt_token * prompt tokens
    + per_seq * sequences + per_context_token * context tokens of its decodes; and a time for each
    block that the step swaps in, swaps out or copies, which its work waits for."""

    kind: Literal["linear"] = "linear"
    base_ms: Annotated[float, Field(ge=1e-6, le=1e6)]
    per_seq_ms: PerStep
    per_context_token_us: PerStep
    per_prompt_token_ms: PerStep
    prompt_step_ms: PerStep = 0.0
    swap_in_block_us: PerStep = 0.0
    swap_out_block_us: PerStep = 0.0
    copy_block_us: PerStep = 0.0


class TableStepTime(Model):
    """For a step of decodes alone the entry of `ms` at their number in `tokens`; for one with
    prompts the entry of `prompt_ms` at the number of all its tokens in `prompt_tokens`; straight
    lines between entries and on from the last two, but no lower than the last. Then + per_seq *
    sequences + per_context_token * context tokens of its decodes + per_chunk * chunks of prompts
    + per_pair * pairs of a prompt token and a token that it attends to; and blocks moved, as in
    linear. `python -m gpu_backend compare` fits it."""

    kind: Literal["table"]
    tokens: TableTokens
    ms: TableMs
    prompt_tokens: TableTokens
    prompt_ms: TableMs
    per_seq_ms: PerStep
    per_context_token_us: PerStep
    per_chunk_ms: PerStep
    per_pair_us: PerStep
    swap_in_block_us: PerStep = 0.0
    swap_out_block_us: PerStep = 0.0
    copy_block_us: PerStep = 0.0

    @model_validator(mode="after")
    def _tokens_rise_from_one(self) -> TableStepTime:
        for prefix in ("", "prompt_"):
            tokens, ms = getattr(self, f"{prefix}tokens"), getattr(self, f"{prefix}ms")
            if tokens[0] != 1:
                raise ValueError(f"{prefix}tokens must begin with 1, not {tokens[0]}")
            if fallen := [(a, b) for a, b in pairwise(tokens) if b <= a]:
                a, b = fallen[0]
                raise ValueError(f"{prefix}tokens must rise: {b} comes after {a}")
            if len(tokens) != len(ms):
                raise ValueError(f"{len(tokens)} {prefix}tokens and {len(ms)} {prefix}ms: must be "
                                 "as many")  # fmt: skip
        return self


class RooflineStepTime(Model):
    """A roofline of every operator of the model, with fixed costs of a layer and a step, from the
    constants of the GPU and the engine that are built in (kvsim/catalog/step_time.yaml), with those
    of `constants` in their place, as `kvsim fit` writes them; and blocks moved, as in linear."""

    kind: Literal["roofline"]
    model: Annotated[str, Field(description="name in the catalogue, as Llama-3.1-8B")]
    gpu: str
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    quantization: Annotated[
        str | None, Field(description="format of the weights, as fp8; as published unless set")
    ] = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    engine: Annotated[
        str | None, Field(description="engine costs over the kernels', as vllm-0.12.0/h100/bf16")
    ] = None
    constants: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=dict)
    swap_in_block_us: PerStep = 0.0
    swap_out_block_us: PerStep = 0.0
    copy_block_us: PerStep = 0.0

    @model_validator(mode="after")
    def _names_are_known(self) -> RooflineStepTime:
        try:
            self.machine()
        except ConfigError as error:
            raise ValueError("; ".join(error.faults)) from None
        return self

    def machine(self) -> Machine:
        """Raises ConfigError."""
        shape = find_model(self.model, self.quantization)
        check_parallel(shape, Parallel(self.tensor_parallel_size))
        kv_bytes = 1 if self.kv_cache_dtype == "fp8" else 2
        return Machine(
            operators(shape, self.tensor_parallel_size, kv_bytes=kv_bytes),
            find_device(self.gpu),
            *with_constants(
                find_kernels(self.gpu),
                find_engine_costs(self.engine) if self.engine else EngineCosts(),
                self.constants,
            ),
        )


def _kind_of(value: Any) -> str | None:
    """A step time that says nothing of its kind is linear."""
    if isinstance(value, dict):
        return value.get("kind", DEFAULT_KIND)
    return getattr(value, "kind", None)


StepTime = Annotated[
    Annotated[LinearStepTime, Tag("linear")]
    | Annotated[TableStepTime, Tag("table")]
    | Annotated[RooflineStepTime, Tag("roofline")],
    Discriminator(_kind_of),
]


class Engine(Model):
    """The scheduler and the machine under it. A preset gives the pool, max_model_len and
    step_time; what is set here goes before it."""

    preset: Literal["llama-2-7b/a100-80gb", "llama-3-8b/h100", "opt-13b/a100-40gb"] | None = None
    step_time: StepTime | None = None
    max_model_len: PositiveInt | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    max_num_batched_tokens: PositiveInt = 8192
    chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[
        int,
        Field(ge=0, le=1_000_000_000, description="longest chunk of a prompt in a step; 0: none"),
    ] = 0
    rules: Annotated[
        Literal[
            "vllm-0.33", "vllm-0.26", "vllm-0.20", "vllm-0.11", "vllm-0.8", "vllm-0.2", "paper",
            "trtllm-guaranteed-no-evict", "trtllm-max-utilization",
        ],
        Field(
            description="whose scheduling rules apply to paged caches: a version of vLLM, one of "
            "TensorRT-LLM's capacity policies, or the paper's system (as vllm-0.2, groups "
            "preempted whole by recompute or swap, but prompts and decodes share a step)"
        ),
    ] = "vllm-0.33"  # fmt: skip
    admission: Annotated[
        Literal["chunk", "full_prompt", "full_prompt+max_output"] | None,
        Field(
            description="the room that a request must find in a paged cache to enter: its first "
            "chunk, all its known tokens, or also all that it and those running may yet write up "
            "to max_tokens (nobody is preempted then); as the rules say unless set"
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Field(description="priority: lower goes first, and preempts whoever is lowest in rank"),
    ] = "fcfs"
    batching: Literal["continuous", "static"] = "continuous"
    jump: Annotated[
        bool, Field(description="advance steady decodes at once; the results do not depend on it")
    ] = True


class Contiguous(Model):
    """One region a request, reserved whole: before PagedAttention."""

    kind: Literal["contiguous"]
    reserve: Literal["max", "pow2", "oracle", "fixed"]
    reserve_tokens: PositiveInt | None = None
    placement: Literal["buddy", "first_fit", "best_fit"] = "buddy"

    @model_validator(mode="after")
    def _tokens_go_with_fixed(self) -> Contiguous:
        if (self.reserve == "fixed") != (self.reserve_tokens is not None):
            raise ValueError("reserve_tokens goes with reserve: fixed, and only with it")
        return self


class Paged(Model):
    """Blocks on demand; every answer has its own. Admission leaves the share `watermark` of the
    pool free."""

    kind: Literal["paged"]
    watermark: Share = 0.0


class PagedSharing(Model):
    """Blocks on demand, shared: parallel answers and beams fork with copy-on-write, and with
    prefix_caching blocks are found again by their tokens. With registered_prefixes (rules
    vllm-0.2 and paper) the full blocks of every prefix that the prompts of two sessions at least
    begin with are in the pool for the whole run, and are computed by none of them."""

    kind: Literal["paged_sharing"]
    watermark: Share = 0.0
    prefix_caching: Annotated[
        bool | None, Field(description="on unless the rules are older than prefix caching")
    ] = None
    prefix_index: Annotated[
        Literal["hash_chain", "radix"],
        Field(
            description="hash_chain: full blocks by hash, as vLLM; radix: a tree as SGLang's, "
            "whose hits may end inside a block"
        ),
    ] = "hash_chain"
    registered_prefixes: bool = False


Policy = Annotated[Contiguous | Paged | PagedSharing, Field(discriminator="kind")]


class KV(Model):
    """The pool, num_blocks * block_size token slots, and who hands it out. The preset's pool is
    kept in tokens when block_size changes."""

    policy: Policy
    block_size: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    num_blocks: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    bytes_per_token: Annotated[
        int | None,
        Field(ge=1, le=1_000_000_000, description="KV of one token, all layers; as the preset's"),
    ] = None
    num_host_blocks: Annotated[
        int | None,
        Field(ge=0, le=100_000_000, description="swap space of vllm-0.2 and paper; as num_blocks"),
    ] = None


class Measure(Model):
    """The window that figures are about, and how waste is booked (`kvsim run --help`)."""

    warmup_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    cooldown_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    stop_s: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    booking: Literal["paper", "common"] = "paper"

    @model_validator(mode="after")
    def _window_is_not_empty(self) -> Measure:
        if self.stop_s is not None and self.warmup_s + self.cooldown_s >= self.stop_s:
            raise ValueError("warmup_s and cooldown_s leave nothing of stop_s")
        return self


class Slo(Model):
    """Limits that a good request meets, all of them."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2el_ms: Milliseconds | None = None


class Replicas(Model):
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    routing: Literal["round_robin", "least_outstanding"] = "round_robin"


class Experiment(Model):
    """A run, or with `compare` and `sweep` many: every variant at every swept value."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    engine: Engine
    kv: KV
    workload: Annotated[SyntheticWorkload | TraceWorkload, Field(discriminator="kind")]
    replicas: Replicas = Replicas()
    measure: Measure = Measure()
    slo: Slo = Slo()
    compare: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=200)], dict[str, Any]],
        Field(description="variant name: {key path: value}, each put in the place of the file's"),
    ] = Field(default_factory=dict)
    sweep: Annotated[
        dict[str, Annotated[list[Any], Field(min_length=1)]],
        Field(description="key path: list of values"),
    ] = Field(default_factory=dict)
