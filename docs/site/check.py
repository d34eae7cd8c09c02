"""Open every page of the built site in a browser, and print what a reader would stumble over.

    python docs/site/check.py [--only PAGE ...] [--pictures FOLDER]

Each page is loaded in light and in dark colours and shown 360, 768 and 1280 pixels wide. Reported: what axe-core finds
(contrast of text, alternative texts, order of headings, names of links), a document wider than the window, errors of
the console, files that are missing or that another host would serve. `--pictures` saves what the browser shows.

Needs Chromium, and the packages of the dependency group `browser`.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

__all__ = ["browser", "faults"]

SITE = Path(__file__).parents[2] / "site"
WIDTHS = (360, 768, 1280)
SCHEMES = ("light", "dark")
RULES: dict[tuple[str, int], dict[str, Any]] = {
    ("light", 360): {"rules": {"color-contrast": {"enabled": False}}},
    ("light", 1280): {},
    ("dark", 1280): {"runOnly": ["color-contrast"]},
}
"""Options of axe by colours and width. It needs seconds for contrast, which does not depend on the width."""

TOO_WIDE = """() => document.scrollingElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("body *")]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
    .map(each => each.tagName.toLowerCase() + (each.className ? "." + each.className : "")).slice(0, 3)"""
"""The first elements that stand out of the window, of a document that can be scrolled sideways."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files without a log."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def browser() -> str | None:
    """Return the path of Chromium or Chrome, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this host, and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def listen(page: Page, root: str, found: list[str]) -> None:
    """Append to `found` what goes wrong while the page loads."""
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on("console", lambda line: found.append(f"console: {line.text}") if line.type != "log" else None)
    page.on("request", lambda sent: None if sent.url.startswith((root, "data:")) else found.append(f"asks {sent.url}"))
    page.on("response", lambda got: found.append(f"status {got.status}: {got.url}") if got.status >= 400 else None)


def look(page: Page, scheme: str, width: int) -> Iterator[str]:
    """Yield what is wrong with the page that is shown."""
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function("document.fonts.status === 'loaded'")
    if wide := page.evaluate(TOO_WIDE):
        yield f"wider than the window: {', '.join(wide)}"
    if not page.title() or page.locator('meta[name="description"]').count() != 1:
        yield "no title or no description"
    if (scheme, width) not in RULES:
        return
    options = {"resultTypes": ["violations"], **RULES[scheme, width]}
    for violation in Axe().run(page, options=options).response["violations"]:
        for node in violation["nodes"]:
            yield f"{violation['id']}: {node['target'][-1]}: {node['failureSummary'].splitlines()[-1].strip()}"


def faults(names: list[str], pictures: Path | None = None) -> Iterator[str]:
    """Yield the faults of pages, each with the widths and colours where it is seen."""
    with served(SITE) as root, sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        for name in names:
            seen: dict[str, list[str]] = {}
            for scheme in SCHEMES:
                page, found = chromium.new_page(color_scheme=scheme, reduced_motion="reduce"), []
                listen(page, root, found)
                page.goto(root + name)
                for width in WIDTHS:
                    for fault in [*found, *look(page, scheme, width)]:
                        seen.setdefault(fault, []).append(f"{scheme} {width}")
                    if pictures:
                        shown = pictures / f"{name.removesuffix('.html').replace('/', '.')}-{scheme}-{width}.png"
                        page.screenshot(path=shown, full_page=True)
                page.close()
            yield from (f"{name}: {fault} ({', '.join(where)})" for fault, where in seen.items())
        chromium.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", metavar="PAGE", help="pages, as in index.html or start/index.html")
    arguments.add_argument("--pictures", type=Path, metavar="FOLDER", help="save each page as it is shown")
    given = arguments.parse_args()
    if browser() is None:
        sys.exit("no browser: install Chromium, so that `chromium` is found on PATH")
    names = given.only or sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html"))
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
    found = []
    for fault in faults(names, given.pictures):
        print(fault, flush=True)
        found.append(fault)
    print(f"{len(found)} faults on {len(names)} pages")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
