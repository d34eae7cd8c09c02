"""Tables of docs/benchmarks.md: from the output of one program to the markdown of one question.

A function returns "" for output without a line that it recognizes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from _bounds import markdown
from _raw import Timed, figures, size, timed

from unisono.tools.bench import Spread, shown_size

SHOWN = (8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
SWEPT = {"gloo": "gloo", "mpi": "Open MPI"}
STEP = re.compile(
    r"(\w+) +(\d+) ranks, \S+: step alone +([\d.]+) ms, ddp +([\d.]+), ours +([\d.]+); ours/ddp ([\d.]+);"
    r" exposed ([\d.]+) \(([\d.]+) to ([\d.]+);.*\); processor ([\d.]+) \("
)
LINK = re.compile(r"(\d+ \+ \d+ ranks, \w+), (\d+ \w+), own/gloo")
LINK_STEP = re.compile(r"# training step, DDP on gloo/own: ([\d.]+ \([\d.]+ to [\d.]+\))")
REMOTE = re.compile(r"(\w+),? +([\w ]+?),? +(?:own|ours) +(\S+ us), torch +(\S+ us)(?:, torch/own)?")
IN_FLIGHT = re.compile(r" *(\w+),? +(\d+ calls) in flight: \w+ ([\d,]+ calls/s), torch ([\d,]+ calls/s)", re.MULTILINE)
SAVED = re.compile(r"^(save|async|first|load) (\w+)(?: (\w+))? +([\d.]+ ms \([\d.]+ to [\d.]+\))$", re.MULTILINE)
CHECK = re.compile(r"^(\w+), (\d+) B, (\w+): ([\d.]+) us unchecked, (\S+) us \((\S+) %\)$", re.MULTILINE)


def sweep(output: str) -> str:
    """Return a table of all_reduce for each peer."""
    return "\n\n".join(table for peer in SWEPT if (table := by_size(output, peer)))


def by_size(output: str, peer: str) -> str:
    """Return own time and the ratio of all_reduce by size, on 2 and 4 ranks.

    A peer's own time stands in the raw output only: on a machine whose cores are far from each other, it varies more
    than the ratio of neighbouring samples.
    """
    by_ranks = {ranks: {each.nbytes: each for each in all_reduces(output, peer, ranks)} for ranks in (2, 4)}
    shown = [nbytes for nbytes in SHOWN if any(nbytes in column for column in by_ranks.values())]
    name = SWEPT[peer]
    header = [
        "message",
        *(f"{n} ranks: {what}" for n in by_ranks for what in ("own, us", f"own/{name}")),
    ]
    rows = [
        [shown_size(nbytes), *(cell for each in by_ranks.values() for cell in cells(each.get(nbytes)))]
        for nbytes in shown
    ]
    return markdown(header, rows) if rows else ""


def all_reduces(output: str, peer: str, ranks: int) -> list[Timed]:
    """Return the sizes of all_reduce beside a peer, on ordinary memory with warm caches."""
    kind = "all_reduce", peer, ranks, "ordinary", "warm"
    found = timed(output)
    return [each for each in found if (each.collective, each.peer, each.ranks, each.memory, each.caches) == kind]


def cells(found: Timed | None) -> tuple[str, str]:
    """Return the time, and the ratio with quartiles."""
    return (found.own_us, shown_ratio(found.ratio)) if found else ("", "")


def shown_ratio(ratio: Spread) -> str:
    return f"{ratio:.3f}" if ratio.median < 0.1 else f"{ratio:.2f}"


def steps(output: str) -> str:
    """Return training steps with an averager and with DDP."""
    rows = [
        (f"{model}, {ranks} ranks", alone, ddp, ours, ratio, f"{exposed} ({low} to {high})", cpu)
        for model, ranks, alone, ddp, ours, ratio, exposed, low, high, cpu in STEP.findall(output)
    ]
    header = ("model", "alone, ms", "DDP, ms", "own, ms", "own/DDP", "exposed time/DDP's", "processor time/DDP's")
    return markdown(header, rows) if rows else ""


def links(output: str) -> str:
    """Return the ratios between two hosts by size and link, and training steps where they were measured."""
    columns: dict[str, dict[str, str]] = {}
    for figure in figures(output):
        if parts := LINK.fullmatch(figure.what):
            columns.setdefault(parts[1], {})[parts[2]] = figure.shown
    if not columns:
        return ""
    sizes = sorted({nbytes for column in columns.values() for nbytes in column}, key=size)
    rows = [[nbytes, *(column.get(nbytes, "") for column in columns.values())] for nbytes in sizes]
    trained = LINK_STEP.findall(output)
    if trained:
        rows.append(["training step, gloo/own", *trained])
    return markdown(["own/gloo", *columns], rows)


def calls(output: str) -> str:
    """Return remote calls beside torch's."""
    rows = [
        (f"{parts[1]}, {parts[2]}", parts[3], parts[4], figure.shown.replace("x", ""))
        for figure in figures(output)
        if (parts := REMOTE.fullmatch(figure.what))
    ]
    rows += [
        (f"{backend}, {count} in flight", own, torch, "") for backend, count, own, torch in IN_FLIGHT.findall(output)
    ]
    return markdown(("call", "own", "torch", "torch/own"), rows) if rows else ""


