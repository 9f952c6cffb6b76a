"""The command line: `kvsim run`, `compare`, `plan`, `doctor`, `fit`, `plot`, `validate`, `init`,
`schema`, `trace`. Heavy imports stand inside the commands, so that `--help` is quick."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

# kvsim multiplies no matrices and has no pydantic plugins: do not wake threads or look for them
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from kvsim import __version__, cli_plan
from kvsim.errors import UserError
from kvsim.study import definitions

if TYPE_CHECKING:
    from kvsim.config.loading import Source
    from kvsim.study.backends import Backend

app = typer.Typer(
    help="How many LLM requests fit on your GPUs, and why: contiguous, paged and shared KV caches "
    "simulated step by step.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(
    help="Look at, convert and make trace files.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(trace_app, name="trace")
cli_plan.add_to(app)

File = Annotated[Path, typer.Argument(help="experiment file (YAML)", metavar="FILE")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="override, as key.path=value; again for more", metavar="KEY=VALUE"),
]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="results folder [results/<file name>]")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what is there")]
Json = Annotated[bool, typer.Option("--json", help="print the figures as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress and no table")]
NoCharts = Annotated[bool, typer.Option("--no-charts", help="write tables only")]
ExecutorName = Annotated[
    str,
    typer.Option(help="what runs the steps: simulated, or an installed backend", metavar="NAME"),
]
ExecutorSets = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-set", help="option of the executor; again for more", metavar="KEY=VALUE"
    ),
]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="processes [one a core]")]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(epilog="\b\n" + definitions.text().replace("\n\n", "\n\n\b\n"))
def run(
    file: File,
    sets: Sets = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_charts: NoCharts = False,
    jobs: Jobs = None,
    executor: ExecutorName = "simulated",
    executor_sets: ExecutorSets = None,
) -> None:
    """Simulate an experiment, and every point of its `compare` and `sweep`.

    Writes config.yaml (resolved: it runs again as it is), summary.json, requests.parquet,
    steps.parquet and charts. What each figure means stands below.
    """
    from kvsim.config.loading import read_source

    source = read_source(file, sets or [])
    backend = _backend(executor, executor_sets or [])
    target = out or Path("results") / file.stem
    show = _Show(target, overwrite, as_json, quiet, no_charts)
    if source.plain.get("compare") or source.plain.get("sweep"):
        if backend is not None:
            raise UserError(
                f"{file}: --executor {executor} runs one experiment at a time: leave out compare "
                "and sweep (--set compare={} --set sweep={})"
            )
        _run_many(source, jobs, show)
    else:
        _run_one(source, show, backend)


@app.command()
def compare(
    file: File,
    sets: Sets = None,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_charts: NoCharts = False,
    jobs: Jobs = None,
) -> None:
    """KV cache policies side by side: the file's `compare`, or else contiguous max, pow2 and
    oracle, paged, and paged with sharing; at every point of its `sweep`."""
    from kvsim.config.loading import read_source
    from kvsim.study.runs import STANDARD_VARIANTS

    source = read_source(file, sets or [])
    source.plain["compare"] = source.plain.get("compare") or STANDARD_VARIANTS
    target = out or Path("results") / f"{file.stem}-compare"
    _run_many(source, jobs, _Show(target, overwrite, as_json, quiet, no_charts))


@app.command()
def plot(folder: Annotated[Path, typer.Argument(help="results folder", metavar="DIR")]) -> None:
    """Draw the charts of a finished results folder again."""
    from kvsim.study.plots import draw

    for path in draw(folder):
        print(path)


@app.command()
def validate(file: File, sets: Sets = None) -> None:
    """Check an experiment file; print it resolved, or all its faults."""
    from kvsim.config.loading import load, points_of, read_source, resolved_text

    source = read_source(file, sets or [])
    experiment = load(source)
    points = points_of(source)
    print(resolved_text(experiment, source.folder, source.folder), end="")
    print(f"{file}: valid; {len(points)} run{'s' * (len(points) != 1)}", file=sys.stderr)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file to write")] = Path(
        "experiment.yaml"
    ),
    overwrite: Overwrite = False,
) -> None:
    """Write a commented experiment file to start from."""
    from importlib.resources import files

    _refuse_existing(file, overwrite)
    text = files("kvsim").joinpath("catalog", "experiment.yaml").read_text(encoding="utf-8")
    _write_text(file, text)
    print(f"{file}: written; next: kvsim run {file}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    import json

    from kvsim.config.models import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))


@app.command()
def fit(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="CSV of steps, kernels or serving runs; an operator profile (folder GPU/MODEL); "
            "or a result of vllm bench serve (JSON)",
        ),
    ],
    tests: Annotated[
        list[Path] | None,
        typer.Option("--test", metavar="FILE", help="rows to predict only; again for more"),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="of rows that do not say")] = None,
    model: Annotated[str | None, typer.Option(help="of rows that do not say")] = None,
    tensor: Annotated[
        int | None, typer.Option("--tp", min=1, help="of rows that do not say")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="of rows that do not say")] = None,
    dtype: Annotated[str | None, typer.Option(help="of weights, where rows do not say")] = None,
    keep_kernels: Annotated[
        bool,
        typer.Option("--keep-kernels", help="fit the engine's costs over the built-in kernels"),
    ] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="YAML to write")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Fit the step-time model's constants to measurements, and say how well they hold.

    Prints median / 95th percentile of absolute errors in %: of the rows fitted, of rows held out,
    and of whole (model, TP) held out. -o writes the constants, which go under
    engine.step_time.constants (kind: roofline) of an experiment.
    """
    from kvsim.fit import Given, as_yaml, calibrate, held_out, read_observed, table, test_table

    if out is not None:
        _refuse_existing(out, overwrite)
    given = Given(gpu, model, tensor, engine, dtype)
    sets = read_observed(files, given)
    unseen = read_observed(tests, given) if tests else []
    fits = [calibrate(one, keep_kernels=keep_kernels) for one in sets]
    held = [held_out(one, keep_kernels=keep_kernels) for one in sets]
    _print_lines(table(fits, held))
    if unseen:
        print()
        _print_lines(test_table(fits, unseen, keep_kernels=keep_kernels))
    if out is not None:
        _write_text(out, as_yaml(fits, held, [file.name for file in files]))
        print(f"{out}: written")


