"""A workload put in order of arrival, with what its rows say of each other kept true."""

from __future__ import annotations

import numpy as np

from kvsim.engine.request import answer_stream
from kvsim.workload.workload import Workload


def in_order(workload: Workload) -> Workload:
    """The same requests by arrival, ties as they stood; a turn stays behind the one before it."""
    keys = workload.arrival_ns.copy()
    after = workload.after
    for row in np.flatnonzero(after >= 0).tolist():
        keys[row] = max(keys[row], keys[after[row]])
    order = np.argsort(keys, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    moved = after[order]
    has = moved >= 0
    moved[has] = place[moved[has]]
    spans, offsets = workload.spans, workload.span_offsets
    if spans is not None and offsets is not None:
        spans, offsets = _moved_spans(spans, offsets, order, place)
    return Workload(
        workload.arrival_ns[order],
        workload.prompt_tokens[order],
        workload.output_tokens[order],
        workload.num_samples[order],
        moved,
        workload.think_ns[order],
        workload.session[order],
        workload.max_tokens[order],
        workload.priority[order],
        None if workload.request_ids is None else [workload.request_ids[i] for i in order],
        spans,
        offsets,
        workload.notes,
    )


def _moved_spans(
    spans: np.ndarray, offsets: np.ndarray, order: np.ndarray, place: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    counts = np.diff(offsets)[order]
    new_offsets = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(new_offsets[-1]) - np.repeat(new_offsets[:-1], counts)
    spans = spans[np.repeat(offsets[:-1][order], counts) + within].copy()
    answers = spans[:, 0] < 0
    spans[answers, 0] = answer_stream(place[answered(spans[answers, 0])])
    return spans, new_offsets


def answered(stream: int) -> int:
    """The request whose answer is this stream: answer_stream backwards; arrays too."""
    return answer_stream(0) - stream
