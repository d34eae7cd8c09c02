"""The reference names everything that is public, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import unisono as un
from unisono.tools.cli import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))

# Set when a communicator is made, so the class does not show it.
OF_INSTANCES = {"hosts"}


def rows(title: str) -> dict[str, str]:
    """Return the description of each name in the tables of a section."""
    found = re.findall(r"^\| `([^`]+)` \| (.+) \|$", SECTIONS[title], re.MULTILINE)
    assert len(found) == len(dict(found)), "a name is told of twice"
    return dict(found)


@pytest.mark.parametrize(
    "package",
    [
        "checkpoint",
        "compression",
        "data",
        "engines",
        "errors",
        "gradients",
        "algorithms",
        "transports",
        "interop",
        "rpc",
        "testing",
        "autograd",
        "pool",
        "sharding",
        "utils",
    ],
)
def test_packages(package: str) -> None:
    assert set(rows(f"`unisono.{package}`")) == set(getattr(un, package).__all__)


def test_top() -> None:
    assert set(rows("`unisono`, usually `import unisono as un`")) == set(un.__all__)


def test_communicator() -> None:
    public = {name for name in dir(un.Communicator) if not name.startswith("_")}
    assert set(rows("`Communicator`")) == public | OF_INSTANCES


def test_commands() -> None:
    commands = {name.split()[1] for name in rows("The command line") if not name.startswith("unisono --")}
    assert commands == set(COMMANDS.names())


def test_links_within_the_page_resolve() -> None:
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