@app.command()
def golden(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="a golden run, or a folder of them")
    ],
) -> None:
    """Replay step-by-step runs of real schedulers; exit status 0 only if every value is equal."""
    from kvsim.golden import cases_in, compare, report

    comparisons, faults = [], []
    for case in cases_in(folder):
        try:
            comparisons.append(compare(case))
        except UserError as error:
            faults.append(str(error))
    for line in report(comparisons):
        print(line)
    if faults:
        raise UserError("\n".join(faults))
    if any(one.num_differences for one in comparisons):
        raise typer.Exit(1)


Format = Annotated[str, typer.Option("--format", "-f", help="trace format, or auto")]
SkipBad = Annotated[bool, typer.Option("--skip-bad-rows", help="leave bad rows out, counted")]
Sort = Annotated[bool, typer.Option("--sort", help="put rows in order of arrival")]
Rebase = Annotated[bool, typer.Option("--rebase", help="let the earliest arrival be 0")]
Tokenizer = Annotated[str | None, typer.Option(help="count text with it, e.g. cl100k_base")]
Limit = Annotated[int | None, typer.Option(min=1, help="read the first N requests only")]


@trace_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="TRACE")],
    format: Format = "auto",
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Say what a trace holds: counts, lengths, times, prefix sharing, faults."""
    import json

    from kvsim.workload.traces import ReadOptions, inspect_trace

    options = ReadOptions(tokenizer=tokenizer, limit=limit)
    summary = inspect_trace(path, format, options=options)
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2))
        return
    for name, value in summary.as_dict().items():
        if value is None or value in ({}, []):
            continue
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            print(f"{name:<34} {line:,}" if isinstance(line, int) else f"{name:<34} {line}")


@trace_app.command()
def convert(
    path: Annotated[Path, typer.Argument(metavar="TRACE")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="*.csv or *.parquet")],
    format: Format = "auto",
    skip_bad_rows: SkipBad = False,
    sort: Sort = False,
    rebase: Rebase = False,
    tokenizer: Tokenizer = None,
    limit: Limit = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a trace to kvsim's own format."""
    from kvsim.workload.traces import ReadOptions, convert_trace

    _refuse_existing(out, overwrite)
    options = ReadOptions(
        skip_bad_rows=skip_bad_rows, sort=sort, rebase=rebase, tokenizer=tokenizer, limit=limit
    )
    for note in convert_trace(path, out, format, options=options):
        print(f"note: {note}")
    print(f"{out}: written")


