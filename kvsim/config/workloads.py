"""Config models of workloads: traces, synthetic arrivals, lengths, sessions, prefixes."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvsim.config.base import FilePath, Model, Positive, PositiveInt

TraceFormat = Literal[
    "auto",
    "aiperf",
    "azure",
    "burstgpt",
    "llmservingsim",
    "mooncake",
    "native",
    "qwen",
    "ragpulse",
    "servegen",
    "sharegpt",
    "sharegpt_lengths",
    "splitwise",
    "vidur",
    "vllm_bench",
    "vllm_measured",
    "weka",
]
Tokens = Annotated[int, Field(ge=1, le=100_000_000)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class FixedThink(Model):
    kind: Literal["fixed"]
    think_s: Seconds


class ExponentialThink(Model):
    kind: Literal["exponential"]
    mean_s: Seconds


class LognormalThink(Model):
    kind: Literal["lognormal"]
    mean_s: Seconds
    sigma: Annotated[float, Field(ge=0, le=10, description="of the logarithm")]


Think = Annotated[FixedThink | ExponentialThink | LognormalThink, Field(discriminator="kind")]


class Poisson(Model):
    kind: Literal["poisson"]
    rate_per_s: Positive


class Gamma(Model):
    kind: Literal["gamma"]
    rate_per_s: Positive
    cv: Annotated[float, Field(ge=0.01, le=100, description="coefficient of variation of the gaps")]


class Segment(Model):
    start_s: Seconds
    rate_per_s: Annotated[float, Field(ge=0, le=1e9)]


class Piecewise(Model):
    kind: Literal["piecewise"]
    segments: Annotated[list[Segment], Field(min_length=1)]

    @model_validator(mode="after")
    def _starts_rise(self) -> Piecewise:
        starts = [segment.start_s for segment in self.segments]
        if starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError("the first start_s must be 0, and each later one must rise")
        if not any(segment.rate_per_s for segment in self.segments):
            raise ValueError("one rate_per_s at least must be above 0")
        return self


class RateState(Model):
    rate_per_s: Annotated[float, Field(ge=0, le=1e9)]
    mean_dwell_s: Positive


class MarkovModulated(Model):
    kind: Literal["markov_modulated"]
    states: Annotated[list[RateState], Field(min_length=1)]

    @model_validator(mode="after")
    def _something_arrives(self) -> MarkovModulated:
        if not any(state.rate_per_s for state in self.states):
            raise ValueError("one rate_per_s at least must be above 0")
        return self


class AllAtOnce(Model):
    kind: Literal["all_at_once"]


class ClosedLoop(Model):
    """Users who send their next request (or session) `think` after their last answer; they start
    within ramp_s. The run ends with the last of num_requests, its load falling as users run out:
    cut the end with measure.stop_s."""

    kind: Literal["closed_loop"]
    num_users: PositiveInt
    think: Think
    ramp_s: Seconds = 0.0


class Replay(Model):
    """The arrival times of a trace, for lengths from elsewhere."""

    kind: Literal["replay"]
    path: FilePath
    format: TraceFormat = "auto"
    speed: Positive = 1.0


Arrivals = Annotated[
    Poisson | Gamma | Piecewise | MarkovModulated | AllAtOnce | ClosedLoop | Replay,
    Field(discriminator="kind"),
]


class FixedTokens(Model):
    kind: Literal["fixed"]
    tokens: Tokens


class _Range(Model):
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _low_is_below_high(self) -> _Range:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not be above high ({self.high})")
        return self


class UniformTokens(_Range):
    kind: Literal["uniform"]


class LognormalTokens(_Range):
    """Rounded and clipped to [low, high]; `mean_tokens` is the mean before that."""

    kind: Literal["lognormal"]
    mean_tokens: Positive
    sigma: Annotated[float, Field(gt=0, le=10, description="of the logarithm")]


class LognormalPart(Model):
    weight: Positive
    mu: Annotated[float, Field(ge=-20, le=20)]
    sigma: Annotated[float, Field(gt=0, le=10)]


class LognormalMixtureTokens(_Range):
    """A mixture of lognormals, rounded and clipped to [low, high]; weights are scaled to sum 1."""

    kind: Literal["lognormal_mixture"]
    parts: Annotated[list[LognormalPart], Field(min_length=1)]


Marginal = Annotated[
    FixedTokens | UniformTokens | LognormalTokens | LognormalMixtureTokens,
    Field(discriminator="kind"),
]
RankCorrelation = Annotated[float, Field(gt=-1, lt=1)]


class PresetLengths(Model):
    """A published joint distribution; `rank_correlation` replaces its coupling where given, and
    all lengths are multiplied by `scale` (for models and machines of another size), rounded up."""

    kind: Literal["preset"]
    name: Literal["alpaca", "azure-code", "azure-conv", "mooncake-conversation", "sharegpt"]
    rank_correlation: RankCorrelation | None = None
    scale: Annotated[float, Field(ge=1e-4, le=100)] | None = None


class JointLengths(Model):
    kind: Literal["joint"]
    prompt: Marginal
    output: Marginal
    rank_correlation: RankCorrelation = 0.0


class EmpiricalLengths(Model):
    """Prompt and answer lengths of a trace's requests, drawn with replacement, in their pairs."""

    kind: Literal["empirical"]
    path: FilePath
    format: TraceFormat = "auto"


