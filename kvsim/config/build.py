"""Objects from a resolved Experiment: engine, workload, routing, window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kvsim.config import models, workloads
from kvsim.engine.batching import CONTINUOUS, STATIC
from kvsim.engine.groups import PaperEra
from kvsim.engine.kv import contiguous, placement
from kvsim.engine.kv.contiguous import Contiguous
from kvsim.engine.kv.hash_chain import HashChain
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.engine.kv.radix import Radix
from kvsim.engine.plan import Executor
from kvsim.engine.rules import LATEST, RULES, Admission, Rules
from kvsim.errors import UserError
from kvsim.latency.model import LatencyModel, Linear, Tabulated
from kvsim.latency.roofline import Roofline
from kvsim.sim.beams import BeamSurvival
from kvsim.sim.executor import SimulatedExecutor
from kvsim.sim.feed import Route, least_outstanding, round_robin
from kvsim.sim.run import Engine
from kvsim.workload import arrivals, discrete, lengths, presets, sessions, synthetic, turns
from kvsim.workload.chance import rng
from kvsim.workload.prefixes import shared_prefixes
from kvsim.workload.traces import ReadOptions, read_trace
from kvsim.workload.workload import Workload


def build_engine(
    experiment: models.Experiment,
    workload: Workload,
    make_executor: Callable[[list[int]], Executor] | None = None,
) -> Engine:
    """The engine of an experiment; its steps are simulated unless `make_executor` runs them."""
    config = experiment.engine
    assert config.step_time is not None and config.max_model_len is not None
    make_kv = partial(_kv, experiment, workload)
    if registered := registered_blocks(experiment, workload):
        make_kv = partial(make_kv, registered=registered)
    latency = build_latency(config.step_time)
    return Engine(
        make_kv=make_kv,
        make_executor=make_executor or partial(_executor, experiment, latency),
        batching={"continuous": CONTINUOUS, "static": STATIC}[config.batching],
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill=config.chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        is_by_priority=config.scheduling_policy == "priority",
        rules=_rules(config),
        paper_era=_paper_era(experiment),
        jump=config.jump,
    )


def build_latency(config: models.StepTime) -> LatencyModel:
    if config.kind == "roofline":
        moves = {"swap_in_block_us", "swap_out_block_us", "copy_block_us"}
        return Roofline(config.machine(), **config.model_dump(include=moves))
    model = {"linear": Linear, "table": Tabulated}[config.kind]
    return model(**config.model_dump(exclude={"kind"}))


def build_route(config: models.Replicas) -> Route:
    return {"round_robin": round_robin, "least_outstanding": least_outstanding}[config.routing]()


def build_workload(experiment: models.Experiment, folder: Path) -> Workload:
    """The workload; paths in it start from `folder`. Raises TraceError."""
    config, seed = experiment.workload, experiment.seed
    build = _synthetic if config.kind == "synthetic" else _trace
    workload = build(config, seed, folder)
    n = len(workload)
    if config.max_tokens is not None:
        workload = replace(workload, max_tokens=np.full(n, config.max_tokens, np.int64))
    if config.priorities is not None:
        levels = [one.priority for one in config.priorities]
        shares = np.array([one.share for one in config.priorities])
        drawn = rng(seed, "priorities").choice(levels, n, p=shares / shares.sum())
        workload = replace(workload, priority=drawn.astype(np.int64))
    if config.beam is not None:
        width = np.full(n, config.beam.width, np.int64)
        workload = replace(workload, num_samples=width, is_beam=True)
    return workload


def _executor(
    experiment: models.Experiment, latency: LatencyModel, output_tokens: list[int]
) -> SimulatedExecutor:
    beam = experiment.workload.beam
    survival = beam and BeamSurvival(experiment.seed, beam.refork_probability)
    return SimulatedExecutor(latency, output_tokens, survival)


def _rules(config: models.Engine) -> Rules:
    rules = RULES.get(config.rules, LATEST)
    if config.admission is None:
        return rules
    return rules._replace(admission=Admission(config.admission))


def _paper_era(experiment: models.Experiment) -> PaperEra | None:
    """Groups and swap, for paged caches under the rules of that time."""
    kv, rules = experiment.kv, experiment.engine.rules
    if kv.num_host_blocks is None or kv.policy.kind == "contiguous":
        return None
    return PaperEra(kv.num_host_blocks, kv.policy.watermark, mixes_prompts=rules == "paper")


def registered_blocks(experiment: models.Experiment, workload: Workload) -> dict[int, int]:
    """Full blocks of every registered prefix, by its stream. Raises UserError."""
    if not getattr(experiment.kv.policy, "registered_prefixes", False):
        return {}
    size, num_blocks = experiment.kv.block_size, experiment.kv.num_blocks
    prefixes = {stream: n // size for stream, n in shared_prefixes(workload).items() if n >= size}
    if (total := sum(prefixes.values())) > num_blocks:
        raise UserError(
            f"kv.policy.registered_prefixes: the {total:,} blocks of the prefixes (their number: "
            f"{len(prefixes):,}) do not fit into kv.num_blocks ({num_blocks:,})"
        )
    return prefixes


def _kv(
    experiment: models.Experiment, workload: Workload, registered: dict[int, int] | None = None
) -> KVCachePolicy:
    config, max_model_len = experiment.kv, experiment.engine.max_model_len
    policy, num_blocks, size = config.policy, config.num_blocks, config.block_size
    assert num_blocks is not None and max_model_len is not None
    if policy.kind != "contiguous":
        shares = policy.kind == "paged_sharing"
        indexes = {"hash_chain": HashChain, "radix": Radix}
        return Paged(
            num_blocks,
            size,
            can_fork=shares,
            prefix_caching=shares and policy.prefix_caching,
            prefix_index=indexes[policy.prefix_index] if shares else HashChain,
            watermark_blocks=int(policy.watermark * num_blocks),
            rules=_rules(experiment.engine),
            registered=registered,
        )
    limit = policy.reserve_tokens or max_model_len
    outputs = workload.answer_tokens().tolist() if policy.reserve in ("pow2", "oracle") else []
    reserve = {
        "max": lambda: contiguous.reserve_max(max_model_len),
        "pow2": lambda: contiguous.reserve_pow2(outputs),
        "oracle": lambda: contiguous.reserve_oracle(outputs),
        "fixed": lambda: None,
    }[policy.reserve]()
    place = {
        "buddy": lambda: placement.Buddy(num_blocks, -(-limit // size)),
        "first_fit": lambda: placement.Fit(num_blocks, placement.first_fit),
        "best_fit": lambda: placement.Fit(num_blocks, placement.best_fit),
    }[policy.placement]()
    return Contiguous(num_blocks, size, place, reserve=reserve, limit=limit)


def _synthetic(config: workloads.SyntheticWorkload, seed: int, folder: Path) -> Workload:
    return synthetic.synthesize(
        _lengths(config.lengths, folder),
        _arrivals(config.arrivals, folder),
        seed=seed,
        num_requests=config.num_requests,
        duration_s=config.duration_s,
        sessions=None if config.sessions is None else _sessions(config.sessions),
        prefixes=None
        if config.prefixes is None
        else turns.PrefixGroups(
            tuple(config.prefixes.prefix_tokens), config.prefixes.zipf_exponent
        ),
        num_samples=config.num_samples,
    )


def _trace(config: workloads.TraceWorkload, seed: int, folder: Path) -> Workload:
    options = ReadOptions(
        skip_bad_rows=config.skip_bad_rows,
        sort=config.sort,
        rebase=config.rebase,
        time_unit=config.time_unit,
        tokenizer=config.tokenizer,
        limit=config.limit,
        block_size=config.block_size,
        sessions=config.sessions,
        subagents=config.subagents,
        seed=seed,
        duration_s=config.duration_s,
    )
    workload = read_trace(folder / config.path, config.format, options=options)
    if config.arrivals is not None:
        times = _arrivals(config.arrivals, folder)
        opening = np.flatnonzero(workload.after < 0)
        arrival_ns = workload.arrival_ns.copy()
        drawn = times(len(opening), rng(seed, "arrivals"))
        if len(drawn) < len(opening):
            raise UserError(
                f"workload.arrivals: {config.arrivals.kind} ends after {len(drawn):,}, and "
                f"the trace has {len(opening):,}: set limit, or let the last rate be above 0"
            )
        arrival_ns[opening] = drawn
        note = f"arrival times are drawn ({config.arrivals.kind}), not those of the trace"
        workload = replace(workload, arrival_ns=arrival_ns, notes=[*workload.notes, note])
    if config.speed != 1.0:
        workload = replace(
            workload,
            arrival_ns=arrivals.faster(workload.arrival_ns, config.speed),
            think_ns=arrivals.faster(workload.think_ns, config.speed),
        )
    if config.num_samples is not None:
        workload = replace(
            workload, num_samples=np.full(len(workload), config.num_samples, np.int64)
        )
    return workload


def _arrivals(
    config: workloads.Arrivals, folder: Path
) -> arrivals.ArrivalProcess | synthetic.ClosedLoop:
    match config.kind:
        case "poisson":
            return partial(arrivals.poisson, rate_per_s=config.rate_per_s)
        case "gamma":
            return partial(arrivals.gamma, rate_per_s=config.rate_per_s, cv=config.cv)
        case "piecewise":
            segments = [(one.start_s, one.rate_per_s) for one in config.segments]
            return partial(arrivals.piecewise, segments=segments)
        case "markov_modulated":
            states = [arrivals.RateState(s.rate_per_s, s.mean_dwell_s) for s in config.states]
            return partial(arrivals.markov_modulated, states=states)
        case "all_at_once":
            return arrivals.all_at_once
        case "closed_loop":
            return synthetic.ClosedLoop(config.num_users, _think(config.think), config.ramp_s)
        case "replay":
            times = read_trace(folder / config.path, config.format).arrival_ns
            return partial(arrivals.replay, arrival_ns=times, speed=config.speed)


def _think(config: workloads.Think) -> sessions.ThinkTime:
    match config.kind:
        case "fixed":
            return partial(sessions.fixed_think, think_s=config.think_s)
        case "exponential":
            return partial(sessions.exponential_think, mean_s=config.mean_s)
        case "lognormal":
            return partial(sessions.lognormal_think, mean_s=config.mean_s, sigma=config.sigma)


def _lengths(config: workloads.Lengths, folder: Path) -> lengths.Sampler:
    match config.kind:
        case "preset":
            joint = presets.load_preset(config.name)
            if config.rank_correlation is not None:
                joint = replace(joint, coupling=_coupling(config.rank_correlation))
            if config.scale is None:
                return joint
            return partial(lengths.scaled, sampler=joint, scale=config.scale)
        case "joint":
            coupling = _coupling(config.rank_correlation)
            return lengths.Joint(_marginal(config.prompt), _marginal(config.output), coupling)
        case "empirical":
            workload = read_trace(folder / config.path, config.format)
            return partial(lengths.empirical, workload=workload)


def _coupling(rank_correlation: float) -> lengths.Coupling:
    return lengths.gaussian(rank_correlation) if rank_correlation else lengths.independent()


def _marginal(config: workloads.Marginal) -> discrete.Discrete:
    match config.kind:
        case "fixed":
            return discrete.fixed(config.tokens)
        case "uniform":
            return discrete.uniform(config.low, config.high)
        case "lognormal":
            mu = discrete.lognormal_mu(config.mean_tokens, config.sigma)
            return discrete.lognormal(mu, config.sigma, low=config.low, high=config.high)
        case "lognormal_mixture":
            weights, mus, sigmas = zip(
                *((part.weight, part.mu, part.sigma) for part in config.parts), strict=True
            )
            return discrete.lognormal_mixture(
                weights, mus, sigmas, low=config.low, high=config.high
            )


def _sessions(config: workloads.Sessions) -> sessions.Sessions:
    match config.turns.kind:
        case "fixed":
            number = discrete.fixed(config.turns.turns)
        case "geometric":
            number = discrete.geometric(config.turns.mean, config.turns.high)
        case "sharegpt":
            number = sessions.sharegpt_turns()
    return sessions.Sessions(number, _think(config.think), config.max_context_tokens)
