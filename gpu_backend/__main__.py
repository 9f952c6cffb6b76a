"""`python -m gpu_backend compare FILE`: how far a simulation is from the same run on a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """The real backend of kvsim."""


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="experiment file (YAML)", metavar="FILE")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    executor_sets: Annotated[
        list[str] | None, typer.Option("--executor-set", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Measure a grid of steps, fit step_time, simulate, run for real: errors by figure."""
    from gpu_backend.compare import compare as compared
    from kvsim.config.loading import read_source

    options = dict(text.partition("=")[::2] for text in executor_sets or [])
    found = compared(read_source(file, sets or []), options)
    print(f"step_time, fitted to {found.num_points} steps:")
    for name, value in found.step_time.items():
        print(f"  {name}: {value:.6g}")
    print(f"{'':<20} {'simulated':>12} {'measured':>12} {'error %':>8}")
    for row in found.rows:
        print(
            f"{row.metric:<20} {row.simulated:>12,.2f} {row.measured:>12,.2f} "
            f"{100 * row.error:>+8.1f}"
        )
    print(
        f"{found.num_steps:,} steps: off by {100 * found.step_error:.1f} % each, "
        f"{100 * found.total_error:+.1f} % in sum"
    )


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(1)
