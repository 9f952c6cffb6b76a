"""The commands that need no simulation: `kvsim plan` and `kvsim doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.errors import UserError
from kvsim.plan.flags import FLAGS

MAX_LOG_BYTES = 50_000_000
AS_TYPED = {"ignore_unknown_options": True}
Check = Annotated[bool, typer.Option("--check", help="exit status 1 if it does not fit")]
Json = Annotated[bool, typer.Option("--json", help="print the figures as JSON")]


def _help() -> str:
    rows = []
    for name, flag in FLAGS.items():
        if name not in ("model", "shape"):
            short = f", -{flag.short}" if flag.short else ""
            rows.append(f"  --{name.replace('_', '-') + short:<34} {flag.help}")
    rows.append(f"  {'--serve LINE':<36} a serve line as pasted; flags beside it go before it")
    return "\b\nFlags, as in vllm serve, and kvsim's own:\n" + "\n".join(rows)


def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] [PLAN.yaml] [FLAGS]...",
            help="catalogue name, or path of a config.json; a file of the flags as keys; flags",
            show_default=False,
        ),
    ],
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Say whether a server starts, how many requests fit, and what binds; no GPU is needed."""
    from kvsim.plan.figures import figures_of
    from kvsim.plan.plan import make_plan
    from kvsim.plan.reading import read_asked
    from kvsim.plan.screen import lines_of

    made = make_plan(read_asked(words))
    print(json.dumps(figures_of(made), indent=2) if as_json else "\n".join(lines_of(made)))
    if check and not made.fits:
        raise typer.Exit(1)


def doctor(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="log, error text or /metrics; -: stdin")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FLAGS]...", help="what the log does not say", show_default=False),
    ] = None,
    as_json: Json = False,
    check: Check = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="write the constants learnt, as a file for kvsim plan", metavar="OUT.yaml"
        ),
    ] = None,
) -> None:
    """Hold the figures of a start-up log, an error text or a /metrics page against arithmetic."""
    from kvsim.memory.start_log import read_start_log
    from kvsim.plan.doctor import diagnose, keys_of
    from kvsim.plan.doctor_screen import diagnosis_lines
    from kvsim.plan.reading import read_asked

    log = read_start_log(_log_text(file))
    reading = read_asked(words or [], keys_of(log))
    found = diagnose(log, reading)
    if calibrate is not None:
        _write_constants(calibrate, {**reading.given, **found.constants}, found.constants)
    if as_json:
        plain = found._asdict()
        for name in ("rows", "findings", "remedies"):
            plain[name] = [one._asdict() for one in plain[name]]
        print(json.dumps({**plain, "fails": found.fails}, indent=2))
    else:
        print("\n".join(diagnosis_lines(found)))
        if calibrate is not None:
            print(f"{calibrate}: written; next: kvsim plan {calibrate}")
    if check and found.fails:
        raise typer.Exit(1)


def _log_text(file: str) -> str:
    if file == "-":
        return sys.stdin.buffer.read(MAX_LOG_BYTES).decode(errors="replace")
    path = Path(file)
    try:
        if path.stat().st_size > MAX_LOG_BYTES or not path.is_file():
            raise UserError(f"{path}: not a file of at most {MAX_LOG_BYTES:,} bytes")
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {reason}") from None


def _write_constants(path: Path, keys: dict, learnt: dict) -> None:
    from kvsim.config import yaml_text

    if not learnt:
        raise UserError("--calibrate: nothing to learn: total, weights and KV memory are needed")
    if path.exists():
        raise UserError(f"{path}: already exists; choose another name")
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items()}
    try:
        path.write_text(yaml_text.dump(plain), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=AS_TYPED, epilog=_help())(plan)
    app.command(context_settings=AS_TYPED)(doctor)