@trace_app.command()
def generate(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="*.csv or *.parquet")],
    sets: Sets = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the workload of an experiment file as a trace."""
    from kvsim.config.build import build_workload
    from kvsim.config.loading import load, read_source
    from kvsim.workload.traces import write_native

    _refuse_existing(out, overwrite)
    source = read_source(file, sets or [])
    workload = build_workload(load(source), source.folder)
    if workload.is_beam:
        raise UserError(f"{file}: workload.beam: a trace holds no beams; leave it out")
    write_native(workload, out)
    print(f"{out}: {len(workload):,} requests written")


class _Show(NamedTuple):
    """What a command writes and prints beside its tables."""

    target: Path
    overwrite: bool
    as_json: bool
    quiet: bool
    no_charts: bool


def _backend(name: str, sets: list[str]) -> Backend | None:
    """The backend of this name; None for the simulated executor."""
    if name == "simulated":
        if sets:
            raise UserError("--executor-set: the simulated executor has no options")
        return None
    from kvsim.study.backends import find, read_options

    return find(name, read_options(sets))


def _run_one(source: Source, show: _Show, backend: Backend | None) -> None:
    from kvsim.progress import progress
    from kvsim.study.results import new_folder
    from kvsim.study.runs import run_point

    with new_folder(show.target, overwrite=show.overwrite) as folder:
        doing = "simulating" if backend is None else "running"
        with progress(doing, quiet=show.quiet) as on_progress:
            summary = run_point(source, folder, on_progress, backend)
        fault = _draw(folder, show.no_charts)
    if show.as_json:
        _print_json(summary)
    elif not show.quiet:
        from kvsim.study.report import print_summary

        print_summary(summary)
        print(f"results in {show.target}")
    _say_charts_failed(show.target, fault)


def _run_many(source: Source, jobs: int | None, show: _Show) -> None:
    from kvsim.config.loading import moved_text, points_of
    from kvsim.progress import progress
    from kvsim.study.results import new_folder, write_points
    from kvsim.study.runs import run_points

    points = points_of(source)
    with new_folder(show.target, overwrite=show.overwrite) as folder:
        with progress("runs", quiet=show.quiet) as on_progress:
            done = run_points(points, folder, jobs or os.cpu_count() or 1, on_progress)
        write_points(folder, moved_text(source.plain, source.folder, folder), done)
        fault = _draw(folder, show.no_charts)
    if show.as_json:
        _print_json([{"variant": p.variant, "at": p.at, "summary": p.summary} for p in done])
    elif not show.quiet:
        from kvsim.study.report import print_points

        print_points(done)
        print(f"results in {show.target}")
    _say_charts_failed(show.target, fault)


def _draw(folder: Path, no_charts: bool) -> UserError | None:
    """Draw the charts; what went wrong, if anything did: it is no reason to lose the tables."""
    if no_charts:
        return None
    from kvsim.study.plots import draw

    try:
        draw(folder)
    except UserError as error:
        return error
    return None


def _say_charts_failed(target: Path, fault: UserError | None) -> None:
    if fault is not None:
        reason = str(fault).split(": ", 1)[-1]
        raise UserError(f"{target}: its tables are complete, its charts are not: {reason}")


def _print_lines(lines: list[tuple[str, ...]]) -> None:
    """A table whose first two columns are text and the others numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2))


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path}: not a regular file; choose another name")
    if path.exists() and not overwrite:
        raise UserError(f"{path}: already exists; choose another name, or add --overwrite")


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.rename(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def main(commands: typer.Typer = app) -> None:
    """Entry point, of the real backend's commands too: exit status 0 on success, 1 on a mistake in
    the input, 2 in the command line."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started us
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        commands()
    except UserError as error:
        _fail(*str(error).splitlines())
    except MemoryError:
        _fail("not enough memory for this run")
    except OSError as error:  # a full disk, a closed pipe, a folder without access
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(": ".join(str(part) for part in (error.filename, error.strerror) if part))
    finally:
        gc.freeze()  # it all goes with the process: no last search for cycles in it


def _stop(number: int, frame: object) -> None:
    """End as Ctrl-C does, so that temporary folders and worker processes go too."""
    raise KeyboardInterrupt


def _fail(*lines: str) -> None:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1)
