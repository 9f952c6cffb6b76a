"""From a YAML file and overrides to a resolved Experiment; every fault found, in one error."""

from __future__ import annotations

import copy
import difflib
import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from kvsim.config import yaml_text
from kvsim.config.models import DEFAULT_KIND, Experiment
from kvsim.config.yaml_text import KeyPath, YamlFault
from kvsim.engine.rules import LATEST, RULES, Unchunked
from kvsim.errors import ConfigError

PRESET_BLOCK_SIZE = 16
MAX_FILE_BYTES = 4_000_000
FROM_SET = 0  # in the place of a line number


class Source:
    """A config file as plain values: `name` for messages, `folder` its paths start from."""

    def __init__(self, plain: dict, name: str, folder: Path, lines: dict[KeyPath, int]) -> None:
        self.plain = plain
        self.name = name
        self.folder = folder
        self.lines = lines

    def fault(self, path: KeyPath, text: str) -> str:
        """One line: file, line of the key (or of the nearest one above it), key path, what."""
        heads = [path[:n] for n in range(len(path), 0, -1)]
        line = next((self.lines[head] for head in heads if head in self.lines), None)
        where = self.name if line is None else f"{self.name}:{line}"
        if line == FROM_SET:
            where = f"{self.name} with --set"
        return f"{where}: {dotted(path)}: {text}" if path else f"{where}: {text}"


def read_source(path: Path, overrides: list[str] = []) -> Source:  # noqa: B006 (never changed)
    """The file's values with `key.path=value` overrides in place. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError([f"{path}: cannot be read: not a regular file"])
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError([f"{path}: larger than {MAX_FILE_BYTES:,} bytes: not a config"])
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text, at byte {error.start}"]) from None
    try:
        plain, lines = yaml_text.parse(text)
    except YamlFault as fault:
        where = f"{path}:{fault.line}" if fault.line else f"{path}"
        raise ConfigError([f"{where}: {fault}"]) from None
    if not isinstance(plain, dict):
        raise ConfigError([f"{path}: must be a mapping of keys, not {_shown(plain)}"])
    source = Source(plain, str(path), path.parent, lines)
    faults = []
    for override in overrides:
        key, sign, value = override.partition("=")
        try:
            if not sign or not key.strip():
                raise YamlFault("must be key.path=value")
            set_at(source.plain, key.strip(), yaml_text.parse(value)[0] if value.strip() else None)
            for known in [k for k in source.lines if dotted(k).startswith(key.strip())]:
                del source.lines[known]
            source.lines[tuple(key.strip().split("."))] = FROM_SET
        except YamlFault as fault:
            faults.append(f"--set {override}: {fault}")
    if faults:
        raise ConfigError(faults)
    return source


def set_at(plain: dict, key: str, value: Any) -> None:
    """Put value at the dotted key path, making mappings on the way. Raises YamlFault where the
    way leads through something else."""
    *way, last = ["sweep", key[6:]] if key.startswith("sweep.") else key.split(".")
    here: Any = plain
    for name in way:
        if isinstance(here, dict) and here.get(name) is None:
            here[name] = {}
        here = _step(here, name, key)
    if isinstance(here, list):
        _step(here, last, key)
        here[int(last)] = value
    elif isinstance(here, dict):
        here[last] = value
    else:
        raise YamlFault(f"{key!r} leads through a value that has no keys")


def _step(here: Any, name: str, key: str) -> Any:
    if isinstance(here, dict):
        return here[name]
    if isinstance(here, list) and name.isdecimal() and int(name) < len(here):
        return here[int(name)]
    raise YamlFault(f"{key!r} leads through a value that has no {name!r}")


def load(source: Source) -> Experiment:
    """The resolved experiment: presets filled in, all parts in agreement. Raises ConfigError."""
    try:
        experiment = Experiment.model_validate(source.plain)
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False):
            faults += _explained(source, fault)
        raise ConfigError(list(dict.fromkeys(faults))) from None
    except RecursionError:
        raise ConfigError([f"{source.name}: nested too deep"]) from None
    experiment = _with_rules(_with_preset(experiment))
    faults = [source.fault(path, text) for path, text in _disagreements(experiment)]
    faults += [
        source.fault(path, f"{name!r}: no such file or folder in {source.folder}")
        for path, name in _paths(source.plain.get("workload"), ("workload",))
        if not _exists(source.folder / name)
    ]
    if faults:
        raise ConfigError(faults)
    return experiment


def _paths(value: Any, path: KeyPath) -> list[tuple[KeyPath, str]]:
    """Every file that the workload names, with its key path."""
    if not isinstance(value, dict):
        return []
    found = [pair for key, item in value.items() for pair in _paths(item, (*path, key))]
    if isinstance(name := value.get("path"), str):
        found.append(((*path, "path"), name))
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long, a folder without access: the reader says so
        return True


def resolved_text(experiment: Experiment, folder: Path, new_folder: Path) -> str:
    """The experiment as YAML that runs again as it is from new_folder; its paths were relative to
    `folder`."""
    plain = experiment.model_dump(mode="json", exclude_none=True)
    return moved_text(plain, folder, new_folder)


def moved_text(plain: dict, folder: Path, new_folder: Path) -> str:
    """A config's values as YAML, its relative paths turned from `folder` to new_folder."""
    return yaml_text.dump(_moved(plain, "", folder.resolve(), new_folder.resolve()))


