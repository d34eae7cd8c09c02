"""The documents' site builds without a warning, no link of it is broken, and its pictures are those drawn today."""

from __future__ import annotations

import importlib
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
docstrings = importlib.import_module("docstrings")
pictures = importlib.import_module("pictures")


class Page(HTMLParser):
    """The ids, links and loaded files of a page, and its pictures without a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.mute: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given[key] or "" for key in ("id", "name") if key in given}
        link = given.get("href") if tag in ("a", "link") else given.get("src")
        if link and given.get("rel") != "canonical":
            self.links.append(link)
        if (tag == "img" and "alt" not in given) or (given.get("role") == "img" and not given.get("aria-label")):
            self.mute.append(str(self.get_starttag_text()))


def faults(site: Path) -> list[str]:
    """Return links that lead nowhere, files that another host would serve, and pictures without a text."""
    pages = {"/" + str(path.relative_to(site)): Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for name, page in pages.items():
        found += [f"{name}: no alternative text: {tag}" for tag in page.mute]
        for link in page.links:
            url = urlsplit(urljoin(name, link))
            if url.scheme in ("http", "https", "mailto", "data"):
                continue
            path = unquote(url.path) + ("index.html" if url.path.endswith("/") else "")
            known = path in pages and (not url.fragment or unquote(url.fragment) in pages[path].ids | {"__skip"})
            if not known and (path in pages or not (site / path.lstrip("/")).is_file()):
                found.append(f"{name}: {link}")
    return found


def loaded(site: Path) -> list[str]:
    """Return what pages would load from other hosts."""
    return [
        f"{path.relative_to(site)}: {tag}"
        for path in site.rglob("*.html")
        for tag in path.read_text().split("<")
        if tag.startswith(("script", "img", 'link rel="stylesheet"')) and ('src="http' in tag or 'href="http' in tag)
    ]


@pytest.mark.soak
def test_site_builds_without_warnings_or_broken_links() -> None:
    for command in (["docs/site/stage.py"], ["-m", "zensical", "build", "--strict", "--clean"]):
        run = [sys.executable, *command]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARN" not in done.stdout + done.stderr
    assert faults(ROOT / "site") == []
    assert loaded(ROOT / "site") == []


@pytest.mark.soak
def test_pages_have_no_faults_in_a_browser() -> None:
    if importlib.import_module("check").browser() is None:
        pytest.skip("no Chromium or Chrome on PATH")
    test_site_builds_without_warnings_or_broken_links()
    done = subprocess.run([sys.executable, "docs/site/check.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<p id="here"></p><img src="x.png"><script src="https://a.example/b.js">')
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here"></a><a href="other.html#there"></a><a href="no"></a>'
    )
    assert len(faults(tmp_path)) == 4
    assert len(loaded(tmp_path)) == 1


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    found = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    assert found == pictures.PICTURES[name](), "run python docs/site/pictures.py"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Returns: The sum\nof all.\n\nCost: one round.", "Returns:\n    The sum\n    of all.\n\n**Cost:** one round."),
        ("Raises: A, B: sometimes.", "Raises:\n    A, B: sometimes."),
        ("Raises: AssertionError otherwise.", "Raises:\n    AssertionError: otherwise."),
        ("Example:\n    >>> 1\n    1", "Examples:\n    >>> 1\n    1"),
    ],
)
def test_sections_are_normalized(written: str, read: Any) -> None:
    assert docstrings.normalize(written) == read
