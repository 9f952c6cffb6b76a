"""All figures of a plan, for JSON."""

from __future__ import annotations

from typing import Any

from kvsim.memory.budget import Term
from kvsim.plan.plan import Plan


def figures_of(plan: Plan) -> dict[str, Any]:
    """Memory in GiB on one GPU, counts on one replica."""
    setup, out = plan.setup, plan.budget
    pool, limits = out.pool, setup.limits
    terms = {k: v for k, v in out._asdict().items() if isinstance(v, Term)}
    found = {
        "model": setup.shape.name,
        "gpu": setup.gpu.name,
        "engine": setup.engine_label,
        "engine_preset": setup.engine.versions,
        "parallel": setup.parallel._asdict(),
        "limits": limits._asdict(),
        "starts": plan.starts,
        "fits": plan.fits,
        "outcome": out.outcome,
        "gib": {name: term.gib for name, term in terms.items()},
        "how": {name: term.how for name, term in terms.items()},
        "kv_error_gib": out.error_gib,
        "profiled_step": out.step._asdict(),
        "block_bytes": pool.layout.block_bytes,
        "block_groups": [group._asdict() for group in pool.layout.groups],
        "num_blocks": pool.num_blocks,
        "tokens": pool.tokens(limits.max_model_len),
        "requests_at_once": plan.requests_at_once,
        "needed_gib": pool.needed_bytes(limits.max_model_len) / 2**30,
        "estimated_max_len": pool.estimated_max_len(limits.max_model_len),
        "requests_at_once_by_tokens": dict(plan.table),
        "legal_tensor_parallel": plan.legal_tensor,
        "remedies": [{"change": one.change, **one._asdict()} for one in plan.remedies],
        "smallest_tensor_parallel": plan.smallest_tensor,
        "workload": None,
        "notes": list(setup.notes),
        "ignored": plan.reading.ignored,
        "unmodelled": plan.reading.unmodelled,
    }
    if plan.flow is not None:
        found["workload"] = {
            **plan.flow._asdict(),
            **plan.room._asdict(),
            "binds": plan.room.binds,
            "step_time": plan.load.step_time,
            "state": plan.load.state and plan.load.state._asdict(),
            "limits": [limit._asdict() for limit in plan.load.limits],
        }
    return found
