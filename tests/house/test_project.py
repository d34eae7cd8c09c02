"""Facts that are written in several places are equal in all of them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import unisono

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GROUPS = PYPROJECT["dependency-groups"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_version_is_the_same_everywhere() -> None:
    assert unisono.__version__ == PROJECT["version"]
    assert f"\nversion: {unisono.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_has_an_unreleased_section() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "target"), [*PROJECT["scripts"].items(), *PROJECT["entry-points"]["pytest11"].items()]
)
def test_entry_points_resolve(name: str, target: str) -> None:
    assert EntryPoint(name, target, group="").load()


def test_every_tool_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    wanted = [
        *PROJECT["dependencies"],
        *(need for extra in PROJECT["optional-dependencies"].values() for need in extra),
        *(need for group in GROUPS.values() for need in group if isinstance(need, str)),
    ]
    names = {re.split(r"[\[>=<]", need)[0] for need in wanted} - {"unisono"}
    assert names <= pinned, f"constraints.txt lacks {sorted(names - pinned)}"


def test_groups_do_not_name_unisono() -> None:
    # `pip install --group dev` would take whatever an index has by that name.
    named = [
        need for group in GROUPS.values() for need in group if isinstance(need, str) and need.startswith("unisono")
    ]
    assert named == []


def test_extras_of_the_tests_are_the_same_everywhere() -> None:
    extras = [
        re.search(r"""^TESTED.*?\.\[([a-z,]+)\]""", (ROOT / name).read_text(), re.MULTILINE)[1]
        for name in ("Makefile", "noxfile.py")
    ]
    assert extras[0] == extras[1]
    assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()


def test_owners_are_those_of_the_repository() -> None:
    repository = re.search(r'^REPOSITORY = "(.+)"', (ROOT / "docs/site/package_page.py").read_text(), re.MULTILINE)[1]
    owner = repository.rsplit("/", 2)[1]
    assert f"\n* @{owner}/" in (ROOT / ".github" / "CODEOWNERS").read_text()


def test_actions_are_pinned_by_hash() -> None:
    used = [
        line.strip()
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_links_resolve() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not broken, "links to nothing:\n" + "\n".join(broken)


def test_pages_were_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}


def test_errors_match_the_pages() -> None:
    errors = unisono.errors
    row = re.compile(r"^\| `(\w+Error)` \|(.*)$", re.MULTILINE)
    reference = (ROOT / "docs/reference.md").read_text().partition("## `unisono.errors`")[2].partition("\n## ")[0]
    told = {name: set(re.findall(r"`(\w+Error)`", rest)) for name, rest in row.findall(reference)}
    explained = row.findall((ROOT / "docs/how-to/understand-errors.md").read_text())
    assert told.keys() == set(errors.__all__)
    assert {name for name, _ in explained} == told.keys() - {"CommError"}
    for name, also in [*told.items(), *((name, set(re.findall(r"`(\w+)`", r.split("|")[0]))) for name, r in explained)]:
        kinds = {kind.__name__ for kind in getattr(errors, name).__mro__}
        expected = kinds & {"ValueError", "TimeoutError", "ConnectionError", "ArithmeticError", "ImportError"}
        assert also <= kinds
        assert expected <= also or "CommTimeoutError" in also
