"""Every module has a docstring and `__all__`, and none is too long."""

from __future__ import annotations

import ast
import importlib

import pytest
from import_graph import SOURCE, import_graph, modules

NAMES = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))]

MAX_FILE, MAX_FUNCTION = 300, 50
MIN_FILE = 30

# What may be longer, each with its reason: "unisono/file.py", or "unisono/file.py:function".
LONGER: dict[str, str] = {
    "unisono/comm/fast_path.py:collective": "the hot path: a further function would slow every call",
}

SHORTER = {"unisono.interop.torch_rpc.functions": "a module of torch.distributed.rpc has this name"}
"""Modules that may be shorter with one importing module, each with its reason."""

# Each entry of a registry is a file of its own.
ENTRIES = (
    *("unisono.collectives.algorithms", "unisono.checkpoint.formats", "unisono.compression.codecs"),
    *("unisono.data.partitions", "unisono.tools.bench.peers", "unisono.tools.cli.commands"),
    "unisono.tools.doctor.checks",
)


def parse(name: str) -> ast.Module:
    return ast.parse((SOURCE / name).read_text(), name)


def defined(tree: ast.Module) -> set[str]:
    """The public names that a module makes itself. Type variables are its own business."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec(")):
            names.update(leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def too_long(name: str) -> set[str]:
    """The file, and those of its functions, that have too many lines; a docstring does not count in a function."""
    found = {name} if len((SOURCE / name).read_text().splitlines()) > MAX_FILE else set()
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = length(node) - (length(node.body[0]) if ast.get_docstring(node) else 0)
            if lines > MAX_FUNCTION:
                found.add(f"{name}:{node.name}")
    return found


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("name", NAMES)
def test_module_has_a_docstring(name: str) -> None:
    summary = (ast.get_docstring(parse(name)) or "").split("\n\n")[0]
    assert summary, f"{name} has no docstring"
    assert summary.endswith((".", ":")), f"{name} begins with {summary!r}, which is no sentence"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("__main__.py")])
def test_module_has_all(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    offered: list[str] = getattr(module, "__all__", [])
    assert len(offered) == len(set(offered)), f"{name} offers a name twice"
    missing = [offer for offer in offered if not hasattr(module, offer)]
    assert not missing, f"{name} offers {missing}, but has no such thing"
    hidden = defined(parse(name)) - set(offered)
    assert not hidden, f"{name} defines {sorted(hidden)}: put them into __all__, or begin them with an underscore"


def test_files_and_functions_are_short() -> None:
    found = {entry for name in NAMES for entry in too_long(name)}
    found |= {path.name for path in (SOURCE / "native").rglob("*.?pp") if len(path.read_text().splitlines()) > MAX_FILE}
    assert not found - LONGER.keys(), f"over {MAX_FILE} lines a file or {MAX_FUNCTION} a function; split, or say why"
    assert not LONGER.keys() - found, "not so long any more: take them out of LONGER"


def test_no_module_is_a_fragment_of_its_only_user() -> None:
    graph = import_graph()
    users = {module: [user for user, near in graph.items() if module in near] for module in graph}
    found = {
        module
        for module, path in modules().items()
        if len(path.read_text().splitlines()) < MIN_FILE
        and len(users[module]) == 1
        and path.stem != "__init__"
        and not any(module.startswith(f"{package}.") for package in ENTRIES)
    }
    assert found == SHORTER.keys(), f"under {MIN_FILE} lines: move them beside their only users, or say why not"


def test_no_package_hides_its_modules() -> None:
    files = modules()
    for package, path in files.items():
        if path.stem == "__init__":
            for node in ast.walk(parse(str(path.relative_to(SOURCE)))):
                if isinstance(node, ast.ImportFrom):
                    names = {f"{package}.{alias.asname or alias.name}" for alias in node.names}
                    hidden = {name for name in names if name in files and node.module != package}
                    assert not hidden, f"{package} has functions named as modules: {sorted(hidden)}"


def test_measures_count_correctly() -> None:
    assert defined(parse("unisono/core/types.py")) >= {"Send", "COLLECTIVE_TAG", "Message"}
    assert "T" not in defined(parse("unisono/core/registry.py"))
    function = ast.parse('def f():\n    """Two\n    lines."""\n    return 1\n').body[0]
    assert isinstance(function, ast.FunctionDef)
    assert (length(function), length(function.body[0])) == (4, 2)
