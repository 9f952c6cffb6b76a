"""One simulation from its parts to its log."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from struct import error as StructError

import numpy as np
import simpy

from kvsim.engine.batching import Batching
from kvsim.engine.groups import GroupScheduler, PaperEra
from kvsim.engine.kv.host import HostFull, HostPool
from kvsim.engine.kv.paged import Paged
from kvsim.engine.kv.policy import KVCachePolicy
from kvsim.engine.plan import Executor
from kvsim.engine.rules import LATEST, Rules
from kvsim.engine.scheduler import Scheduler
from kvsim.errors import UserError
from kvsim.sim.feed import Feed, Route
from kvsim.sim.recorder import Recorder, ReplicaLog
from kvsim.sim.replica import Replica
from kvsim.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Engine:
    """What every replica is made of."""

    make_kv: Callable[[], KVCachePolicy]
    make_executor: Callable[[list[int]], Executor]  # from the answer tokens of each request
    batching: Batching
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    long_prefill_token_threshold: int = 0
    is_by_priority: bool = False
    rules: Rules = LATEST
    paper_era: PaperEra | None = None  # groups and swap, in the place of vLLM V1's scheduler
    jump: bool = True

    def make_scheduler(self) -> Scheduler | GroupScheduler:
        kv = self.make_kv()
        if self.paper_era is not None:
            assert isinstance(kv, Paged), "groups swap blocks"
            return GroupScheduler(
                kv,
                HostPool(self.paper_era.num_host_blocks),
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                watermark_blocks=int(self.paper_era.watermark * kv.num_blocks),
                mixes_prompts=self.paper_era.mixes_prompts,
            )
        return Scheduler(
            kv,
            self.batching,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunked_prefill=self.chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            is_by_priority=self.is_by_priority,
            rules=self.rules,
        )


@dataclass(frozen=True, slots=True)
class RunLog:
    """Everything that a simulation leaves: per request int64 [N], per replica its records.

    `arrived_ns` is -1 for a request that never came (its predecessor did not finish in time).
    """

    workload: Workload
    answer_tokens: np.ndarray
    outcome: np.ndarray
    replica_of: np.ndarray
    arrived_ns: np.ndarray
    replicas: list[ReplicaLog]
    pool_slots: int
    block_size: int
    reserves: bool
    end_ns: int


def simulate(
    workload: Workload,
    engine: Engine,
    *,
    num_replicas: int = 1,
    route: Route,
    stop_ns: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunLog:
    """Run a workload to its end, or to stop_ns.

    `on_progress(ended, total)` is called now and then, by simulated events and never by the wall.
    """
    env = simpy.Environment(initial_time=0)
    schedulers = [engine.make_scheduler() for _ in range(num_replicas)]
    kv = schedulers[0].kv
    cap = kv.max_tokens
    answers = workload.answer_tokens()
    if cap is not None:
        answers = np.minimum(answers, np.maximum(cap - workload.prompt_tokens, 0))
    answer_tokens = answers.tolist()
    final_tokens = (workload.prompt_tokens + answers).tolist()
    feed = Feed(env, workload, answer_tokens, engine.max_model_len, route)
    ended = feed.ended if on_progress is None else _reporting(feed, len(workload), on_progress)
    for index, scheduler in enumerate(schedulers):
        recorder = Recorder(final_tokens)
        executor = engine.make_executor(answer_tokens)
        feed.replicas.append(
            Replica(
                env,
                index,
                scheduler,
                executor,
                recorder,
                ended,
                jump=engine.jump,
                has_followers=feed.has_followers,
            )
        )
    feed.open()
    was_enabled = gc.isenabled()
    gc.disable()  # the model makes no cycles worth collecting, and millions of small objects
    try:
        env.run(until=stop_ns)
    except HostFull as error:
        raise UserError(f"kv.num_host_blocks: too small: {error}") from None
    except (OverflowError, StructError):
        raise UserError("the simulated clock has passed 292 years, the last it holds") from None
    finally:
        if was_enabled:
            gc.enable()
    for replica in feed.replicas:
        replica.stop()
    logs = [replica.recorder.log(replica.scheduler) for replica in feed.replicas]
    last_ns = max((_last_ns(log) for log in logs), default=0)
    return RunLog(
        workload,
        answers,
        np.array(feed.outcome, np.int64),
        np.array(feed.replica_of, np.int64),
        np.array(feed.arrived_ns, np.int64),
        logs,
        kv.num_blocks * kv.block_size,
        kv.block_size,
        kv.reserves,
        int(max(last_ns, max(feed.arrived_ns, default=0))) if stop_ns is None else stop_ns,
    )


def _last_ns(log: ReplicaLog) -> int:
    if not len(log.durations_ns):
        return 0
    return int(log.plans["start_ns"][-1] + log.durations_ns[-log.plans["num_steps"][-1] :].sum())


def _reporting(
    feed: Feed, total: int, on_progress: Callable[[int, int], None]
) -> Callable[[object], None]:
    every, count = max(total // 200, 1), 0

    def ended(seq: object) -> None:
        nonlocal count
        feed.ended(seq)
        count += 1
        if count % every == 0:
            on_progress(count, total)

    return ended
