"""The page on the architecture: every function that it names exists, and it shows the import rules and the tiers."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

from import_graph import parsed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
NAMED = sorted(set(re.findall(r"`([\w/]+\.(?:py|hpp|cpp)):(\w+)`", PAGE)))


@cache
def defined(path: Path) -> set[str]:
    """Names of functions, classes and variables that a file defines, at any depth."""
    if path.suffix != ".py":
        return set(re.findall(r"\b(\w+)\(", path.read_text()))
    found = set[str]()
    for node in ast.walk(parsed(path)):
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
    assert paths == ["collective", "message", "gradient", "failure", "checkpoint"]
    assert len(NAMED) >= 60


def layers(contract: str) -> list[str]:
    """Return the layers of a contract, without `python -m unisono`."""
    found = next(each["layers"] for each in CONTRACTS if each["id"] == contract)
    return [layer.removeprefix("(__main__) : ") for layer in found if layer != "(__main__)"]


def test_drawing_shows_the_layers() -> None:
    drawn = re.findall(r'L(\d+)\["([^"]+)"\]', PAGE)
    assert [rooms for _, rooms in drawn] == layers("layers")
    assert [int(number) for number, _ in drawn] == list(range(1, len(drawn) + 1))


def test_table_shows_the_tiers() -> None:
    table = PAGE.partition("\n## Tiers\n")[2].partition("\n## ")[0]
    rows = [set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\|.*`.*\|$", table, re.MULTILINE)]
    assert rows[::-1] == [set(layer.split(" : ")) for layer in layers("tiers")]


def test_decisions_are_argued() -> None:
    _, *decisions = PAGE.partition("\n## Decisions\n")[2].split("\n### ")
    assert len(decisions) >= 20
    for decision in decisions:
        title, _, text = decision.partition("\n")
        text = " ".join(text.split())
        assert re.match(r"\*[^*]+\?\*", text), f"{title!r} begins with no question"
        for part in (r"\*\*(Tried|Instead):\*\*", r"\*\*Costs:\*\*", r"\*\*Would change our mind:\*\*"):
            assert len(re.findall(part, text)) == 1, f"{title!r} has not one part {part}"
