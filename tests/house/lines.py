"""Lines of code of src/: no docstrings, comments and blank lines; Python and native.

python tests/house/lines.py [folder ...]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
NATIVE = frozenset({".c", ".h", ".cpp", ".hpp"})
_NOTHING = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING),
}


def of_python(text: str) -> int:
    """Lines that hold a token of other than a comment or a string that stands alone."""
    alone: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            alone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOTHING:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - alone)


def of_native(text: str) -> int:
    """Lines of C or C++ that hold more than a comment."""
    bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return sum(bool(line.split("//")[0].strip()) for line in bare.splitlines())


def count(folder: Path) -> Counter[str]:
    """Lines of code by kind."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.suffix == ".py":
            found["Python"] += of_python(path.read_text())
        elif path.suffix in NATIVE:
            found["native"] += of_native(path.read_text())
    return found


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:] or [str(SOURCES)]):
        lines = count(folder)
        print(f"{folder}: {lines.total()} ({', '.join(f'{n} {kind}' for kind, n in sorted(lines.items()))})")
