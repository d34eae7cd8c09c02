"""Every example in the documents and docstrings runs, and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from import_graph import modules
from sybil import Document
from sybil.example import SybilFailure
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import unisono

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LONG = {"compress-gradients.md", "start-the-ranks.md"}
"""Pages for the soak: one trains three times, one starts ranks in every way."""
MODULES = [name for name in modules() if not name.endswith("__main__")]

# Docstrings leave these imports out; pages have them.
GIVEN = {"torch": torch, "un": unisono}


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the temporary files of examples with their folders."""
    make = tempfile.mkdtemp
    with tempfile.TemporaryDirectory() as folder:

        def made(*given: Any, **named: Any) -> str:
            # Others, such as multiprocessing, say more of theirs, and keep them longer.
            return make(*given, **named) if given or named else make(dir=folder)

        monkeypatch.setattr(tempfile, "mkdtemp", made)
        yield


def run_page(page: Path) -> int:
    """Run the page's python blocks one after another, as one program; how many there are."""
    parsers = PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()
    document = Document.parse(str(page), *parsers)
    # As in a script; so what a block defines goes to other processes by value.
    document.namespace["__name__"] = "__main__"
    examples = list(document)
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.soak if page.name in LONG else (), id=str(page.relative_to(ROOT)))
        for page in PAGES
    ],
)
def test_page_examples(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some write files by relative names.
    monkeypatch.chdir(tmp_path)
    fences = page.read_text().count("```python")
    assert run_page(page) >= fences


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("name", sorted(set(map(room, MODULES))))
def test_docstrings(name: str) -> None:
    failed = {}
    for module in MODULES:
        if room(module) == name:
            results = doctest.testmod(importlib.import_module(module), extraglobs=GIVEN, optionflags=doctest.ELLIPSIS)
            failed |= {module: results.failed} if results.failed else {}
    assert not failed, f"lines of examples, printed above: {failed}"


def test_wrong_example_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Some text.\n\n```python\nx = 1\n```\n\n```python\n>>> x + 1\n3\n```\n")
    with pytest.raises(SybilFailure, match=r"Expected:\n *3"):
        run_page(page)
    page.write_text("```python\nassert not __name__\n```\n")
    with pytest.raises(AssertionError):
        run_page(page)
