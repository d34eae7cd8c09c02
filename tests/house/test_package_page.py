"""The README on an index of packages: every link is absolute, and leads to a file that exists."""

from __future__ import annotations

import runpy
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "docs" / "site" / "package_page.py"))
REPOSITORY = SITE["REPOSITORY"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


class Links(HTMLParser):
    """Targets of all links and pictures of a rendered page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(markdown.markdown(text, extensions=["tables", "fenced_code"]))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "srcset")]


def links(text: str) -> list[str]:
    return Links(SITE["page"](text, VERSION)).found


def test_links_of_the_readme_are_absolute_and_lead_to_files() -> None:
    readme = (ROOT / "README.md").read_text()
    found = links(readme)
    assert len(found) == len(Links(readme).found) > 25
    assert [link for link in found if not link.startswith("https://")] == []
    ours = [link.removeprefix(REPOSITORY).split("/", 3) for link in found if link.startswith(REPOSITORY)]
    assert {(view, tag) for _, view, tag, _ in ours} == {("blob", f"v{VERSION}"), ("raw", f"v{VERSION}")}
    assert [path for *_, path in ours if not (ROOT / path.partition("#")[0]).exists()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md)", "blob/vV/docs/a.md"),
        ("[a](docs/a.md#part 'title')", "blob/vV/docs/a.md#part"),
        ("[a](./docs/)", "blob/vV/docs/"),
        ("[a](#install)", "blob/vV/README.md#install"),
        ("[`code`](a.md) and `](b.md)`", "blob/vV/a.md"),
        ("![p](docs/p.png)", "raw/vV/docs/p.png"),
        ('<img src="docs/p.webp" alt="p">', "raw/vV/docs/p.webp"),
        ("[a]\n\n[a]: docs/a.md", "blob/vV/docs/a.md"),
    ],
)
def test_kinds_of_links(text: str, expected: str) -> None:
    assert links(text) == [f"{REPOSITORY}/{expected.replace('vV', f'v{VERSION}')}"]


@pytest.mark.parametrize(
    "text",
    [
        "[a](https://x.org/a)",
        "[a](mailto:a@x.org)",
        "```text\n[a](b.md)\n```\n",
        "`[a](b.md)`",
        '~~~\nsrc="b.png"\n~~~\n',
    ],
)
def test_what_is_absolute_or_code_stays_as_it_is(text: str) -> None:
    assert SITE["page"](text, VERSION) == text


def test_addresses_derive_from_the_repository() -> None:
    addresses = SITE["urls"](VERSION)
    owner, name = REPOSITORY.rsplit("/", 2)[1:]
    assert all(each.startswith((REPOSITORY, f"https://{owner}.github.io/{name}/")) for each in addresses.values())
    # Elsewhere the address would be a second place to change.
    others = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *ROOT.glob("src/**/*.py")]
    assert [path.name for path in others if REPOSITORY in path.read_text()] == []
