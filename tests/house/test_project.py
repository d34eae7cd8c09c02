"""What is written in several places says the same in all of them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import unisono

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_version_is_the_same_everywhere() -> None:
    assert unisono.__version__ == PROJECT["version"]


def test_changelog_has_a_place_for_what_is_new() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "target"), [*PROJECT["scripts"].items(), *PROJECT["entry-points"]["pytest11"].items()]
)
def test_entry_points_lead_somewhere(name: str, target: str) -> None:
    assert EntryPoint(name, target, group="").load()


def test_every_tool_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    wanted = [
        *PROJECT["dependencies"],
        *(need for extra in PROJECT["optional-dependencies"].values() for need in extra),
    ]
    names = {re.split(r"[\[>=<]", need)[0] for need in wanted} - {"unisono"}
    assert names <= pinned, f"constraints.txt lacks {sorted(names - pinned)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text())
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.relative_to(ROOT)} links to {broken}"


def test_pages_were_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
