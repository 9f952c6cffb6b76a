"""Executors other than the simulated one: found among the installed packages, never imported by
name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

from kvsim.config.models import Experiment
from kvsim.engine.plan import Executor
from kvsim.errors import UserError
from kvsim.workload.workload import Workload

GROUP = "kvsim.executors"


class Prepare(Protocol):
    """What an entry point of the group names. It makes ready whatever one run needs (a model, say)
    and returns the constructor of a replica's executor, from the answer tokens of each request.
    Raises UserError for options that it does not know, and what it cannot run."""

    def __call__(
        self, experiment: Experiment, workload: Workload, options: dict[str, str]
    ) -> Callable[[list[int]], Executor]: ...


class Backend(NamedTuple):
    """An installed executor and the options it was asked for with."""

    name: str
    options: dict[str, str]
    entry: Prepare

    @property
    def note(self) -> str:
        """What the summary says of the times."""
        said = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"step times are measured, by executor {self.name}" + (f" ({said})" if said else "")

    def prepare(
        self, experiment: Experiment, workload: Workload
    ) -> Callable[[list[int]], Executor]:
        return self.entry(experiment, workload, self.options)


def read_options(texts: list[str]) -> dict[str, str]:
    """What `--executor-set KEY=VALUE`, each time, asks for. Raises UserError."""
    options = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not (sign and key and value):
            raise UserError(f"--executor-set {text}: give it as KEY=VALUE")
        options[key] = value
    return options


def find(name: str, options: dict[str, str]) -> Backend:
    """The backend of this name. Raises UserError."""
    known = entry_points(group=GROUP)
    if name not in known.names:
        names = ", ".join(["simulated", *sorted(known.names)])
        raise UserError(f"--executor {name}: not one of {names}")
    try:
        entry = known[name].load()
    except ImportError as error:
        raise UserError(f"--executor {name} cannot be loaded: {error}") from None
    return Backend(name, options, entry)
