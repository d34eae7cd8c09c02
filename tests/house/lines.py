"""Statements of src/: a count that no formatting changes.

    python tests/house/lines.py [folder ...]

Python: each statement of the syntax tree. A definition, an import, an `if` and an `elif` count one each; an `else` or
an `except` nothing, and neither do constants that stand alone, as docstrings do. An assignment of several values to
as many targets (`a, b = x, y`) counts as many as it has targets: all beyond one of each are "packed".

Native: each directive, each `;` outside the head of a `for`, and each pair of braces with a `;` in it. In formatted
code each of them has a line, and the other lines continue or close one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
NATIVE = frozenset({".c", ".h", ".cpp", ".hpp"})
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|(?<!\w)'(?:\\.|[^'\\])*'", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)


def of_python(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            found["Python"] += 1
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            found["packed"] += sum(len(t.elts) - 1 for t in node.targets if isinstance(t, ast.Tuple | ast.List))
    return found


def of_native(text: str) -> Counter[str]:
    bare, statements = _DIRECTIVE.subn("", _NO_CODE.sub("", text))
    # The brackets around a place, from the outside in; those with a statement in them have become ";".
    around = [""]
    for mark in re.findall(r"[({)]|\};?|;", bare):
        if mark in "({":
            around.append(mark)
            continue
        closed = "" if mark == ";" else around.pop()
        if ";" in mark + closed and around[-1] != "(":
            statements += 1
            around[-1] = ";"
    return Counter(native=statements)


def count(folder: Path) -> Counter[str]:
    """Statements by kind."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.suffix == ".py":
            found += of_python(path.read_text())
        elif path.suffix in NATIVE:
            found += of_native(path.read_text())
    return found


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:] or [str(SOURCES)]):
        kinds = count(folder)
        print(f"{folder}: {kinds.total()} ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))})")
