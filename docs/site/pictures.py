"""Draw the documents' pictures: `python docs/site/pictures.py` writes docs/pictures/*.svg.

Colours are CSS variables, so that a picture follows dark mode: the system's by itself, the page's where it is inlined.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import unisono as un

__all__ = ["PICTURES", "draw", "stack"]

FOLDER = Path(__file__).parents[1] / "pictures"
STYLE = """
.un-picture{--ink:#1c2530;--faint:#687482;--card:#eef1f5;--r0:#2563c9;--r1:#b4540a;--r2:#167a5b;--r3:#9333a8;--done:#167a5b}
@media(prefers-color-scheme:dark){.un-picture{--ink:#e4e8ee;--faint:#9aa6b5;--card:#2a313c;--r0:#78a9ff;--r1:#f2a25c;
--r2:#57c9a0;--r3:#d59bea;--done:#57c9a0}}
.un-picture text{font:14px system-ui,sans-serif;fill:var(--ink)}
.un-picture text.n{font-size:12px;fill:var(--card)}
.un-picture .f,.un-picture text.f{fill:var(--faint)}.un-picture .m{text-anchor:middle}
.un-picture .card{fill:var(--card)}.un-picture .line{stroke:var(--faint);fill:none;stroke-width:1.5}
.un-picture .r0{fill:var(--r0)}.un-picture .r1{fill:var(--r1)}.un-picture .r2{fill:var(--r2)}
.un-picture .r3{fill:var(--r3)}
"""
RANKS = 4
DIGITS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#ee8866", "#44bb99", "#99ddff")


def rect(x: float, y: float, width: float, height: float, name: str, more: str = "") -> str:
    return f'<rect class="{name}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"{more}/>'


def text(x: float, y: float, words: str, name: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{name}">{words}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line with a head at its end."""
    turn, size = math.atan2(y2 - y1, x2 - x1), 8
    head = " ".join(
        f"{x2 - size * math.cos(turn + side):.1f},{y2 - size * math.sin(turn + side):.1f}" for side in (0.5, -0.5)
    )
    points = f"{x2:g},{y2:g} {head}"
    return f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/><polygon class="f" points="{points}"/>'


def picture(width: int, height: int, title: str, parts: Iterable[str], style: str = "") -> str:
    """Return the picture with its title, which screen readers read."""
    size = "un-picture un-wide" if width > 500 else "un-picture"
    head = f'<svg class="{size}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    lines = [f'{head} aria-label="{title}" width="{width}">', f"<style>{STYLE}{style}</style>", *parts, "</svg>\n"]
    return "\n".join(lines)


def ring() -> str:
    """Return the all-reduce of four ranks by a ring, animated: each chunk's colour deepens as contributions enter."""
    centres = [(210, 70), (330, 190), (210, 310), (90, 190)]
    cell, gap, seconds, pause = 22, 25, 14, 2
    steps = 2 * (RANKS - 1)
    length = 100 / (steps + pause)
    style, parts = [], []

    def corner(rank: int, chunk: int) -> tuple[float, float]:
        x, y = centres[rank]
        return x - 2 * gap + 1.5 + gap * chunk, y - cell / 2

    depth = [[[1] for _ in range(RANKS)] for _ in range(RANKS)]
    for step in range(steps):
        for rank in range(RANKS):
            peer, chunk = (rank + 1) % RANKS, (rank - step) % RANKS if step < 3 else (rank + 4 - step) % RANKS
            name = f"m{step}{rank}"
            (x1, y1), (x2, y2) = corner(rank, chunk), corner(peer, chunk)
            start, end = step * length, (step + 0.85) * length
            style.append(
                f"@keyframes {name}{{0%,{start:.2f}%{{opacity:0;transform:none}}"
                f"{start + 0.01:.2f}%{{opacity:1;transform:none}}"
                f"{end:.2f}%{{opacity:1;transform:translate({x2 - x1:g}px,{y2 - y1:g}px)}}"
                f"{end + 0.01:.2f}%,100%{{opacity:0;transform:translate({x2 - x1:g}px,{y2 - y1:g}px)}}}}"
                f".{name}{{animation:{name} {seconds}s linear infinite}}"
            )
            parts.append(rect(x1, y1, cell, cell, f"move c{chunk} {name}"))
        for rank in range(RANKS):
            for chunk in range(RANKS):
                sent = (rank - 1 - step) % RANKS if step < 3 else (rank + 3 - step) % RANKS
                now = depth[rank][chunk][-1]
                depth[rank][chunk].append((step + 2 if step < 3 else RANKS) if chunk == sent else now)
    cells = []
    for rank, (x, y) in enumerate(centres):
        cells.append(rect(x - 2 * gap - 4, y - 18, 4 * gap + 8, 36, "card"))
        above = rank != 2
        cells.append(text(x, y - 28 if above else y + 38, f"rank {rank}", "m"))
        for chunk in range(RANKS):
            name, levels = f"l{rank}{chunk}", depth[rank][chunk]
            frames = "".join(
                f"{(n - 0.15) * length if n else 0:.2f}%{{opacity:{level / RANKS}}}" for n, level in enumerate(levels)
            )
            style.append(
                f"@keyframes {name}{{{frames}100%{{opacity:1}}}}"
                f".{name}{{animation:{name} {seconds}s step-end infinite}}"
            )
            cells.append(rect(*corner(rank, chunk), cell, cell, f"c{chunk} {name}"))
    ends = ((268, 80, 318, 142), (322, 222, 268, 300), (152, 300, 98, 222), (102, 142, 152, 80))
    arrows = [arrow(*each) for each in ends]
    colours = "".join(f".un-picture .c{n}{{fill:var(--r{n})}}" for n in range(RANKS))
    style.append(".un-picture:hover *{animation-play-state:paused}")
    motion = "@media(prefers-reduced-motion:no-preference){" + "".join(style) + "}"
    title = (
        "Four ranks in a ring, each with four chunks. In three steps every rank passes a partial sum to the next; "
        "in three more the complete sums go round, until all ranks hold the same."
    )
    middle = [text(210, 176, "all_reduce", "m"), text(210, 196, "3 steps add,", "m f")]
    middle.append(text(210, 214, "3 steps copy", "m f"))
    return picture(
        420, 370, title, [*arrows, *cells, *parts, *middle], f"{colours}.un-picture .move{{opacity:0}}{motion}"
    )


def buckets() -> str:
    """Return the time of a backward pass with and without overlap."""
    parts = [*timeline(34, "one message at the end", [8, 9.5, 11, 12.5])]
    parts += timeline(164, "buckets, while backward continues", [2, 4, 6, 8])
    title = (
        "Two timelines of a backward pass over eight layers. With one message at the end, the network waits for all "
        "layers. With four buckets, each is sent as soon as its two layers are done, and the step ends earlier."
    )
    return picture(680, 262, title, parts)


def timeline(top: int, words: str, starts: list[float]) -> Iterable[str]:
    """Yield the parts of one pass: eight layers, and when each of four quarters of the gradients travels."""
    left, unit = 90, 34
    yield from (text(left, top - 12, words), text(0, top + 19, "backward", "f"), text(0, top + 59, "network", "f"))
    for layer in range(8):
        x = left + layer * unit
        yield rect(x, top, unit - 2, 28, f"r{layer // 2}")
        yield text(x + 16, top + 19, str(8 - layer), "m n")
    for bucket, start in enumerate(starts):
        yield rect(left + start * unit, top + 40, 1.5 * unit - 2, 28, f"r{bucket}")
    end = left + (starts[-1] + 1.5) * unit
    yield f'<path class="line" stroke-dasharray="4 3" d="M{end:g} {top - 6}V{top + 76}"/>'
    yield text(end - 4, top + 92, "optimizer.step()", "m f")


def hierarchy() -> str:
    """Return two hosts of four ranks."""
    parts = []
    for host, left in enumerate((10, 350)):
        parts += [rect(left, 30, 260, 160, "card"), text(left + 12, 52, f"host {host}")]
        for rank in range(4):
            x, y = left + 44 + 118 * (rank % 2), 68 + 60 * (rank // 2)
            parts += [rect(x, y, 54, 36, f"r{rank}"), text(x + 27, y + 23, str(4 * host + rank), "m n")]
        parts.append(text(left + 130, 122, "shm", "m f"))
    parts += [arrow(278, 100, 342, 100), arrow(342, 120, 278, 120), text(310, 88, "tcp", "m f")]
    words = ("1. reduce-scatter inside each host", "2. all-reduce of each share between hosts", "3. all-gather inside")
    parts += [text(12, 222 + 22 * line, each) for line, each in enumerate(words)]
    title = (
        "Two hosts with four ranks each. Ranks of one host share memory; between the hosts, ranks of the same colour "
        "exchange their shares over tcp."
    )
    return picture(620, 276, title, parts)


def partitions() -> str:
    """Return the rank of each of 24 samples, as un.data's partitioners assign them."""
    samples, size = list(range(24)), 22
    labels = [n // 8 for n in samples]
    groups = [n // 3 for n in samples]
    costs = [1 + n % 5 for n in samples]
    rows = [
        ("contiguous", un.data.contiguous(), "runs of neighbours"),
        ("strided", un.data.strided(), "ranks take turns"),
        ("shuffled", un.data.shuffled(), "a new order each epoch"),
        ("weighted", un.data.weighted([4, 2, 1, 1]), "shares 4 : 2 : 1 : 1"),
        ("stratified", un.data.stratified(labels), "the same mix of labels"),
        ("dirichlet", un.data.dirichlet(labels, 0.5), "a mix of its own"),
        ("grouped", un.data.grouped(groups), "no group is cut"),
        ("balanced", un.data.balanced(costs), "equal cost"),
    ]
    parts = []
    for line, (name, partitioner, words) in enumerate(rows):
        top = 6 + line * 34
        parts.append(text(0, top + 16, name))
        for rank in range(RANKS):
            for place in un.data.PartitionSampler(
                samples, num_replicas=RANKS, rank=rank, partition=partitioner, shuffle=name == "shuffled"
            ):
                x = 90 + place * size
                parts.append(rect(x, top, size - 3, size, f"r{rank}"))
                parts.append(text(x + 9.5, top + 16, str(rank), "m n"))
        parts.append(text(628, top + 16, words, "f"))
    title = (
        "Which of four ranks gets each of 24 samples: contiguous gives runs, strided takes turns, shuffled mixes, "
        "weighted gives unequal shares, stratified mixes labels equally, dirichlet unequally, grouped cuts no group, "
        "balanced equals cost."
    )
    return picture(800, 284, title, parts)


def clients() -> str:
    """Return a bar for each of 20 clients, cut by how many samples of each digit it holds."""
    from sklearn.datasets import load_digits

    labels, count = load_digits().target[:1400].tolist(), 20
    mixes = (
        ("same mix (stratified)", un.data.stratified(labels)),
        ("Dirichlet, alpha = 0.1", un.data.dirichlet(labels, alpha=0.1)),
    )
    parts = []
    for half, (words, partition) in enumerate(mixes):
        left = 10 + 320 * half
        parts.append(text(left, 18, words))
        dealt = un.data.DataPartitioner(labels, [1 / count] * count, 0, partition=partition)
        for client in range(count):
            held, top = list(dealt.use(client)), 30.0
            for digit, colour in enumerate(DIGITS):
                height = round(140 * held.count(digit) / len(held), 2)
                if height:
                    parts.append(rect(left + 14 * client, top, 12, height, "bar", f' fill="{colour}"'))
                top += height
    for digit, colour in enumerate(DIGITS):
        parts += [rect(10 + 40 * digit, 186, 12, 12, "", f' fill="{colour}"'), text(26 + 40 * digit, 197, str(digit))]
    title = "Digits that each of 20 clients holds: all ten in the left half, few in the right."
    return picture(620, 210, title, parts, ".un-picture .bar{rx:0}")


def printed(heading: str, pattern: str) -> list[tuple[float, float]]:
    """Return pairs of numbers in what the gallery's page shows as the output of one program."""
    page = (FOLDER.parent / "gallery" / "index.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [(float(x), float(y)) for x, y in re.findall(pattern, section)]


def curve(heading: str, pattern: str, unit: str) -> Callable[[], str]:
    """Return a function that draws the numbers that a program of the gallery prints."""

    def drawn() -> str:
        points = printed(heading, pattern)
        (first, last), values = (points[0][0], points[-1][0]), [y for _, y in points]
        low, high = min(values), max(values)
        places = [(60 + 340 * (x - first) / (last - first), 130 - 100 * (y - low) / (high - low)) for x, y in points]
        line = "L".join(f"{x:.4g} {y:.4g}" for x, y in places)
        parts = [f'<path class="line" d="M60 30V130H400"/><path class="line thick" d="M{line}"/>']
        parts += [f'<circle class="r0" cx="{x:.4g}" cy="{y:.4g}" r="4"/>' for x, y in places]
        parts += [text(6, 34, f"{high:.3g}", "f"), text(6, 134, f"{low:.3g}", "f"), text(60, 18, unit)]
        parts += [text(x, 150, f"{step:g}", "m f") for (x, _), (step, _) in zip(places, points, strict=True)]
        title = f"{heading}: {unit}: " + ", ".join(f"{y:.3g} at {x:g}" for x, y in points) + "."
        return picture(420, 160, title, parts, ".un-picture .thick{stroke:var(--r0);stroke-width:2.5}")

    return drawn


def uneven() -> str:
    """Return the batches of three ranks: rank 0 takes the last half of its steps alone."""
    parts = []
    for rank, (_, batches) in enumerate(printed("Uneven inputs", r"(\d+) samples in (\d+) batches")):
        parts.append(text(0, 24 + 34 * rank, f"rank {rank}"))
        parts += [rect(60 + 21 * n, 8 + 34 * rank, 18, 24, f"r{rank}") for n in range(int(batches))]
    parts += [arrow(228, 112, 398, 112), text(313, 130, "inside join()", "m f")]
    title = "Rank 0 has 16 batches, ranks 1 and 2 have 8: in the second half, rank 0 steps alone inside join()."
    return picture(420, 140, title, parts)


def server() -> str:
    """Return a parameter server on rank 0, and two workers."""
    parts = [rect(150, 8, 120, 40, "r0"), text(210, 33, "rank 0: model", "m n")]
    for rank, x in ((1, 60), (2, 260)):
        parts += [rect(x, 118, 100, 40, f"r{rank}"), text(x + 50, 143, f"worker {rank}", "m n")]
        parts += [arrow(x + 40, 116, 175 + 50 * (rank - 1), 52), arrow(195 + 50 * (rank - 1), 52, x + 64, 116)]
    parts += [text(60, 88, "gradients", "m f"), text(352, 88, "parameters", "m f")]
    title = "Two workers push gradients to the model on rank 0 and pull parameters, each at its own pace."
    return picture(420, 166, title, parts)


def resume() -> str:
    """Return the steps of a training that stops on two ranks and resumes on three."""
    unit, parts = 5.6, []
    for top, ranks, start, steps in ((30, 2, 0, 36), (105, 3, 30, 30)):
        for rank in range(ranks):
            parts.append(text(0, top + 30 * rank + 17, f"rank {rank}"))
            parts.append(rect(60 + start * unit, top + 30 * rank, steps * unit, 24, f"r{rank}"))
    at = 60 + 30 * unit
    parts += [
        f'<path class="line" stroke-dasharray="4 3" d="M{at:g} 22V195"/>',
        text(at, 16, "checkpoint, step 30", "m f"),
    ]
    parts += [text(60 + 36 * unit + 6, 47, "stopped at step 36", "f"), text(60 + 60 * unit, 210, "step 60", "m f")]
    title = "Two ranks train to step 36, with a checkpoint at step 30; three ranks continue from step 30 to step 60."
    return picture(440, 216, title, parts)


def logo() -> str:
    """Return the mark of the project: four ranks on a ring, which hold the same."""
    dots = [f'<circle cx="{x}" cy="{y}" r="9"/>' for x, y in ((32, 12), (52, 32), (32, 52), (12, 32))]
    ring = '<circle cx="32" cy="32" r="20" fill="none" stroke="#5b6fd6" stroke-width="5"/>'
    return "\n".join(
        ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" fill="#5b6fd6">', ring, *dots, "</svg>\n"]
    )


def stack(layers: list[str]) -> str:
    """Return layers one above the other, each with an arrow to the next."""
    parts: list[str] = []
    for line, words in enumerate(layers):
        parts += [rect(0, 48 * line, 460, 30, "card"), text(230, 48 * line + 20, words, "m")]
        parts += [arrow(230, 48 * line - 16, 230, 48 * line - 2)] if line else []
    return picture(460, 48 * len(layers) - 16, f"Layers, from the top: {', '.join(layers)}.", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "ring": ring,
    "buckets": buckets,
    "hierarchy": hierarchy,
    "partitions": partitions,
    "federated-averaging": clients,
    "language-model": curve(
        "A language model of characters", r"step (\d+): ([\d.]+) bits", "bits a character, by step"
    ),
    "digits": curve("Digits with a convolutional network", r"epoch (\d+): ([\d.]+)%", "% read correctly, by epoch"),
    "uneven-inputs": uneven,
    "parameter-server": server,
    "reinforcement-learning": curve("Reinforcement learning", r"round (\d+): (\d+)%", "% of balls caught, by round"),
    "resume": resume,
    "two-by-two": curve("A transformer on two by two ranks", r"step (\d+): loss ([\d.]+)", "loss, by step"),
    "logo": logo,
}


def draw(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, make in PICTURES.items():
        (folder / f"{name}.svg").write_text(make())


if __name__ == "__main__":
    draw()
