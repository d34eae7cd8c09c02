"""Figures of the house: how whole its files are, and how much one module knows of another's insides.

    python tests/house/counts.py [--list]

With --list, each place that a figure counts. Figures:

- files: Python files of the package.
- fragments: files with under 50 lines of code that are neither a package's list of names nor an entry of a registry.
  Blank lines, comments and docstrings are no code.
- packed: assignments of several values to as many targets, `a, b = x, y`.
- names: classes that share their name with one of another module.
- inside: reads of an underscore name that the module of the read does not define, of an object of the package. What
  Python documents under such a name is no inside.
- torch: the same, of a module or class of torch.
- tests: the same in tests/, of either.
- globals: objects at the top level of a module that can change, without a comment or a docstring beside them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/unisono"
TESTS = ROOT / "tests"
FEW_LINES = 50
REGISTRIES = (
    "checkpoint/formats",
    "checkpoint/storage",
    "collectives/algorithms",
    "compression/codecs",
    "data/partitions",
    "launcher/launchers",
    "tools/bench/peers",
    "tools/cli/commands",
    "tools/doctor/checks",
)
"""Folders with one entry a file."""
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_current_frames", "_exit", "_value_", "_native"}
MUTABLE = {"dict", "list", "set", "defaultdict", "deque", "Counter", "WeakSet", "WeakValueDictionary", "count"}
MUTABLE |= {"WeakKeyDictionary", "OrderedDict", "Lock", "RLock", "Condition", "Event", "local", "ContextVar"}
FIXED = re.compile(r"Final|Mapping|frozenset|tuple")

Found = Iterator[str]


def code_lines(text: str) -> int:
    """Lines with code."""
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def fragments(trees: dict[Path, ast.Module]) -> Found:
    for path in trees:
        where = path.relative_to(PACKAGE).as_posix()
        if path.name in ("__init__.py", "__main__.py") or where.startswith(REGISTRIES):
            continue
        lines = code_lines(path.read_text())
        if lines < FEW_LINES:
            yield f"{where}: {lines} lines"


def packed(trees: dict[Path, ast.Module]) -> Found:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            several = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List)
            if several and any(isinstance(target, ast.Tuple | ast.List) for target in node.targets):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def names(trees: dict[Path, ast.Module]) -> Found:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}")
    for name, paths in sorted(homes.items()):
        if len(set(paths)) > 1:
            yield f"{name}: {', '.join(paths)}"


def defined(tree: ast.Module) -> set[str]:
    """Underscore names that a module defines: functions, classes, attributes of `self`, variables, fields."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner == "self" or (owner == "cls" and isinstance(node.ctx, ast.Store)):
                found.add(node.attr)
    return found


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def of_torch(tree: ast.Module) -> set[str]:
    """Names by which a module knows torch and its parts."""
    known = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.startswith("torch")]
            known |= {alias.asname or alias.name.split(".")[0] for alias in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {alias.asname or alias.name for alias in node.names}
    return known


def inside(trees: dict[Path, ast.Module], *, torch: bool | None) -> Found:
    """Reads of names that are inside another module, of torch or not; of both if None."""
    for path, tree in trees.items():
        own, known = defined(tree), of_torch(tree)
        for node in ast.walk(tree):
            reads: list[tuple[str, bool]] = []
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and hidden(node.attr):
                if node.attr not in own:
                    reads.append((node.attr, root_of(node) in known))
            elif isinstance(node, ast.ImportFrom):
                theirs = (node.module or "").split(".")[0] == "torch"
                named = [alias.name for alias in node.names]
                reads += [(name, theirs) for name in named if hidden(name)]
            for name, theirs in reads:
                if torch is None or theirs == torch:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def mutable(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in MUTABLE
    return isinstance(node, ast.Subscript) and False


def changing(trees: dict[Path, ast.Module]) -> Found:
    """Top-level objects that can change; a dict or list under a capital name that no function changes is a constant."""
    for path, tree in trees.items():
        lines = path.read_text().splitlines()
        changed = changed_names(tree)
        for place, node in enumerate(tree.body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not mutable(value):
                continue
            name = next((t.id for t in targets if isinstance(t, ast.Name)), "")
            literal = not isinstance(value, ast.Call)
            if name == "__all__" or (literal and name not in changed):
                continue
            follows = tree.body[place + 1] if place + 1 < len(tree.body) else None
            documented = isinstance(follows, ast.Expr) and isinstance(follows.value, ast.Constant)
            if not documented and not lines[node.lineno - 2].lstrip().startswith("#"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def changed_names(tree: ast.Module) -> set[str]:
    """Names of the top level whose objects some function changes."""
    changed: set[str] = set()
    verbs = {"append", "add", "update", "pop", "setdefault", "clear", "remove", "discard", "extend", "insert"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            changed.add(node.value.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in verbs:
            if isinstance(node.func.value, ast.Name):
                changed.add(node.func.value.id)
        elif isinstance(node, ast.Global):
            changed |= set(node.names)
    return changed


def figures() -> dict[str, list[str]]:
    """The places that each figure counts."""
    own = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    tests = {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    return {
        "files": [str(path.relative_to(ROOT)) for path in own],
        "fragments": list(fragments(own)),
        "packed": list(packed(own)),
        "names": list(names(own)),
        "inside": list(inside(own, torch=False)),
        "torch": list(inside(own, torch=True)),
        "tests": list(inside(tests, torch=None)),
        "globals": list(changing(own)),
    }


if __name__ == "__main__":
    for figure, places in figures().items():
        print(f"{figure:10} {len(places)}")
        if "--list" in sys.argv and figure != "files":
            print(*(f"    {place}" for place in places), sep="\n")
