"""Who may import whom: the dependencies point one way."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "kvsim").rglob("*.py"))
GPU_ONLY = {"torch", "triton", "gpu_backend"}
ENGINE_TYPES = ("kvsim.engine.request", "kvsim.engine.plan")

# package -> what its modules may import beside the standard library, numpy and their own package
ALLOWED = {
    "kvsim.engine": (),
    "kvsim.latency": (*ENGINE_TYPES, "kvsim.memory", "kvsim.errors", "yaml"),
    "kvsim.workload": (*ENGINE_TYPES, "kvsim.errors"),
    "kvsim.memory": ("kvsim.errors", "pydantic", "yaml"),
    "kvsim.fit": ("kvsim.latency", "kvsim.memory", "kvsim.errors", "yaml"),
    "kvsim.sim": ("kvsim.engine", "kvsim.workload", "kvsim.latency", "kvsim.errors", "simpy"),
}
# inside functions only: most runs need neither, and they take long to load
LAZY = {"kvsim.workload.traces": ("pyarrow", "pandas", "tiktoken", "tokenizers")}
LAYERS = (
    "engine", "memory", "latency", "workload", "sim", "config", "plan", "fit", "study", "cli",
)  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, is_lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether only when a function runs) of every import that runs."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports name the whole path"
            yield from ((f"{child.module}.{alias.name}", is_lazy) for alias in child.names)
        elif (
            isinstance(child, ast.Call)
            and ast.unparse(child.func).endswith("import_module")
            and isinstance(child.args[0], ast.Constant)
        ):
            yield child.args[0].value, is_lazy
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, is_lazy or is_function)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_what_its_layer_may(path):
    name = name_of(path)
    package = ".".join(name.split(".")[:2])
    if package not in ALLOWED:
        return
    lazy = [extra for prefix, extra in LAZY.items() if is_within(name, (prefix,))]
    for module, is_lazy in imports_of(path):
        if module.split(".")[0] in {*sys.stdlib_module_names, "numpy"}:
            continue
        allowed = (package, *ALLOWED[package])
        if is_lazy and lazy:
            allowed += lazy[0]
        assert is_within(module, allowed), f"{name} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_simulator_never_imports_the_gpu_backend(path):
    assert not {module.split(".")[0] for module, _ in imports_of(path)} & GPU_ONLY


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_imports_a_later_layer(path):
    parts = name_of(path).split(".")
    if len(parts) < 2 or parts[1] not in LAYERS:
        return
    mine = LAYERS.index(parts[1])
    for module, _ in imports_of(path):
        other = module.split(".")
        if other[0] == "kvsim" and other[1] in LAYERS:
            assert LAYERS.index(other[1]) <= mine, f"{name_of(path)} imports {module}"


def test_no_modules_import_each_other_in_a_circle():
    names = {name_of(path) for path in MODULES}
    needs: dict[str, set[str]] = {}
    for path in MODULES:
        found = set()
        for module, _ in imports_of(path):
            while module and module not in names:
                module = module.rpartition(".")[0]
            found |= {module} - {"", "kvsim", name_of(path)}
        needs[name_of(path)] = found
    while ready := [name for name, found in needs.items() if not found & needs.keys()]:
        for name in ready:
            del needs[name]
    assert not needs


def test_the_walk_sees_what_it_should():
    source = """
import torch
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import pandas
def read():
    from pyarrow import parquet
"""
    found = dict(imports(ast.parse(source)))
    assert found == {"torch": False, "typing.TYPE_CHECKING": False, "pyarrow.parquet": True}
