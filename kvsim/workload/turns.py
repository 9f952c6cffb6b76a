"""Rows: turns of sessions, each prompt a shared prefix, the history and new text, in that order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvsim.engine.request import answer_stream
from kvsim.workload.chance import rng
from kvsim.workload.lengths import Sampler
from kvsim.workload.sessions import Sessions


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """System prompts: group g's requests begin with the same prefix_tokens[g] (>= 1) tokens.

    A request (a session, where there are any) is of group g with probability proportional to
    (g + 1) ** -zipf_exponent; 0 makes the groups equally likely.
    """

    prefix_tokens: tuple[int, ...]
    zipf_exponent: float = 0.0


class Rows(NamedTuple):
    """Turns of sessions, a session's turns in a row; int64 [R] each, is_cut bool [R].

    `new` is the user's own text, `prompt` that behind the prefix and the history. is_cut: the
    session would have gone on, but for its context.
    """

    session: np.ndarray
    turn: np.ndarray
    group: np.ndarray
    new: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    is_cut: np.ndarray

    def where(self, keep: np.ndarray | slice) -> Rows:
        return Rows(*(column[keep] for column in self))


def rows_for(
    num_requests: int,
    lengths: Sampler,
    sessions: Sessions | None,
    prefixes: PrefixGroups | None,
    seed: int,
) -> Rows:
    """The first num_requests rows of as many sessions as that takes."""
    turns = 1.0 if sessions is None else sessions.turns.mean()
    num_sessions = math.ceil(num_requests / turns)
    while True:
        rows = draw_rows(num_sessions, lengths, sessions, prefixes, seed)
        if len(rows.session) >= num_requests:
            return rows.where(slice(num_requests))
        num_sessions *= 2


def draw_rows(
    num_sessions: int,
    lengths: Sampler,
    sessions: Sessions | None,
    prefixes: PrefixGroups | None,
    seed: int,
) -> Rows:
    """The rows of num_sessions sessions; a single request is a session of one turn."""
    turns = np.ones(num_sessions, np.int64)
    if sessions is not None:
        turns = sessions.turns.at(rng(seed, "turns").random(num_sessions))
    session = np.repeat(np.arange(num_sessions), turns)
    first = np.repeat(np.cumsum(turns) - turns, turns)  # the row of the session's first turn
    turn = np.arange(len(session)) - first

    new, output = lengths(len(session), rng(seed, "lengths"))
    group, prefix = np.zeros(len(session), np.int64), np.zeros(len(session), np.int64)
    if prefixes is not None:
        group = _groups(num_sessions, prefixes, rng(seed, "prefixes"))[session]
        prefix = np.array(prefixes.prefix_tokens, np.int64)[group]
    said = np.cumsum(new + output) - (new + output)  # in all rows above
    prompt = prefix + (said - said[first]) + new

    rows = Rows(session, turn, group, new, prompt, output, np.zeros(len(session), bool))
    if sessions is None or sessions.max_context_tokens is None:
        return rows
    # what a session has said only grows, so the turns kept are its first ones
    keep = (turn == 0) | (prompt + output <= sessions.max_context_tokens)
    ends_here = np.append(~keep[1:], False) & keep
    return rows._replace(is_cut=ends_here).where(keep)


def spans_of(rows: Rows, prefixes: PrefixGroups | None) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt as prefix, then text, answer, text, answer, ..., text of its session so far."""
    prefix_tokens = np.array(prefixes.prefix_tokens if prefixes is not None else (), np.int64)
    num_prefixes = int(prefixes is not None)  # spans a prompt begins with
    count = num_prefixes + 2 * rows.turn + 1
    offsets = np.concatenate(([0], np.cumsum(count)))
    row = np.repeat(np.arange(len(count)), count)
    place = np.arange(offsets[-1]) - offsets[row] - num_prefixes  # -1 is the prefix
    quoted = row - rows.turn[row] + place // 2  # the row whose text or answer this span is

    is_text = place % 2 == 0
    spans = np.zeros((len(row), 3), np.int64)
    spans[:, 0] = np.where(is_text, len(prefix_tokens) + quoted, answer_stream(quoted))
    spans[:, 2] = np.where(is_text, rows.new[quoted], rows.output[quoted])
    is_prefix = place < 0
    group = rows.group[row[is_prefix]]
    spans[is_prefix, 0] = group
    spans[is_prefix, 2] = prefix_tokens[group] if num_prefixes else 0
    return spans, offsets


def _groups(n: int, prefixes: PrefixGroups, generator: np.random.Generator) -> np.ndarray:
    ranks = np.arange(1, len(prefixes.prefix_tokens) + 1)
    shares = np.cumsum(ranks ** -float(prefixes.zipf_exponent))
    return np.searchsorted(shares / shares[-1], generator.random(n), side="right")
