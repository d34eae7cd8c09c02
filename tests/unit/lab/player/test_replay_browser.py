"""The player in a browser: by the keyboard, in both colours, on a phone, and without a fault that axe finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono as un
from unisono.lab.player.replay import Replay, write
from unisono.lab.simulator import Message

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH")]
CASES = [("all_reduce", "ring", 4), ("all_reduce", "halving_doubling", 8), ("all_to_all", "pairwise", 16)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the page of a file, and the list that grows by what it requests and complains about."""
    page, found = browser.new_page(**options), []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda line: found.append(line.text))
    page.on("request", lambda sent: found.append(sent.url) if sent.url.startswith("http") else None)
    page.goto(path.as_uri())
    return page, found


@pytest.fixture
def ring(browser: Any, tmp_path: Path) -> Iterator[Any]:
    un.algorithms.play(tmp_path / "ring.html", "all_reduce", "ring", 4)
    page, found = opened(browser, tmp_path / "ring.html")
    yield page
    assert found == []
    page.close()


def spoken(page: Any) -> str:
    return str(page.locator("#slider").get_attribute("aria-valuetext"))


def test_keys(ring: Any) -> None:
    ring.keyboard.press("ArrowRight")
    assert spoken(ring).startswith("round 1 of 6: rank 0 sends chunk 3 to rank 1, which adds it; rank 1 sends")
    assert spoken(ring).removeprefix("round 1 of 6: ")[:20] in ring.locator("#now").inner_text()
    ring.keyboard.press("End")
    assert spoken(ring).startswith("round 6 of 6")
    assert ring.locator("#done").inner_text() == "16 of 16"
    assert ring.locator(".cell.done").count() == 16
    ring.keyboard.press("ArrowLeft")
    assert ring.locator("#done").inner_text() == "12 of 16"
    ring.keyboard.press("Home")
    assert spoken(ring).endswith("nothing has been sent yet.")
    ring.locator("#slider").focus()
    ring.keyboard.press("ArrowRight")
    assert spoken(ring).startswith("round 1 of 6")


def test_playing_is_silent_and_ends(ring: Any) -> None:
    from playwright.sync_api import expect

    ring.locator("#speed").select_option("4")
    ring.locator("h1").click()
    ring.keyboard.press("Space")
    assert ring.locator("#now").get_attribute("aria-live") == "off"
    expect(ring.locator("#done")).to_have_text("16 of 16")
    expect(ring.locator("#now")).to_have_attribute("aria-live", "polite")
    expect(ring.locator("#play")).to_have_attribute("aria-label", "Play")


def test_rank_is_shown_alone(ring: Any) -> None:
    ring.keyboard.press("ArrowRight")
    ring.locator(".node").nth(2).focus()
    ring.keyboard.press("Enter")
    assert ring.locator(".node").nth(2).get_attribute("aria-pressed") == "true"
    assert ring.locator(".chip.dim").count() == 2
    assert "rank 2: rank 1 sends" in str(ring.locator(".node").nth(2).get_attribute("aria-label"))


def test_messages_as_a_table(ring: Any) -> None:
    from playwright.sync_api import expect

    ring.locator("summary").click()
    expect(ring.locator("#list tbody tr")).to_have_count(24)
    assert ring.locator("#list tbody tr").first.inner_text().split("\t") == [
        *("1", "rank 0", "rank 1", "3", "262144", "is added")
    ]


def test_less_motion_has_no_frames_between_steps(browser: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    un.algorithms.play(tmp_path / "ring.html", "all_reduce", "ring", 4)
    page, _ = opened(browser, tmp_path / "ring.html", reduced_motion="reduce")
    page.evaluate("() => { window.seen = []; const old = draw; draw = () => { seen.push(t); old() } }")
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    expect(page.locator("#done")).to_have_text("16 of 16")
    assert all(time == int(time) for time in page.evaluate("seen"))
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("collective", "name", "size"), CASES)
def test_accessible_in_both_colours_and_on_a_phone(
    browser: Any, tmp_path: Path, scheme: str, collective: str, name: str, size: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    un.algorithms.play(tmp_path / "page.html", collective, name, size)
    page, found = opened(browser, tmp_path / "page.html", color_scheme=scheme)
    page.locator("summary").click()
    page.keyboard.press("Tab")
    page.locator("#forward").click()
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        for target in page.locator("button, select, input, summary, .node").all():
            box = target.bounding_box()
            assert min(box["width"], box["height"]) >= 44, target.evaluate("e => e.outerHTML.slice(0, 200)")
        violations = Axe().run(page).response["violations"]
        assert violations == [], json.dumps([(v["id"], [n["target"] for n in v["nodes"]]) for v in violations])
    assert found == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_chunks_is_legible(browser: Any, tmp_path: Path, scheme: str) -> None:
    """Axe does not see colours of gradients."""
    un.algorithms.play(tmp_path / "page.html", "all_reduce", "ring", 8)
    page, _ = opened(browser, tmp_path / "page.html", color_scheme=scheme)

    def luminance(name: str) -> float:
        page.evaluate("name => document.body.style.outlineColor = `var(--${name})`", name)
        text = page.evaluate("getComputedStyle(document.body).outlineColor")
        parts = [int(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    ink = luminance("ink")
    for name in ["track", "card", *(f"h{hue}" for hue in range(8))]:
        low, high = sorted((ink, luminance(name)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
    page.close()


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)></script>"
    sent = Message(0, 1, (), 8, 0, 1, False, 1, hostile)
    write(Replay(hostile, hostile, (hostile, "b"), messages=(sent,)), tmp_path / "x.html")
    page, found = opened(browser, tmp_path / "x.html")
    page.keyboard.press("End")
    page.locator("summary").click()
    assert page.locator("h1").inner_text() == hostile
    assert page.locator("img").count() == 0
    assert found == []
    page.close()
