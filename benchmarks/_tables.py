"""Tables of docs/benchmarks.md: from the output of one program to the markdown of one question.

A function returns "" for output without a line that it recognizes.
"""

from __future__ import annotations

import re

from _raw import Bound, Timed, bounds, size, timed

from unisono.tools.bench import Spread, markdown, shown_size

SHOWN = (8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
MISSED = "**MISSED**"
SWEPT = {"gloo": "gloo", "mpi": "Open MPI"}
STEP = re.compile(
    r"(\w+) +(\d+) ranks, \S+: step alone +([\d.]+) ms, ddp +([\d.]+), ours +([\d.]+); ours/ddp ([\d.]+);"
    r" exposed ([\d.]+) \(([\d.]+) to ([\d.]+); ([\d.]+) wanted;.*\); processor ([\d.]+) \(([\d.]+) wanted\)"
)
LINK_STEP = re.compile(r"# training step, DDP on gloo/own: ([\d.]+ \([\d.]+ to [\d.]+\))")
REMOTE = re.compile(r"(\w+),? +([\w ]+?),? +(?:own|ours) +(\S+ us), torch +(\S+ us)(?:, torch/own)?")
IN_FLIGHT = re.compile(r" *(\w+),? +(\d+ calls) in flight: \w+ ([\d,]+ calls/s), torch ([\d,]+ calls/s)", re.MULTILINE)
SAVED = re.compile(r"^(save|async|first|load) (\w+)(?: (\w+))? +([\d.]+ ms \([\d.]+ to [\d.]+\))$", re.MULTILINE)
CHECK = re.compile(r"^(\w+), (\d+) B, (\w+): ([\d.]+) us unchecked, (\S+) us \((\S+) %\)(\n +MISSED.*)?$", re.MULTILINE)


def marked(figure: float, wanted: float) -> str:
    """Return a figure with its maximum, marked if above."""
    return f"{figure:.2f} (at most {wanted:.2f}{', ' + MISSED if figure > wanted else ''})"


def verdicts(found: list[Bound]) -> str:
    """Return a sentence that counts the bounds, and a table of those missed."""
    if not found:
        return ""
    missed = [(each.what, each.figure, each.wanted, each.verdict) for each in found if not each.met]
    count = f"{len(found) - len(missed)} of {len(found)} bounds were met in this run"
    return f"{count}; missed:\n\n{markdown(('bound', 'found', 'wanted', 'verdict'), missed)}" if missed else f"{count}."


def sweep(output: str) -> str:
    """Return a table of all_reduce for each peer, and the bounds of the whole run."""
    tables = [table for peer in SWEPT if (table := by_size(output, peer))]
    return "\n\n".join(filter(None, (*tables, verdicts(bounds(output))))) if tables else ""


def by_size(output: str, peer: str) -> str:
    """Return times and ratios of all_reduce by size, on 2 and 4 ranks."""
    by_ranks: dict[int, dict[int, Timed]] = {2: {}, 4: {}}
    kind = "all_reduce", peer, "ordinary", "warm"
    for each in timed(output):
        if (each.collective, each.peer, each.memory, each.caches) == kind and each.ranks in by_ranks:
            by_ranks[each.ranks][each.nbytes] = each
    shown = [nbytes for nbytes in SHOWN if any(nbytes in column for column in by_ranks.values())]
    name = SWEPT[peer]
    header = [
        "message",
        *(f"{n} ranks: {what}" for n in by_ranks for what in ("own, us", f"{name}, us", f"own/{name}")),
    ]
    rows = [
        [shown_size(nbytes), *(cell for each in by_ranks.values() for cell in cells(each.get(nbytes)))]
        for nbytes in shown
    ]
    return markdown(header, rows) if rows else ""


def cells(found: Timed | None) -> tuple[str, str, str]:
    """Return the times, and the ratio with quartiles."""
    return (found.own_us, found.peer_us, shown_ratio(found.ratio)) if found else ("", "", "")


def shown_ratio(ratio: Spread) -> str:
    return f"{ratio:.3f}" if ratio.median < 0.1 else f"{ratio:.2f}"


def steps(output: str) -> str:
    """Return training steps with an averager and with DDP."""
    rows = []
    for model, ranks, alone, ddp, ours, ratio, exposed, low, high, most, cpu, most_cpu in STEP.findall(output):
        shown = marked(float(exposed), float(most)).replace(" (", f" ({low} to {high}; ", 1)
        rows.append((f"{model}, {ranks} ranks", alone, ddp, ours, ratio, shown, marked(float(cpu), float(most_cpu))))
    header = ("model", "alone, ms", "DDP, ms", "own, ms", "own/DDP", "exposed time/DDP's", "processor time/DDP's")
    return markdown(header, rows) if rows else ""


def links(output: str) -> str:
    """Return the ratios between two hosts by size and link, and training steps where they were measured."""
    columns: dict[str, dict[str, str]] = {}
    found = bounds(output)
    for bound in found:
        if parts := re.fullmatch(r"(\d+ \+ \d+ ranks, \w+), (\d+ \w+), own/gloo", bound.what):
            shown = f"{bound.figure}, {bound.wanted}{'' if bound.met else ': ' + MISSED}"
            columns.setdefault(parts[1], {})[parts[2]] = shown
    if not columns:
        return ""
    sizes = sorted({nbytes for column in columns.values() for nbytes in column}, key=size)
    rows = [[nbytes, *(column.get(nbytes, "") for column in columns.values())] for nbytes in sizes]
    trained = LINK_STEP.findall(output)
    if trained:
        rows.append(["training step, gloo/own", *trained])
    words = "" if trained else "Training steps between two hosts (`--step`) have not been measured yet. "
    met = sum(bound.met for bound in found)
    return f"{markdown(['own/gloo', *columns], rows)}\n\n{words}{met} of {len(found)} bounds were met in this run."


def calls(output: str) -> str:
    """Return remote calls beside torch's."""
    rows = []
    for bound in bounds(output):
        if parts := REMOTE.fullmatch(bound.what):
            found = bound.figure.replace("x", "")
            rows.append((f"{parts[1]}, {parts[2]}", parts[3], parts[4], found, f"{bound.wanted}: {bound.verdict}"))
    rows += [
        (f"{backend}, {count} in flight", own, torch, "", "")
        for backend, count, own, torch in IN_FLIGHT.findall(output)
    ]
    return markdown(("call", "own", "torch", "torch/own", "wanted"), rows) if rows else ""


def saves(output: str) -> str:
    """Return the times of saving and loading, and the bounds of the run."""
    ways: dict[str, dict[str, str]] = {}
    for what, way, kept, time in SAVED.findall(output):
        name = {"async": "async_save", "first": "first tensor"}.get(what, f"{what}, {kept}" if kept else what)
        ways.setdefault(name, {})[way] = time
    header = ("", "own", "torch", "DCP", "raw writing")
    rows = [[name, *(times.get(way, "") for way in ("ours", "torch", "dcp", "raw"))] for name, times in ways.items()]
    return "\n\n".join(filter(None, (markdown(header, rows), verdicts(bounds(output))))) if rows else ""


def checks(output: str) -> str:
    """Return what checks add to an all_reduce."""
    rows: dict[int, dict[tuple[str, str], str]] = {}
    for backend, nbytes, check, before, more, percent, missed in CHECK.findall(output):
        row = rows.setdefault(int(nbytes), {})
        row[backend, "unchecked"] = before
        row[backend, check] = f"{more} ({percent} %)" + (f", {MISSED}" if missed else "")
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    header = ["message", *(f"{backend}, {check}, us" for backend, check in columns)]
    shown = [[shown_size(nbytes), *(row.get(column, "") for column in columns)] for nbytes, row in rows.items()]
    return markdown(header, shown) if rows else ""