def _moved(value: Any, key: str, folder: Path, new_folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _moved(item, str(name), folder, new_folder) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, key, folder, new_folder) for item in value]
    is_path = isinstance(value, str) and key.rsplit(".", 1)[-1] == "path"
    if not is_path or Path(value).is_absolute():
        return value
    return Path(os.path.relpath(folder / value, new_folder)).as_posix()


def points_of(source: Source) -> list[tuple[str, dict[str, Any], Source]]:
    """Every (variant, swept values, source) that `compare` and `sweep` make of a file.

    Raises ConfigError with the faults of all of them.
    """
    load(source)
    plain = {k: v for k, v in source.plain.items() if k not in ("compare", "sweep")}
    variants = source.plain.get("compare") or {"": {}}
    sweep = source.plain.get("sweep") or {}
    places = [(("compare", name), key) for name, changes in variants.items() for key in changes]
    places += [(("sweep",), key) for key in sweep]
    points = []
    faults = [
        source.fault((*place, key), "a variant or sweep cannot change compare or sweep")
        for place, key in places
        if key.split(".")[0] in ("compare", "sweep")
    ]
    for variant, changes in variants.items():
        for at in _grid(sweep):
            point = Source(copy.deepcopy(plain), source.name, source.folder, source.lines)
            keys = [*((f"compare.{variant}", k, v) for k, v in changes.items())]
            keys += [("sweep", k, v) for k, v in at.items()]
            try:
                for place, key, value in keys:
                    where = (*place.split(".", 1), key)
                    set_at(point.plain, key, copy.deepcopy(value))
                load(point)
            except YamlFault as fault:
                faults.append(source.fault(where, str(fault)))
            except ConfigError as error:
                said = ", ".join(f"{key}={_shown(value)}" for _, key, value in keys)
                named = f"compare {variant}" if variant else "sweep"
                faults += [f"{fault} (in {named}: {said})" for fault in error.faults]
            points.append((variant, at, point))
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return points


def _grid(sweep: dict[str, list[Any]]) -> list[dict[str, Any]]:
    grid: list[dict[str, Any]] = [{}]
    for key, values in sweep.items():
        grid = [at | {key: value} for at in grid for value in values]
    return grid


@cache
def engine_presets() -> dict[str, dict]:
    text = files("kvsim").joinpath("catalog", "engines.yaml").read_text(encoding="utf-8")
    return yaml_text.parse(text)[0]


