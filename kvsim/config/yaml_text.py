"""YAML in and out as plain values: safe, bounded, no key twice, and every key's line."""

from __future__ import annotations

from typing import Any

import yaml

MAX_VALUES, MAX_DEPTH = 100_000, 60
KeyPath = tuple[str | int, ...]

_LoaderBase = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_LoaderBase):  # type: ignore[misc, valid-type]
    """Safe YAML (no tag makes an object) that also reads 1e3 as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:timestamp",)]
    for first, pairs in _LoaderBase.yaml_implicit_resolvers.items()
}


def _add_floats() -> None:
    import re

    _Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


_add_floats()


class YamlFault(Exception):
    """What is wrong with a YAML text, and in which line (from 1; None: as a whole)."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """The plain value of a YAML text, and the line of each key path in it. Raises YamlFault."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise YamlFault(f"not YAML: {error.problem or error.context}", line) from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlFault(f"not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise YamlFault("nested too deep") from None
    if node is None:
        raise YamlFault("empty")
    return _Plain().convert(node)


def dump(value: Any) -> str:
    return yaml.dump(
        value, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, width=100
    )


class _Plain:
    """Nodes to values with a bound on how many, so that an alias cannot multiply."""

    def __init__(self) -> None:
        self._count = 0
        self._lines: dict[KeyPath, int] = {}
        self._scalars = _Loader("")

    def convert(self, node: yaml.Node) -> tuple[Any, dict[KeyPath, int]]:
        return self._value(node, ()), self._lines

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self._count += 1
        if self._count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise YamlFault("too many values, or nested too deep", line)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq", line)
            return [self._value(item, (*path, n)) for n, item in enumerate(node.value)]
        self._check_tag(node, "map", line)
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str):
                raise YamlFault("a key must be a word", line)
            if key in out:
                raise YamlFault(f"the key {key!r} stands here twice", line)
            self._lines[(*path, key)] = line
            out[key] = self._value(value_node, (*path, key))
        return out

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise YamlFault(f"the tag {node.tag!r} is not allowed", line)
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError):
            raise YamlFault(f"{node.value[:60]!r} is not a value of {node.tag!r}", line) from None
        if not isinstance(value, bool | int | float | str | None):
            raise YamlFault(f"the tag {node.tag!r} is not allowed", line)
        return value

    def _check_tag(self, node: yaml.Node, kind: str, line: int) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            raise YamlFault(f"the tag {node.tag!r} is not allowed", line)
