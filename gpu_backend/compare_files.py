"""A comparison as files: tables, charts, the fitted step times, and the config that repeats it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import yaml

from gpu_backend.compare import Comparison
from gpu_backend.compare_charts import draw
from gpu_backend.compare_tables import (
    ERRORS,
    ERRORS_TITLE,
    FIGURES,
    FIGURES_TITLE,
    METRICS,
    Row,
    Summary,
    errors_of,
    figures_of,
    in_words,
    replay_line,
    rows_of,
    step_errors,
    summaries_of,
)
from gpu_backend.trials import Trial, Variant
from kvsim.config.loading import Source, moved_text
from kvsim.study.results import COMPARED, CONFIG, write_json

LOAD_COLUMNS = ("num_prompt_tokens", "num_seqs", "context", "num_chunks", "num_pairs")


def write(
    folder: Path,
    source: Source,
    target: Path,
    asked: dict[str, object],
    comparison: Comparison,
) -> None:
    """Everything that a comparison leaves, in a folder that is to become `target`; `asked` are the
    options of the command."""
    (folder / CONFIG).write_text(moved_text(source.plain, source.folder, target))
    write_json(folder / COMPARED, _plain(asked, comparison))
    _write_rows(folder / "compare.csv", rows_of(comparison))
    _write_steps(folder / "steps.csv", comparison)
    (folder / "step_time.yaml").write_text(_step_times(comparison.variants))
    (folder / "compare.md").write_text(_markdown(asked, comparison))
    draw(comparison, folder)


def _plain(asked: dict[str, object], comparison: Comparison) -> dict[str, object]:
    summaries = summaries_of(comparison)
    return {
        "environment": comparison.environment,
        "options": asked,
        "variants": [
            {
                "variant": variant.name,
                "seed": variant.experiment.seed,
                "capacity_per_s": variant.capacity_per_s,
                "grid_steps": variant.num_grid_steps,
                "step_time": variant.step_time.model_dump(),
                "points": [_summary(one) for one in summaries if one.variant == variant.name],
                "trials": [_trial(trial) for trial in variant.trials],
            }
            for variant in comparison.variants
        ],
    }


def _summary(one: Summary) -> dict[str, object]:
    spreads = {
        name: None if (spread := getattr(one, name)) is None else spread._asdict()
        for name in ("simulated", "measured", "error")
    }
    return {"load": one.load, "rate_per_s": one.rate_per_s, "metric": one.metric} | spreads


def _trial(trial: Trial) -> dict[str, object]:
    each, total = step_errors([trial])
    return {
        "load": trial.load,
        "rate_per_s": trial.rate_per_s,
        "seed": trial.seed,
        "simulated": {name: figure(trial.simulated) for name, figure in METRICS.items()},
        "measured": {name: figure(trial.measured) for name, figure in METRICS.items()},
        "step_error_each": each,
        "step_error_sum": total,
        "replay": trial.replay._asdict(),
        "step_time": trial.step_time.model_dump(),
    }


def _write_rows(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Row._fields, "error"])
        writer.writerows([*row, row.error] for row in rows)


def _write_steps(path: Path, comparison: Comparison) -> None:
    """Every step of every real run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "load", "seed", *LOAD_COLUMNS, "measured_ns", "predicted_ns"])
        for variant in comparison.variants:
            for trial in variant.trials:
                loads, measured, predicted = trial.steps
                table = np.column_stack([loads, measured, predicted]).tolist()
                writer.writerows([trial.variant, trial.load, trial.seed, *row] for row in table)


def _step_times(variants: list[Variant]) -> str:
    plain = {variant.name: variant.step_time.model_dump() for variant in variants}
    head = "# Fitted to the grid: one of these, put under engine.step_time of an experiment.\n"
    return head + yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=96)


def _markdown(asked: dict[str, object], comparison: Comparison) -> str:
    lines = ["# Simulated beside measured", ""]
    known = {**comparison.environment, **asked}
    lines += [f"- {name}: {value}" for name, value in known.items() if value is not None]
    for variant in comparison.variants:
        lines.append(
            f"- {_in_a_cell(variant.name)}: seed {variant.experiment.seed} and those after it, "
            f"capacity {variant.capacity_per_s:.2f} requests/s, {variant.num_grid_steps:,} steps "
            "of the grid"
        )
    for title, header, rows in (
        (FIGURES_TITLE, FIGURES, figures_of(comparison)),
        (ERRORS_TITLE, ERRORS, errors_of(comparison)),
    ):
        lines += ["", f"{title}.", "", *_table(header, rows)]
    lines += ["", replay_line(comparison) + ".", "", "## Every metric", ""]
    header = ("policy", "load", "metric", "measured", "simulated", "error %")
    lines += _table(header, [_cells(one) for one in summaries_of(comparison)])
    return "\n".join(lines) + "\n"


def _cells(one: Summary) -> tuple[str, ...]:
    load = "all at once" if one.load is None else f"{one.load:g}"
    numbers = (in_words(spread, "{:,.4g}") for spread in (one.measured, one.simulated))
    return (one.variant, load, one.metric, *numbers, in_words(one.error, "{:+.1f}", 100))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    marks = ["---"] * len(header)
    lines = [header, marks, *(map(_in_a_cell, row) for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _in_a_cell(text: str) -> str:
    """A variant may have any name: lines and bars in it would end a cell."""
    return " ".join(text.split()).replace("|", "\\|")
