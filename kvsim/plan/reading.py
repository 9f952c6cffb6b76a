"""What was asked for, from the command line, a pasted serve line and a YAML file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.config import yaml_text
from kvsim.errors import ConfigError
from kvsim.plan.flags import FLAGS, Asked, Fault
from kvsim.plan.serve_line import Words, read_serve_line, read_words, shown

MAX_FILE_BYTES = 4_000_000
NOTHING = Words({}, [], [], [])


class Reading(NamedTuple):
    """asked; given: the keys that were set at all; flags passed over, and those that take memory
    that is not modelled."""

    asked: Asked
    given: dict[str, Any]
    ignored: list[str]
    unmodelled: list[str]


def read_asked(words: list[str], before: dict[str, Any] | None = None) -> Reading:
    """Of one key, what comes last counts: `before` (a log's figures), a YAML file, a serve line,
    a flag. Raises ConfigError with all faults of all of them."""
    faults: list[str] = []

    def tried(read, *given) -> Words:
        try:
            return read(*given)
        except ConfigError as error:
            faults.extend(error.faults)
            return NOTHING

    line, rest = _without_serve(words)
    typed = tried(read_words, rest)
    parts = [Words(dict(before or {}), [], [], [])]
    places = [Path(place) for place in typed.places]
    parts += [tried(read_yaml, path) for path in places if is_yaml(path)]
    if line is not None:
        parts.append(tried(read_serve_line, line))
    models = [place for place, path in zip(typed.places, places, strict=True) if not is_yaml(path)]
    for extra in models[1:]:
        faults.append(f"{extra!r}: belongs to no flag, and the model is {models[0]!r}")
    parts += [Words({"model": models[0]}, [], [], [])] if models else []
    parts.append(typed)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    values = {key: value for part in parts for key, value in part.values.items()}
    ignored = dict.fromkeys(name for part in parts for name in part.ignored)
    unmodelled = dict.fromkeys(name for part in parts for name in part.unmodelled)
    return Reading(Asked(**values), values, list(ignored), list(unmodelled))


def is_yaml(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def _without_serve(words: list[str]) -> tuple[str | None, list[str]]:
    """The value of --serve, and the other words."""
    for n, word in enumerate(words):
        flag, sign, value = word.partition("=")
        if flag != "--serve":
            continue
        if sign:
            return value, words[:n] + words[n + 1 :]
        if n + 1 == len(words):
            raise ConfigError(["--serve: a value is missing: the line in quotes"])
        return words[n + 1], words[:n] + words[n + 2 :]
    return None, words


def read_yaml(path: Path) -> Words:
    """A file of the flags as keys, with dashes or underscores, and `shape`; its model, where it is
    a path, starts from the file's folder. ConfigError with a line for each fault."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES or not path.is_file():
            raise ConfigError([f"{path}: not a plan file"])
        plain, lines = yaml_text.parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text, at byte {error.start}"]) from None
    except yaml_text.YamlFault as fault:
        where = f"{path}:{fault.line}" if fault.line else f"{path}"
        raise ConfigError([f"{where}: {fault}"]) from None
    if not isinstance(plain, dict):
        raise ConfigError([f"{path}: must be a mapping of keys, not {shown(plain)}"])
    values, faults = {}, []
    for key, raw in plain.items():
        name = str(key).replace("-", "_")
        where = f"{path}:{lines[(key,)]}: {key}" if (key,) in lines else f"{path}: {key}"
        if name not in FLAGS:
            near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.0)[0]
            faults.append(f"{where}: is not a key here; nearest is {near!r}")
            continue
        try:
            values[name] = FLAGS[name].read(raw)
        except Fault as fault:
            faults.append(f"{where}: {shown(raw)} {fault}")
    if faults:
        raise ConfigError(faults)
    beside = path.parent / str(values.get("model"))
    if "model" in values and beside.exists():
        values["model"] = str(beside)
    return Words(values, [], [], [])
