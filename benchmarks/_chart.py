"""The pictures of docs/benchmarks.md: bars of speed beside torch, and own time over gloo's by size."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _raw import Raw, Timed
from _tables import STEP, all_reduces

from unisono.tools.bench import shown_size

sys.path.append(str(Path(__file__).parents[1] / "docs" / "site"))
pictures: Any = importlib.import_module("pictures")

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PATH = FOLDER / "benchmarks.svg"
SPEED = FOLDER / "speed.svg"
LINES = (("tcp", "network", 2), ("tcp", "network", 4), ("shm", "shm_against_gloo", 2), ("shm", "shm_against_gloo", 4))
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 420, 56, 24, 84, 44
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
TICKS = [mantissa * 10.0**power for power in range(-4, 2) for mantissa in (1, 2, 5)]
STYLE = "".join(f".un-picture .l{n}{{stroke:var(--r{n});fill:none;stroke-width:2}}" for n in range(len(LINES)))
STYLE += ".un-picture .q{stroke-width:1;opacity:.6}.un-picture .grid{stroke:var(--card)}"


def output(program: str) -> str:
    raw = Raw.read(program)
    return raw.output if raw else ""


def chart() -> str:
    """Return the picture of all lines that have results; the legend names those that have none."""
    lines = [
        (f"{backend}, {ranks} ranks", all_reduces(output(program), "gloo", ranks)) for backend, program, ranks in LINES
    ]
    ratios = [each.ratio for _, line in lines for each in line]
    low = min([0.5, *(ratio.low for ratio in ratios)]) / 1.2
    high = max([2.0, *(ratio.high for ratio in ratios)]) * 1.2
    first, last = math.log(SIZES[0]), math.log(SIZES[-1])

    def x(nbytes: int) -> float:
        return round(LEFT + 10 + (WIDTH - LEFT - RIGHT - 20) * (math.log(nbytes) - first) / (last - first), 1)

    def y(ratio: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * math.log(high / ratio) / math.log(high / low), 1)

    parts = [pictures.text(0, 16, "all_reduce: own time over gloo's; below 1, unisono is faster")]
    for tick in (each for each in TICKS if low <= each <= high):
        name = "line" if tick == 1 else "grid"
        parts.append(f'<path class="{name}" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(pictures.text(8, y(tick) + 5, f"{tick:g}", "f"))
    parts += [pictures.text(x(nbytes), HEIGHT - 16, shown_size(nbytes), "m f") for nbytes in SIZES]
    for place, (name, line) in enumerate(lines):
        parts += legend(place, name if line else f"{name}: no results")
        parts += drawn(place, [(x(each.nbytes), y(each.ratio.median)) for each in line])
        for each in line:
            at = x(each.nbytes)
            parts.append(f'<path class="l{place} q" d="M{at} {y(each.ratio.low)}V{y(each.ratio.high)}"/>')
    return str(pictures.picture(WIDTH, HEIGHT, described(lines), parts, STYLE))


def legend(place: int, words: str) -> list[str]:
    left, top = LEFT + 300 * (place // 2), 40 + 22 * (place % 2)
    return [*drawn(place, [(left, top), (left + 28, top)]), str(pictures.text(left + 40, top + 5, words, "f"))]


def drawn(place: int, points: list[tuple[float, float]]) -> Iterable[str]:
    """Return a line through points, dashed for 4 ranks."""
    dashes = ' stroke-dasharray="6 4"' if LINES[place][2] == 4 else ""
    yield from (f'<circle class="r{place}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in points)
    if points:
        yield f'<path class="l{place}"{dashes} d="M{"L".join(f"{x} {y}" for x, y in points)}"/>'


def described(lines: list[tuple[str, list[Timed]]]) -> str:
    """Return the text of the picture: the first and the last point of each line."""
    ends = [
        f"{name}: {first.ratio.median:.2g} at {shown_size(first.nbytes)}, {last.ratio.median:.2g} at"
        f" {shown_size(last.nbytes)}"
        for name, (first, *_, last) in ((name, line) for name, line in lines if len(line) > 1)
    ]
    return f"Time of all_reduce over gloo's, by the size of the message. {'; '.join(ends) or 'No results yet'}."


def speed() -> str:
    """Return bars of own time over torch's: training steps on the left, all_reduce of some sizes on the right."""
    steps = [(f"{model}, {ranks} ranks", "r0", float(ratio)) for model, ranks, *_, ratio, _, _, _, _ in taken()]
    sizes = (8, 64 << 10, 1 << 20, 16 << 20)
    reduces = [
        (f"{backend}, {shown_size(each.nbytes)}", colour, each.ratio.median)
        for backend, program, colour in (("shm", "shm_against_gloo", "r0"), ("tcp", "network", "r2"))
        for each in all_reduces(output(program), "gloo", 2)
        if each.nbytes in sizes
    ]
    runs = [raw for name in ("averager_against_ddp", "shm_against_gloo", "network") if (raw := Raw.read(name))]
    dates = sorted({raw.date for raw in runs})
    measured = f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {runs[0].machine}" if runs else "not measured yet"
    row, top = 24, 56
    height = top + row * max(len(steps), len(reduces), 1) + 40
    parts = [pictures.text(0, 16, "Time relative to torch on the same machine: shorter is faster, the line is torch")]
    for left, name, title, bars in (
        (0, 150, "training step, over DDP on gloo", steps),
        (380, 100, "all_reduce, 2 ranks, over gloo", reduces),
    ):
        parts += [pictures.text(left, 42, title, "f"), *drawn_bars(left, left + name, top, row, bars)]
    parts.append(pictures.text(0, height - 8, measured, "f"))
    words = "; ".join(f"{name}: {ratio:.2g}" for name, _, ratio in (*steps, *reduces)) or "No results yet"
    return str(
        pictures.picture(WIDTH, height, f"Own time over torch's, of training steps and all_reduce. {words}.", parts)
    )


def taken() -> list[tuple[str, ...]]:
    """Return the training steps that were measured, in the groups of STEP."""
    return [tuple(step) for step in STEP.findall(output("averager_against_ddp"))]


def drawn_bars(left: int, start: int, top: int, row: int, bars: list[tuple[str, str, float]]) -> Iterable[str]:
    """Return bars with their names and figures, beside a line where torch's time is."""
    most = 120
    for place, (words, colour, ratio) in enumerate(bars):
        y = top + row * place
        width = max(most * min(ratio, 1.15), 1)
        yield pictures.text(left, y + 14, words)
        yield pictures.rect(start, y + 3, width, row - 8, colour)
        yield pictures.text(start + 1.15 * most + 8, y + 14, f"{ratio:.2g}", "f")
    yield f'<path class="line" d="M{start + most} {top}V{top + row * max(len(bars), 1)}"/>'