def _with_preset(experiment: Experiment) -> Experiment:
    engine, kv = experiment.engine, experiment.kv
    if engine.preset is None:
        return experiment
    preset = engine_presets()[engine.preset]
    plain = experiment.model_dump()
    if engine.step_time is None:
        plain["engine"]["step_time"] = preset["step_time"]
    if engine.max_model_len is None:
        plain["engine"]["max_model_len"] = preset["max_model_len"]
    if kv.bytes_per_token is None:
        plain["kv"]["bytes_per_token"] = preset["kv_bytes_per_token"]
    if kv.num_blocks is None:
        slots = preset["num_blocks"] * PRESET_BLOCK_SIZE
        plain["kv"]["num_blocks"] = max(slots // kv.block_size, 1)
    return Experiment.model_validate(plain)


PAPER_ERA = ("vllm-0.2", "paper")


def _with_rules(experiment: Experiment) -> Experiment:
    """What depends on whose rules apply: prefix caching, swap space."""
    plain, is_old = experiment.model_dump(), experiment.engine.rules in PAPER_ERA
    policy = plain["kv"]["policy"]
    if policy.get("prefix_caching", True) is None:
        policy["prefix_caching"] = not is_old
    if is_old and plain["kv"]["num_host_blocks"] is None:
        plain["kv"]["num_host_blocks"] = plain["kv"]["num_blocks"]
    return Experiment.model_validate(plain)


def _disagreements(experiment: Experiment) -> list[tuple[KeyPath, str]]:
    """What is wrong with values that are right each for itself."""
    engine, policy = experiment.engine, experiment.kv.policy
    found: list[tuple[KeyPath, str]] = []
    for value, path in (
        (engine.step_time, ("engine", "step_time")),
        (engine.max_model_len, ("engine", "max_model_len")),
        (experiment.kv.num_blocks, ("kv", "num_blocks")),
    ):
        if value is None:
            found.append((path, "is missing, and there is no engine.preset to give it"))
    if engine.preset is not None:
        slots = engine_presets()[engine.preset]["num_blocks"] * PRESET_BLOCK_SIZE
        if experiment.kv.block_size > slots:
            found.append((("kv", "block_size"), f"larger than the preset's pool of {slots} tokens"))
    if getattr(policy, "prefix_index", "hash_chain") != "hash_chain":
        path = ("kv", "policy", "prefix_index")
        if engine.rules in PAPER_ERA:
            text = f"must be hash_chain: {engine.rules} has no prefix caching"
            found.append((path, text))
        elif not policy.prefix_caching:
            found.append((path, f"{policy.prefix_index} needs prefix_caching: true"))
    found += _beam_faults(experiment) + _prefix_faults(experiment)
    budget, path = engine.max_num_batched_tokens, ("engine", "max_num_batched_tokens")
    is_static = engine.batching == "static"
    if is_static and policy.kind != "contiguous":
        found.append(
            (("engine", "batching"), "static needs kv.policy.kind contiguous: it never grows")
        )
    if is_static and engine.long_prefill_token_threshold:
        text = (
            f"{engine.long_prefill_token_threshold} has no meaning in a static batch: leave it out"
        )
        found.append((("engine", "long_prefill_token_threshold"), text))
    if budget < engine.max_num_seqs and not is_static:
        found.append(
            (
                path,
                f"{budget} must be at least max_num_seqs ({engine.max_num_seqs}): each running "
                "sequence takes a token of every step",
            )
        )
    rules = RULES.get(engine.rules, LATEST)
    if policy.kind != "contiguous" and policy.watermark and not rules.has_watermark:
        found.append((("kv", "policy", "watermark"), f"{engine.rules} has none: it must be 0"))
    if engine.rules in PAPER_ERA:
        for key, neutral in (
            ("admission", None),
            ("scheduling_policy", "fcfs"),
            ("long_prefill_token_threshold", 0),
        ):
            if (value := getattr(engine, key)) != neutral:
                text = f"{_shown(value)} has no meaning under {engine.rules}: leave it out"
                found.append((("engine", key), text))
        if engine.chunked_prefill:
            found.append((("engine", "chunked_prefill"), f"must be false: {engine.rules} has none"))
        if getattr(policy, "prefix_caching", False):
            path = ("kv", "policy", "prefix_caching")
            found.append((path, f"must be false: {engine.rules} has none"))
    elif experiment.kv.num_host_blocks is not None:
        path = ("kv", "num_host_blocks")
        found.append((path, f"{engine.rules} does not swap: leave it out"))
    path = ("engine", "max_num_batched_tokens")
    longest = engine.max_model_len or 0
    can_wait = rules.unchunked is not Unchunked.CHUNK
    if not engine.chunked_prefill and can_wait and budget < longest and not is_static:
        found.append(
            (
                path,
                f"{budget} must be at least max_model_len ({longest}) with chunked_prefill: false, "
                "or a longer prompt could never be scheduled",
            )
        )
    return found


def _beam_faults(experiment: Experiment) -> list[tuple[KeyPath, str]]:
    """Beams need groups that fork, and take the place of parallel answers."""
    workload, found = experiment.workload, []
    if workload.beam is None:
        return found
    for value, allowed, path in (
        (experiment.engine.rules, PAPER_ERA, ("engine", "rules")),
        (experiment.kv.policy.kind, ("paged_sharing",), ("kv", "policy", "kind")),
    ):
        if value not in allowed:
            found.append((path, _needed(value, allowed, "workload.beam")))
    if (workload.num_samples or 1) > 1:
        text = f"{workload.num_samples} is not 1, which workload.beam needs: it gives the width"
        found.append((("workload", "num_samples"), text))
    return found


def _prefix_faults(experiment: Experiment) -> list[tuple[KeyPath, str]]:
    """Registered prefixes came before prefix caching, and there must be some."""
    if not getattr(experiment.kv.policy, "registered_prefixes", False):
        return []
    found: list[tuple[KeyPath, str]] = []
    name, rules = "kv.policy.registered_prefixes", experiment.engine.rules
    if rules not in PAPER_ERA:
        found.append((("engine", "rules"), _needed(rules, PAPER_ERA, name)))
    workload = experiment.workload
    if workload.kind == "synthetic" and workload.prefixes is None:
        found.append((("workload", "prefixes"), f"is missing, and {name} needs it"))
    return found


def _needed(value: str, allowed: tuple[str, ...], name: str) -> str:
    near = difflib.get_close_matches(value, allowed, n=1, cutoff=0.0)[0]
    text = f"{value!r} is not one of {', '.join(allowed)}, which {name} needs"
    return f"{text}; nearest is {near!r}"


def _explained(source: Source, fault: Any) -> list[str]:
    """Lines for one pydantic error: path, value, what is allowed, the nearest valid key."""
    path = _key_path(source.plain, fault["loc"])
    kind, context = fault["type"], fault.get("ctx", {})
    value = fault.get("input")
    if kind == "extra_forbidden":
        keys = _keys_at(source.plain, path[:-1])
        near = difflib.get_close_matches(str(path[-1]), keys, n=1, cutoff=0.0)
        hint = f"; nearest is {near[0]!r}" if near else ""
        text = f"{_shown(path[-1])} is not a key here (value {_shown(value)}); allowed are "
        return [source.fault(path, text + ", ".join(keys) + hint)]
    if kind == "missing":
        keys = _keys_at(source.plain, path) or _keys_at(source.plain, path[:-1])
        return [source.fault(path, f"is missing; the keys here are {', '.join(keys)}")]
    if kind == "union_tag_invalid":
        tags = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        near = difflib.get_close_matches(str(context["tag"]), tags, n=1, cutoff=0.0)[0]
        text = f"{context['tag']!r} is not one of {', '.join(tags)}; nearest is {near!r}"
        return [source.fault((*path, "kind"), text)]
    if kind == "union_tag_not_found":
        text = f"a mapping with a `kind` is needed, not {_shown(value)}"
        return [source.fault((*path, "kind") if isinstance(value, dict) else path, text)]
    if kind == "literal_error":
        allowed = [word.strip(" '") for word in context["expected"].replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)
        hint = f"; nearest is {near[0]!r}" if near and isinstance(value, str) else ""
        return [source.fault(path, f"{_shown(value)} is not one of {', '.join(allowed)}{hint}")]
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind in ("model_type", "dict_type"):
        message = "should be a mapping of keys"
    if kind == "value_error":
        return [source.fault(path, message)]
    return [source.fault(path, f"{_shown(value)}: {message}")]


def _key_path(plain: Any, location: tuple) -> KeyPath:
    """A pydantic location less the union tags in it, which are no keys of the file."""
    path: list[str | int] = []
    here = plain
    for place, part in enumerate(location):
        is_last = place == len(location) - 1
        if isinstance(here, dict):
            if part not in here and here.get("kind", DEFAULT_KIND) == part:
                continue
            path.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            path.append(part)
            here = here[part] if part < len(here) else None
        elif isinstance(here, list) or not is_last:
            continue
        else:
            path.append(part)
    return tuple(path)


def _keys_at(plain: Any, path: KeyPath) -> list[str]:
    """The keys that a mapping at this path may have."""
    model: Any = Experiment
    here = plain
    for part in path:
        if isinstance(part, str) and isinstance(model, type) and issubclass(model, BaseModel):
            model = model.model_fields[part].annotation if part in model.model_fields else None
        here = _inside(here, part)
        model = _model_for(model, here)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _inside(here: Any, part: str | int) -> Any:
    try:
        return here[part]
    except (KeyError, IndexError, TypeError):
        return None


def _model_for(annotation: Any, value: Any) -> Any:
    """The model among an annotation's (a union, list or optional of models) that value is of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    candidates = [_model_for(part, value) for part in get_args(annotation)]
    models = [model for model in candidates if model is not None]
    kind = value.get("kind", DEFAULT_KIND) if isinstance(value, dict) else None
    for model in models:
        field = model.model_fields.get("kind")
        if field is not None and kind in get_args(field.annotation):
            return model
    return models[0] if len(models) == 1 else None


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) if part != "" else "''" for part in path)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
