"""The prompt prefixes that several requests of a workload begin with."""

from __future__ import annotations

from kvsim.engine.request import merged
from kvsim.workload.workload import Workload


def shared_prefixes(workload: Workload) -> dict[int, int]:
    """Tokens of every shared prefix, by its token stream, in order of first use.

    A prefix is the head of a token stream of prompt text that the prompts of two sessions at
    least begin with (a request without a session is one of its own), as far as two of them agree.
    What only the turns of one conversation share, nobody could have registered in advance.
    """
    if workload.spans is None:
        return {}
    lengths: dict[int, dict[int, int]] = {}  # stream -> session -> longest head
    for index, session in enumerate(workload.session.tolist()):
        head = next(iter(merged(workload.prompt(index))), None)
        if head is None or head.stream < 0 or head.start:
            continue
        owner = session if session >= 0 else -1 - index
        longest = lengths.setdefault(head.stream, {})
        longest[owner] = max(head.length, longest.get(owner, 0))
    return {
        stream: sorted(longest.values())[-2]
        for stream, longest in lengths.items()
        if len(longest) > 1
    }