def saves(output: str) -> str:
    """Return the times of saving and loading."""
    ways: dict[str, dict[str, str]] = {}
    for what, way, kept, time in SAVED.findall(output):
        name = {"async": "async_save", "first": "first tensor"}.get(what, f"{what}, {kept}" if kept else what)
        ways.setdefault(name, {})[way] = time
    header = ("", "own", "torch", "DCP", "raw writing")
    rows = [[name, *(times.get(way, "") for way in ("ours", "torch", "dcp", "raw"))] for name, times in ways.items()]
    return markdown(header, rows) if rows else ""


def checks(output: str) -> str:
    """Return what checks add to an all_reduce."""
    rows: dict[int, dict[tuple[str, str], str]] = {}
    for backend, nbytes, check, before, more, percent in CHECK.findall(output):
        row = rows.setdefault(int(nbytes), {})
        row[backend, "unchecked"] = before
        row[backend, check] = f"{more} ({percent} %)"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    header = ["message", *(f"{backend}, {check}, us" for backend, check in columns)]
    shown = [[shown_size(nbytes), *(row.get(column, "") for column in columns)] for nbytes, row in rows.items()]
    return markdown(header, shown) if rows else ""


def expected(outputs: dict[str, str]) -> str:
    """Return own time over that of what people have, from the lowest ratio to the highest of each kind."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for what, peer, ratio in (*collectives(outputs), *others(outputs)):
        ratios.setdefault((what, peer), []).append(ratio)
    rows = [(what, peer, span(found)) for (what, peer), found in ratios.items()]
    return markdown(("what", "compared with", "time relative to theirs"), rows) if rows else ""


def collectives(outputs: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """Yield each measured ratio of an all_reduce, with what it is of, and the peer."""
    kinds = ("shm", "shm_against_gloo", "gloo"), ("tcp", "network", "gloo"), ("tcp", "network", "mpi")
    for (backend, program, peer), ranks in itertools.product(kinds, (2, 4)):
        for each in all_reduces(outputs.get(program, ""), peer, ranks):
            sizes = "up to 64 KiB" if each.nbytes <= 64 << 10 else "longer"
            yield f"`all_reduce` on {backend}, {sizes}", SWEPT[peer], each.ratio.median
    for figure in figures(outputs.get("two_hosts", "")):
        if LINK.fullmatch(figure.what):
            yield "`all_reduce` on shm+tcp between two hosts", "gloo", figure.median


def others(outputs: dict[str, str]) -> Iterator[tuple[str, str, float]]:
    """Yield each measured ratio of a training step, a remote call, a checkpoint."""
    for step in STEP.findall(outputs.get("averager_against_ddp", "")):
        yield f"training step, `GradientAverager` on shm, {step[1]} ranks", "DDP", float(step[5])
    for figure in figures(outputs.get("rpc_against_torch", "")):
        if parts := REMOTE.fullmatch(figure.what):
            yield f"remote call on {parts[1]}", "`rpc_sync`", 1 / figure.median
    for figure in figures(outputs.get("checkpoint_speed", "")):
        what, _, sides = figure.what.partition(": ")
        if sides == "ours / DCP":
            yield f"checkpoint: {what}", "DCP", figure.median


def span(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
    return low if low == high else f"{low} to {high}"
