"""The package's imports as a graph: at the top of modules, inside functions, and for annotations only."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = "unisono"

Graph = Mapping[str, set[str]]


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Return the files of the package by their modules' names."""
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((source / PACKAGE).rglob("*.py"))
    }


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which nobody may change: several tests look at that of each module."""
    return _tree(path.read_text())


# By the text, which tests write anew; to parse all of src takes seconds.
_tree = cache(ast.parse)


def trees() -> dict[str, ast.Module]:
    """Return the trees of all modules, by their paths in src."""
    return {str(path.relative_to(SOURCE)): parsed(path) for path in sorted(SOURCE.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports: `from a import b` is a.b."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(source: Path = SOURCE) -> Graph:
    """Return, for each module, the modules that it imports; a name that is no module counts as its package."""
    files = modules(source)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        # The native core is no file of the package, and imports none of them.
        names = set(imported(path)) - {"unisono._native"}
        found = {name if name in files else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in found if name in files} - {module}
    return graph
