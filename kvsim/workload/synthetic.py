"""synthesize: a workload put together from arrivals, lengths, shared prefixes and sessions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from kvsim.workload.arrivals import NS_PER_S, ArrivalProcess, within
from kvsim.workload.chance import rng
from kvsim.workload.lengths import Sampler
from kvsim.workload.sessions import Sessions, ThinkTime
from kvsim.workload.turns import PrefixGroups, Rows, draw_rows, rows_for, spans_of
from kvsim.workload.workload import Workload, columns


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`num_users` users, each sending its next request (or session) `think` after its last answer.

    User k begins at k / num_users of `ramp_s`; all begin at 0 where it is 0.
    """

    num_users: int
    think: ThinkTime
    ramp_s: float = 0.0


def synthesize(
    lengths: Sampler,
    arrivals: ArrivalProcess | ClosedLoop,
    *,
    seed: int,
    num_requests: int | None = None,
    duration_s: float | None = None,
    sessions: Sessions | None = None,
    prefixes: PrefixGroups | None = None,
    num_samples: int = 1,
) -> Workload:
    """A workload of `num_requests` rows, or of all that is begun in `duration_s`; give one of them.

    `lengths` gives what is new: the prompt it draws is the user's own text, to which the prefix
    and the history are added. `arrivals` sends single requests, or first turns; later turns are
    closed-loop, right behind the turn they follow and with its arrival_ns. A last session is cut
    to make num_requests; sessions begun within duration_s are whole. Fewer rows come where the
    arrivals end (a replay), which `notes` says. Streams 0..G-1 are the prefixes of the G groups,
    G + i is the new text of row i.

    Arrivals, lengths, turns, think times and groups have a stream of random numbers each, so what
    request i holds does not depend on how requests arrive. ValueError where both or neither of
    num_requests and duration_s are given, or duration_s with a closed loop, which has no end.
    """
    if (num_requests is None) == (duration_s is None):
        raise ValueError("give num_requests or duration_s, and not both")
    if num_requests is not None:
        rows = rows_for(num_requests, lengths, sessions, prefixes, seed)
    elif isinstance(arrivals, ClosedLoop):
        raise ValueError("a closed loop has no end: give num_requests")
    else:
        until_ns = round(duration_s * NS_PER_S)
        num_sessions = within(arrivals, partial(rng, seed, "arrivals"), until_ns)
        rows = draw_rows(num_sessions, lengths, sessions, prefixes, seed)

    asked = int(rows.session[-1]) + 1 if len(rows.session) else 0
    begin_ns = _begin_ns(arrivals, asked, seed)
    rows = rows.where(rows.session < len(begin_ns))
    after, think_ns = _follow(rows, sessions, arrivals, seed)
    is_shared = sessions is not None or prefixes is not None
    spans, span_offsets = spans_of(rows, prefixes) if is_shared else (None, None)
    return columns(
        begin_ns[rows.session],
        rows.prompt,
        rows.output,
        num_samples=np.full(len(rows.session), num_samples, np.int64),
        after=after,
        think_ns=think_ns,
        session=rows.session if sessions is not None else np.full(len(rows.session), -1, np.int64),
        spans=spans,
        span_offsets=span_offsets,
        notes=_notes(rows, sessions, asked, len(begin_ns)) + _loop_notes(arrivals),
    )


def _begin_ns(arrivals: ArrivalProcess | ClosedLoop, num_sessions: int, seed: int) -> np.ndarray:
    """When sessions begin, int64 ns; in a closed loop those after a user's first only follow it."""
    if not isinstance(arrivals, ClosedLoop):
        return arrivals(num_sessions, rng(seed, "arrivals"))
    user = np.minimum(np.arange(num_sessions), arrivals.num_users - 1)
    return np.rint(user / arrivals.num_users * arrivals.ramp_s * NS_PER_S).astype(np.int64)


def _notes(rows: Rows, sessions: Sessions | None, asked: int, begun: int) -> list[str]:
    notes = []
    if begun < asked:
        notes.append(f"the arrivals end after {begun}; {asked} were asked for")
    if sessions is not None and sessions.max_context_tokens is not None:
        cut = f"end early, at a context of {sessions.max_context_tokens} tokens"
        notes.append(f"{np.count_nonzero(rows.is_cut)} sessions {cut}")
    return notes


def _loop_notes(arrivals: ArrivalProcess | ClosedLoop) -> list[str]:
    if not isinstance(arrivals, ClosedLoop):
        return []
    return [
        f"the load falls at the end, as the {arrivals.num_users:,} users run out of requests: "
        "measure.stop_s cuts it off"
    ]


def _follow(
    rows: Rows, sessions: Sessions | None, arrivals: ArrivalProcess | ClosedLoop, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which row each row follows (-1: none), and how long after its answer: `after`, `think_ns`."""
    num_rows = len(rows.session)
    after, think_ns = np.full(num_rows, -1, np.int64), np.zeros(num_rows, np.int64)
    if sessions is not None:
        later = np.flatnonzero(rows.turn > 0)
        after[later] = later - 1
        think_ns[later] = sessions.think(num_rows, rng(seed, "turn think"))[later]
    if isinstance(arrivals, ClosedLoop):
        first = np.flatnonzero(rows.turn == 0)
        last = np.append(first[1:], num_rows) - 1
        after[first[arrivals.num_users :]] = last[: -arrivals.num_users]
        pauses = arrivals.think(len(first), rng(seed, "user think"))
        think_ns[first[arrivals.num_users :]] = pauses[arrivals.num_users :]
    return after, think_ns
