"""What every figure of a run means; printed by `kvsim run --help`."""

SLOT_KINDS = ("token", "reserved", "internal", "external", "cached", "free")
SLOT_KINDS_TEXT = """\
Where the slots of a pool are; for each step the columns `<kind>_slots` add up to the pool.

token     hold a token's KV (a shared slot counts once)
reserved  set aside for tokens that their sequence will still make
internal  inside a sequence's reservation or last block, and never to hold a token (of a last
          block: not yet)
external  external fragmentation and others: free or rounded up, and of no use to a request
cached    unreferenced, but a prefix hit can revive them
free      can be given to anyone

Two bookings differ for contiguous policies. `paper` (Kwon et al. 2023, Figure 2, as its artifact
computes it): internal is the reservation beyond the true length; what a chunk is rounded up by and
all free memory are external & others. `common`: rounding is internal; free memory outside the
largest free run is external, and that run is free.
"""

DEFINITIONS = {
    "completed": "requests that finished in the window; the figures per request are over these",
    "failed": "requests refused, by reason in `refused`; none of them is in any other figure",
    "unfinished": "requests still waiting or running when the simulation stopped",
    "not_arrived": "requests that had not come by then",
    "duration": "length of the window in s: first arrival to last token, less the cuts",
    "window_start_s": "where the window starts and, `window_end_s`, ends in simulated time",
    "total_input_tokens": "prompt tokens of the requests completed",
    "total_output_tokens": "answer tokens made in the window",
    "request_throughput": "completed, per s",
    "output_throughput": "answer tokens made in the window, per s",
    "total_token_throughput": "total_output_tokens and total_input_tokens, per s",
    "request_goodput": "completed requests that met every limit of `slo`, per s",
    "slo_share": "share of completed requests that met every limit of `slo`",
    "max_output_tokens_per_s": "most answer tokens made within one whole second",
    "max_concurrent_requests": "most requests between arrival and finish at once",
    "ttft_ms": "time to first token: arrival to the end of the step that made it",
    "tpot_ms": "time per output token: (finish - first token) / (answer tokens - 1), per request",
    "itl_ms": "inter-token latency: between consecutive tokens of an answer, over all tokens",
    "e2el_ms": "end-to-end latency: arrival to the last token (of the last parallel answer)",
    "queue_ms": "arrival to first admission",
    "normalized_latency_s": "mean over requests of e2el / answer tokens (Kwon et al. 2023)",
    "waste": "mean shares of the KV pool over the window, by kind; they add up to 1",
    "kv_blocks": "mean shares of the pool's blocks: `referenced` by a sequence; `cached`, that is, "
    "unreferenced but findable; `free_again`; `never_used` so far. A high level of the first two "
    "is normal; trouble is requests waiting with `referenced` near 1",
    "kv_used_peak": "largest share of the pool held by sequences, and registered, in a step",
    "batch_size": "running sequences of a replica: mean over its time with work, and peak",
    "num_waiting": "sequences that steps leave waiting at a replica: mean over window, and peak",
    "preempted_requests": "completed requests that were preempted at least once",
    "preemptions": "times in the window that a sequence lost its KV to an older one",
    "worst_preempted": "the completed request that was preempted most often, of equals the one "
    "with most tokens recomputed",
    "recomputed_tokens": "tokens computed again after a preemption (prefix hits deducted)",
    "recomputed_share": "recomputed tokens / all tokens computed in the window",
    "hit_tokens": "prompt tokens found in the prefix cache, or registered, at first admission",
    "hit_share": "hit tokens / prompt tokens asked for",
    "shortest_hit_tokens": "the shortest shared prefix that can hit, in tokens: hits come in whole "
    "blocks, or of any length (radix); one token of a prompt is always computed",
    "resumed_hit_tokens": "tokens that preempted requests found in it when they came back",
    "registered_blocks": "blocks that registered prefixes hold for the whole run, at all replicas",
    "beams_reforked": "beams dropped for others. The prompt forks into workload.beam.width beams; "
    "after each later step but the last each beam is dropped with refork_probability, "
    "independently, and forks anew from one of those kept, drawn uniformly (at least one is kept)",
    "blocks_shared_at_forks": "block table entries that answers and beams took over as they forked "
    "(of a beam dropped for another, those in which the two differed)",
    "copies_made": "blocks copied on write, or because a prefix hit ends inside them (radix); each "
    "makes its step longer by copy_block_us",
    "copies_avoided": "blocks_shared_at_forks - those of them copied on write",
    "swapped_out_blocks": "blocks moved to the host by preemptions; each makes its step longer by "
    "engine.step_time.swap_out_block_us",
    "swapped_in_blocks": "blocks moved back; each makes its step longer by swap_in_block_us",
    "swapped_bytes": "of both, by kv.bytes_per_token; null where it is unknown",
    "sharing_saving": "1 - slots holding tokens / tokens of running sequences (mean over the time "
    "with work; below 0 where registered prefixes cost more than they save)",
    "limit_shares": "share of the window in which each limit kept requests from entering a batch; "
    "`arrivals`: none did",
    "binding_limit": "the limit with the largest share",
}


def text() -> str:
    """All definitions, for a terminal."""
    width = max(map(len, DEFINITIONS))
    lines = [f"{name:<{width}}  {meaning}" for name, meaning in DEFINITIONS.items()]
    return "\n".join(["The figures of summary.json:", *lines, "", SLOT_KINDS_TEXT])