Lengths = Annotated[PresetLengths | JointLengths | EmpiricalLengths, Field(discriminator="kind")]


class FixedTurns(Model):
    kind: Literal["fixed"]
    turns: Annotated[int, Field(ge=1, le=10_000)]


class GeometricTurns(Model):
    kind: Literal["geometric"]
    mean: Annotated[float, Field(ge=1, le=1000)]
    high: Annotated[int, Field(ge=1, le=10_000)]


class ShareGptTurns(Model):
    kind: Literal["sharegpt"]


Turns = Annotated[FixedTurns | GeometricTurns | ShareGptTurns, Field(discriminator="kind")]


class Sessions(Model):
    """Multi-turn conversations: a turn's prompt is the whole history and new text. `think` is the
    pause between the turns of a session; that of a closed loop comes between sessions."""

    turns: Turns
    think: Think
    max_context_tokens: Tokens | None = None


class Prefixes(Model):
    """System prompts: one group for each of `prefix_tokens`, drawn with Zipf popularity."""

    prefix_tokens: Annotated[list[Tokens], Field(min_length=1)]
    zipf_exponent: Annotated[float, Field(ge=0, le=10)] = 0.0


class PriorityClass(Model):
    """A share of the requests (shares are scaled to sum 1); lower priority goes first."""

    priority: Annotated[int, Field(ge=0, le=1_000_000)]
    share: Positive


class Beam(Model):
    """Beam search with `width` beams to a request, in the place of parallel answers. After each
    step each beam is dropped with `refork_probability`, and forks anew from one of those kept."""

    width: Annotated[int, Field(ge=1, le=1024)]
    refork_probability: Annotated[float, Field(ge=0, le=1)]


MaxTokens = Annotated[
    Tokens | None, Field(description="the client's limit of every answer, which ends there")
]
Priorities = Annotated[list[PriorityClass], Field(min_length=1)] | None
NumSamples = Annotated[int, Field(ge=1, le=1024, description="parallel answers of a request")]
NumRequests = Annotated[int, Field(ge=1, le=100_000_000)]


class SyntheticWorkload(Model):
    """Requests drawn from distributions; give `num_requests` or `duration_s`."""

    kind: Literal["synthetic"]
    num_requests: NumRequests | None = None
    duration_s: Positive | None = None
    arrivals: Arrivals
    lengths: Lengths
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    num_samples: NumSamples = 1
    max_tokens: MaxTokens = None
    priorities: Priorities = None
    beam: Beam | None = None

    @model_validator(mode="after")
    def _one_size(self) -> SyntheticWorkload:
        if (self.num_requests is None) == (self.duration_s is None):
            raise ValueError("give num_requests or duration_s, and not both")
        if self.duration_s is not None and self.arrivals.kind in ("closed_loop", "all_at_once"):
            raise ValueError(
                f"arrivals {self.arrivals.kind} need num_requests, not duration_s; "
                "measure.stop_s ends a run at a time"
            )
        return self


class TraceWorkload(Model):
    """The requests of a trace file, at its own times (`speed` times as fast, think times too) or,
    with `arrivals`, at drawn ones. sessions: `closed` lets a turn wait for the answer before it,
    `open` comes at its own time stamp; the format's own way unless set. num_samples and beam go
    before what the trace says."""

    kind: Literal["trace"]
    path: FilePath
    format: TraceFormat = "auto"
    speed: Positive = 1.0
    arrivals: (
        Annotated[
            Poisson | Gamma | Piecewise | MarkovModulated | AllAtOnce,
            Field(discriminator="kind"),
        ]
        | None
    ) = None
    num_samples: NumSamples | None = None
    max_tokens: MaxTokens = None
    priorities: Priorities = None
    beam: Beam | None = None
    limit: NumRequests | None = None
    skip_bad_rows: bool = False
    sort: bool = False
    rebase: bool = False
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    tokenizer: str | None = None
    block_size: PositiveInt | None = None
    sessions: Literal["open", "closed"] | None = None
    subagents: bool = False
    duration_s: Positive | None = None


Workload = Annotated[SyntheticWorkload | TraceWorkload, Field(discriminator="kind")]
