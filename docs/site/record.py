"""Record the player as the documents' first picture: `python docs/site/record.py` writes docs/pictures/player-*.webp.

Needs Chromium, and the packages of the dependency group `browser` and of `unisono[demo]`.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import unisono as un

__all__ = ["frames", "main"]

FOLDER = Path(__file__).parents[1] / "pictures"
SCHEMES = ("light", "dark")
FRAMES_A_ROUND, FRAME_MS, LAST_MS = 6, 130, 3000
WIDTH, HEIGHT, COLOURS = 920, 900, 56
COMPRESSED = {"lossless": True, "quality": 90, "method": 4, "kmin": 998, "kmax": 999}
HIDDEN = "header p, header button, .note, .bar, #now { display: none !important } body { padding-top: 16px }"


def frames(path: Path, scheme: str, rounds: int) -> list[Image.Image]:
    """Return what the player shows of a page at equal steps of time, without its controls."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(path.as_uri())
        page.add_style_tag(content=HIDDEN)
        box = page.locator("#stage").bounding_box()
        assert box is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 16}
        shots = []
        for frame in range(rounds * FRAMES_A_ROUND + 1):
            page.evaluate("t => go(t)", frame / FRAMES_A_ROUND)
            shots.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
        browser.close()
    return shots


def main() -> None:
    size = 8
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ring.html"
        un.algorithms.play(path, "all_reduce", "ring", size)
        rounds = un.algorithms.find("all_reduce", "ring").cost(size, size).rounds
        for scheme in SCHEMES:
            shots = frames(path, scheme, rounds)
            # Few colours, the same in all frames, make parts that do not change cost nothing.
            palette = shots[len(shots) // 2].quantize(COLOURS)
            first, *rest = (shot.quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB") for shot in shots)
            # A still picture, for readers that want no motion.
            rest[len(rest) * 2 // 3].save(FOLDER / f"player-{scheme}-still.webp", lossless=True)
            times = [FRAME_MS] * len(rest) + [LAST_MS]
            target = FOLDER / f"player-{scheme}.webp"
            first.save(target, save_all=True, append_images=rest, duration=times, loop=0, **COMPRESSED)
            print(target, target.stat().st_size)


if __name__ == "__main__":
    main()
