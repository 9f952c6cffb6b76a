"""`python -m gpu_backend compare FILE`: how far a simulation is from the same run on a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import main
from kvsim.errors import UserError

LEAST_LOAD, MOST_LOAD = 1e-3, 100.0  # shares of the capacity that say anything

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
    rates: Annotated[
        str, typer.Option(help="request rates, as shares of each variant's measured capacity")
    ] = "0.5,0.8,1.3",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="runs at each rate")] = 3,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
) -> None:
    """Run an experiment on a model and in the simulator: errors by metric, charts, and whether
    every scheduling decision is equal. Each variant of the file's `compare` is measured by itself:
    its capacity, then at every rate. The step time is fitted to steps of a designed grid."""
    from gpu_backend.compare import compare as compared
    from gpu_backend.compare_files import write
    from gpu_backend.compare_tables import print_comparison
    from kvsim.config.loading import read_source
    from kvsim.study.backends import read_options
    from kvsim.study.results import new_folder

    loads = _loads(rates)
    options = read_options(executor_sets or [])
    source = read_source(file, sets or [])
    target = out or Path("results") / f"{file.stem}-real"
    with new_folder(target, overwrite=overwrite) as folder:
        comparison = compared(
            source, options, loads, repeats, lambda line: print(line, file=sys.stderr, flush=True)
        )
        asked: dict[str, object] = {"executor": options, "rates": loads, "repeats": repeats}
        write(folder, source, target, asked, comparison)
    print_comparison(comparison)
    print(f"results in {target}")
    replays = [trial.replay for variant in comparison.variants for trial in variant.trials]
    if differences := [text for replay in replays for text in replay.differences]:
        raise UserError("\n".join(["a replay took another course:", *differences]))


def _loads(text: str) -> list[float]:
    try:
        loads = [float(one) for one in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(LEAST_LOAD <= load <= MOST_LOAD for load in loads):
        raise UserError(
            f"--rates {text}: must be numbers from {LEAST_LOAD:g} to {MOST_LOAD:g}, separated by "
            "commas"
        )
    return list(dict.fromkeys(loads))


if __name__ == "__main__":
    main(app)
