"""Chats of several turns as requests: the first exchange, or the whole chat as a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsim.engine.request import Span, answer_stream
from kvsim.workload.traces.chunk import NO_TIME, Rows, private
from kvsim.workload.traces.ledger import BadRow
from kvsim.workload.traces.numbers import MAX_TOKENS

ANSWERING = frozenset({"gpt", "chatgpt", "bing", "bard", "assistant", "model"})


class Turn(NamedTuple):
    """Who spoke and how many tokens."""

    role: str
    num_tokens: int


def add_first_exchange(rows: Rows, line: int, turns: Sequence[Turn], request_id: str) -> None:
    """One request: the first turn is the prompt, the second the answer, whatever their roles
    (as vLLM's ShareGPTDataset takes them, but without its limits on length)."""
    rows.add(line, NO_TIME, turns[0].num_tokens, turns[1].num_tokens, request_id=request_id)


def add_session(rows: Rows, line: int, turns: Sequence[Turn], session: int, request_id: str) -> int:
    """A request an answer; each follows the answer before it and quotes the chat so far.

    Text before the first question and answers that follow an answer are quoted, not generated.
    Returns the number of requests added.
    """
    history: list[Span] = []
    new_tokens, after, count = 0, -1, 0
    was_answer = True
    for turn in turns:
        is_answer = turn.role in ANSWERING and not was_answer
        was_answer = turn.role in ANSWERING
        if not is_answer:
            new_tokens += turn.num_tokens
            continue
        prompt = [*history, Span(private(rows.index), 0, new_tokens)]
        prompt = [span for span in prompt if span.length]
        prompt_tokens = sum(span.length for span in prompt)
        if prompt_tokens > MAX_TOKENS:
            raise BadRow("turns", prompt_tokens, "is more tokens than any prompt has")
        name = request_id if count == 0 else f"{request_id}/{count}"
        after = rows.add(
            line,
            NO_TIME,
            prompt_tokens,
            turn.num_tokens,
            after=after,
            session=session,
            request_id=name,
            spans=prompt,
        )
        history = [*prompt, Span(answer_stream(after), 0, turn.num_tokens)]
        new_tokens, count = 0, count + 1
    return count
