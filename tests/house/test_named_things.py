"""Every name in backticks in a docstring is one that the code still has."""

from __future__ import annotations

import ast
import builtins
import enum
import keyword
import pkgutil
import re
import socket
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
import torch
import torch.distributed as dist
from import_graph import SOURCE
from torch.distributed import fsdp
from torch.distributed.algorithms import join
from torch.nn import parallel
from torch.optim import swa_utils
from torch.utils import data


@cache
def trees() -> dict[str, ast.Module]:
    """All modules, by path."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


# What docstrings name without the module.
LIBRARIES = (builtins, enum, socket, torch, torch.nn, dist, fsdp, join, parallel, parallel.DistributedDataParallel)
LIBRARIES += (swa_utils, data)
# Commands of a shell, a hook of `enum.Enum`, and a parameter of torch's `new_group`.
ELSEWHERE = frozenset({"salloc", "sbatch", "txt2bin", "_missing_", "pg_options"})
PACKAGES = (
    "un",
    "unisono",
    "torch",
    "threading",
    "time",
    "datetime",
    "concurrent",
    "subprocess",
    "queue",
    "sys",
    "copy",
)
NAME = re.compile(r"`([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?:\([^`]*\))?`")


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings that stand alone: docstrings, and those below a variable or a field."""
    for node in nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Identifiers of the code, and the words of its strings, which hold names of options and attributes."""
    documentation = set(docstrings(tree))
    for node in nodes(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
            yield node.asname or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield from re.findall(r"\w+", node.value)


def members(trees: Mapping[str, ast.Module]) -> dict[str, tuple[set[str], set[str]]]:
    """For each name of a class: attributes that classes of this name define, and the names of their bases."""
    found: defaultdict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for tree in trees.values():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                attributes, bases = found[node.name]
                attributes |= set(stored(node))
                bases |= {leaf.id for base in node.bases for leaf in ast.walk(base) if isinstance(leaf, ast.Name)}
                bases |= {
                    leaf.attr for base in node.bases for leaf in ast.walk(base) if isinstance(leaf, ast.Attribute)
                }
    return dict(found)


def stored(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def has(classes: Mapping[str, tuple[set[str], set[str]]], name: str, attribute: str) -> bool:
    """Return whether a class may have the attribute: one with a base of another library may have any."""
    if name not in classes:
        return name not in ("object", "Protocol", "Generic", "ABC")
    attributes, bases = classes[name]
    return attribute in attributes or any(has(classes, base, attribute) for base in bases - {name})


def importable(name: str) -> bool:
    """Return whether a dotted name leads to an object; torch warns when some of its old modules are looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pkgutil.resolve_name(re.sub(r"^un\b", "unisono", name))
        except (ImportError, AttributeError):
            return False
    return True


def gone(trees: Mapping[str, ast.Module]) -> list[str]:
    """Names in backticks in docstrings that the code does not have; files are no names."""
    known = {name for tree in trees.values() for name in identifiers(tree)}
    known |= {*keyword.kwlist, *ELSEWHERE, *(name for library in LIBRARIES for name in dir(library))}
    known |= {part for path in trees for part in re.findall(r"\w+", path)}
    classes = members(trees)
    found = []
    for path, tree in trees.items():
        for text in docstrings(tree):
            for name in NAME.findall(str(text.value)):
                first, *rest = name.split(".")
                if name.endswith(".json"):
                    continue
                if rest and first in PACKAGES:
                    there = importable(name)
                elif rest and first in classes:
                    there = has(classes, first, rest[0])
                else:
                    there = {first, *rest} <= known
                if not there:
                    found.append(f"{path}:{text.lineno}: {name}")
    return found


def test_docstrings_name_what_is_there() -> None:
    found = gone(trees())
    assert not found, "docstrings name what is gone:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("named", "there"),
    [
        ("Box", True),
        ("Box.open", True),
        ("Box.size", True),
        ("Lid.open", True),
        ("seal(tight)", True),
        ("un.launch", True),
        ("torch.nn.Module", True),
        ("Box.gone", False),
        ("Lid.gone", False),
        ("un.gone", False),
        ("torch.gone", False),
        ("removed()", False),
    ],
)
def test_a_name_that_is_gone_is_found(named: str, there: bool) -> None:
    code = f'''
class Box:
    """As `{named}`."""
    def open(self):
        self.size = 1
class Lid(Box): ...
def seal(tight): ...
'''
    assert (gone({"box.py": ast.parse(code)}) == []) == there
