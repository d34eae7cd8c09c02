"""What docstrings and comments name is there: names in backticks, arguments, attributes, and paths of files."""

from __future__ import annotations

import ast
import builtins
import enum
import keyword
import pkgutil
import re
import socket
import subprocess
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from import_graph import parsed, trees
from torch.distributed.algorithms import join
from torch.nn import parallel
from torch.optim import swa_utils
from torch.utils import data

# What docstrings name without the module.
LIBRARIES = (builtins, enum, socket, torch, torch.nn, dist, join, parallel, parallel.DistributedDataParallel)
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
    from torch.distributed import fsdp

    known = {name for tree in trees.values() for name in identifiers(tree)}
    known |= {*keyword.kwlist, *ELSEWHERE, *(name for library in (*LIBRARIES, fsdp) for name in dir(library))}
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


SECTION = re.compile(r"[A-Z]\w+:")
ENTRY = re.compile(r"((?:\*{0,2}\w+(?:, )?)+)(?: \([^)]*\))?: *(\w*)")
# An argument that is called is described by what it does; a value is not.
DOES = frozenset({"Returns", "Called", "Allocates", "Makes"})
VALUES = frozenset({"str", "int", "float", "bool", "bytes"})


def entries(docstring: str) -> Iterator[tuple[str, list[str], str]]:
    """Each entry of the sections `Args` and `Attributes`: section, names, and first word of the description."""
    section = ""
    below = within = 0
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if SECTION.fullmatch(line.strip()):
            section = line.strip(" :")
            below = indent
            within = 0
        elif section in ("Args", "Attributes") and line.strip():
            within = within or indent
            if indent <= below:
                section = ""
            elif indent == within and (entry := ENTRY.match(line.strip())):
                yield section, re.findall(r"\w+", entry[1]), entry[2]


def parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr | None] | None:
    """Parameters of a function or of a class's constructor with their annotations; None for a class without one."""
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef]
    if isinstance(node, ast.ClassDef):
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        functions = [each for each in functions if each.name in ("__init__", "__new__")]
    else:
        functions = [node]
    found = {}
    for function in functions:
        of = function.args
        for each in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg):
            if each is not None:
                found[each.arg] = each.annotation
    return found if functions else None


def undefined(trees: Mapping[str, ast.Module]) -> list[str]:
    """Entries of `Args` and `Attributes` that the signature or the class does not have, or that cannot be called."""
    classes = members(trees)
    found = []
    for path, tree in trees.items():
        for node in nodes(tree):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = parameters(node)
            for section, names, verb in entries(ast.get_docstring(node) or ""):
                for name in names:
                    if section == "Attributes" or given is None:
                        there = has(classes, node.name, name)
                    else:
                        kind = given.get(name)
                        value = isinstance(kind, ast.Name) and kind.id in VALUES
                        there = name in given and not (value and verb in DOES)
                    if not there:
                        found.append(f"{path}:{node.lineno}: {node.name}: {section}: {name}")
    return found


def test_entries_of_docstrings_are_arguments_and_attributes() -> None:
    found = undefined(trees())
    assert not found, "docstrings describe what is gone, or a value as if it was called:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("entry", "there"),
    [
        ("Args:\n        size: Number of lids.\n            of this box", True),
        ("Args:\n        size, lid: Both.", True),
        ("Args:\n        make: Returns a lid.", True),
        ("Attributes:\n        size: Number of lids.", True),
        ("Args:\n        crew: Who opens it.", False),
        ("Args:\n        size: Returns a size.", False),
        ("Attributes:\n        lid: Not stored.", False),
    ],
)
def test_an_entry_that_is_gone_is_found(entry: str, there: bool) -> None:
    code = f'''
class Box:
    """A box.

    {entry}
    """
    def __init__(self, size: int, lid: object, make: Callable[[], object]) -> None:
        self.size = size
'''
    assert (undefined({"box.py": ast.parse(code)}) == []) == there


ROOT = Path(__file__).parents[2]
PATH = re.compile(r"(?<![\w/.*{}<>-])(?:[\w.-]+/)*[\w-]+\.(?:py|hpp|cpp|md|toml|yml)\b(?!\w)")
# A file of nanobind's.
FOREIGN = frozenset({"nb_combined.cpp"})


COMMENT = {
    ".py": re.compile(r"(?:^ *|  )#(.*)", re.MULTILINE),
    ".hpp": re.compile(r"//(.*)"),
    ".cpp": re.compile(r"//(.*)"),
}
ANY_LINE = re.compile(r"(.+)")


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment; of each line in settings, whose values name files as well."""
    text = path.read_text()
    for found in COMMENT.get(path.suffix, ANY_LINE).finditer(text):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


def missing_files(root: Path, names: list[str]) -> list[str]:
    """Paths in comments, in docstrings of the package and in settings that lead to no file of the tree."""
    ends = {"/".join(parts[start:]) for parts in (name.split("/") for name in names) for start in range(len(parts))}
    found = []
    for name in names:
        path = root / name
        if not (path.name == "Makefile" or path.suffix in (".py", ".hpp", ".cpp", ".toml", ".yml")):
            continue
        lines = list(comments(path))
        if path.suffix == ".py" and name.startswith("src/"):
            lines += [(text.lineno, str(text.value)) for text in docstrings(parsed(path))]
        for number, line in lines:
            # A docstring may name a file of its example; a path with a folder is one of ours.
            named = [each for each in PATH.findall(line) if "/" in each or "\n" not in line]
            found += [f"{name}:{number}: {each}" for each in named if each not in ends | FOREIGN]
    return found


def test_paths_lead_to_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = missing_files(ROOT, [name for name in listed if (ROOT / name).is_file()])
    assert not found, "comments name files that are gone:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "there"),
    [
        ("src/box.py", "# See lid.hpp.", True),
        ("src/box.py", "# See native/lid.hpp.", True),
        ("src/box.py", '"""As native/lid.hpp does."""', True),
        ("src/box.py", "# See old/lid.hpp.", False),
        ("src/box.py", '"""As src/lid.hpp does."""', False),
        ("src/native/lid.hpp", "// As in box.py.", True),
        ("src/native/lid.hpp", "int x;  // As in boxes.py.", False),
        ("box.toml", '"src/box.py" = 1', True),
        ("box.toml", '"src/boxes.py" = 1', False),
    ],
)
def test_a_path_that_is_gone_is_found(tmp_path: Path, name: str, text: str, there: bool) -> None:
    for each in ("src/box.py", "src/native/lid.hpp", "box.toml"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text(text if each == name else "")
    assert (missing_files(tmp_path, ["src/box.py", "src/native/lid.hpp", "box.toml"]) == []) == there
