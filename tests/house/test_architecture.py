"""The page on the architecture: every function that it names exists, and its drawing shows the import rules."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.(?:py|hpp)):(\w+)`", PAGE)))


def defined(path: Path) -> set[str]:
    """Names of functions, classes and variables that a file defines, at any depth."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\b(\w+)\(", text))
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def test_named_functions_exist() -> None:
    folders = {file: ROOT / ("src" if file.startswith("native/") else "src/unisono") for file, _ in NAMED}
    gone = [f"{file}:{name}" for file, name in NAMED if name not in defined(folders[file] / file)]
    assert not gone, f"the page names {gone}"


def test_page_covers_every_path() -> None:
    paths = re.findall(r"^## The path of a (\w+)$", PAGE, re.MULTILINE)
    assert paths == ["collective", "gradient", "failure", "checkpoint"]
    assert len(NAMED) >= 30


def test_drawing_shows_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    drawn = re.findall(r'L(\d+)\["([^"]+)"\]', PAGE)
    assert [rooms for _, rooms in drawn] == [layer for layer in layers if "__main__" not in layer]
    assert [int(number) for number, _ in drawn] == list(range(1, len(drawn) + 1))
