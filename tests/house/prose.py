"""Advice on docstrings, comments, messages and pages: where a list of words finds another form than plain English.

`make prose`, or `python tests/house/prose.py [FILE OR FOLDER ...]`. It is for a writer to weigh: nothing fails.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

CLAUSES = re.compile(
    r"(what|who|whose|whom|which|where|whether|when|why|how|if|by|of|from|that|those|these|likewise|also|again)\b",
    re.IGNORECASE,
)
"""A docstring begins with a noun phrase or an imperative verb, never with one of these."""

BANNED = (
    r"who|whom|whoever|nobody|somebody|someone|anybody|everybody|"
    r"(?:is|are|was|were|be|been|being) told|in vain|in haste|anew|at once|in the place of|"
    r"(?:shorter|longer) way|lies?|lay ready|laid|the own|for ever|on the way|again is harmless|"
    r"lets? go of|see(?:s|n)? through|gives? way|a word|none of ours"
)
WORDS = re.compile(rf"\b({BANNED})\b", re.IGNORECASE)

MESSAGES = re.compile(
    r"\b(he|(?:has|have|had|to) come|came|told|tells?|says?|said|give (?:a|an|the|some)|wants?|no more|newcomers?|"
    r"(?:that|another|the other) one)\b",
    re.IGNORECASE,
)
"""A message names a rank, peer or buffer, and uses the field's verbs: ranks reach, publish, report, pass, request."""

QUESTION = re.compile(r"[a-z]\?(?= [A-Za-z(])")
"""A question ends its message."""

PLACES = ("src", "benchmarks", "tests", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each docstring, with its line; also strings that document an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for index, statement in enumerate(node.body):
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value if index == 0 else f"Attribute: {value.value}"


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each string of at least four words that documents nothing: an error, a warning, a line of a log or of help."""
    no_message = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            no_message |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        if isinstance(text, str) and id(node) not in no_message and len(re.findall(r"[^\W\d_]{2,}", text)) >= 4:
            yield node.lineno, text


def messages_to_users(path: Path) -> list[tuple[int, str]]:
    """Each message of a file that users see; those of tests are for developers."""
    return [] if ROOT / "tests" in path.parents else list(messages(ast.parse(path.read_text())))


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a docstring that begins something."""
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.parse(text)
        for line, found in docstrings(tree):
            yield line, found, not found.startswith("Attribute: ")
        for line, found in comments(text):
            yield line, found, False
        for line, found in messages_to_users(path):
            yield line, found, False
    elif path.suffix in (".md", ".ipynb"):
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
            text = "\n".join("".join(cell["source"]) for cell in cells)
        text = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL)
        for line, found in enumerate(text.split("\n"), 1):
            yield line, re.sub(r"`[^`]*`", "", found), False
    else:
        for line, found in enumerate(text.split("\n"), 1):
            if "//" in found:
                yield line, found.split("//", 1)[1], False


def advice(path: Path) -> list[str]:
    name, found = os.path.relpath(path, ROOT), []
    if path.suffix == ".py":
        for line, text in messages_to_users(path):
            found += [f"{name}:{line}: {m[0]!r}" for rule in (MESSAGES, QUESTION) for m in rule.finditer(text)]
    for line, text, begins in prose(path):
        first = CLAUSES.match(text.lstrip("`* \n"))
        if begins and first:
            found.append(f"{name}:{line}: begins with {first[1]!r}: {text.strip().splitlines()[0][:90]}")
        # Examples and code are no prose.
        plain = re.sub(r"`[^`]*`", "", re.sub(r"^ *>>>.*?(?:\n\s*\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL))
        found += [f"{name}:{line}: {match[0]!r}" for match in WORDS.finditer(plain)]
    return found


def files(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        yield from (path for path in found if path.suffix in (".py", ".md", ".ipynb", ".hpp", ".cpp"))


if __name__ == "__main__":
    places = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT / name for name in PLACES]
    lines = [line for path in files(places) for line in advice(path)]
    print(*lines, f"{len(lines)} places to look at", sep="\n")
