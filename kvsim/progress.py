"""Progress on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 5.0


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A function (done, total) to call now and then, or None where nobody wants to see it."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        yield from _bar(what)
    else:
        yield _lines(what)


def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Callable[[int, int], None]:
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            left = (now - start) / done * (total - done)
            print(f"{what}: {done:,} of {total:,}, {left:.0f} s left", file=sys.stderr, flush=True)

    return show
