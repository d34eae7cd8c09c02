"""Files of raw output in docs/benchmarks/, and the figures that programs print in common formats.

A file begins with the command, and a paragraph with date, machine and conditions; output follows an empty line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.tools.bench import Spread, parse_sizes

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"

_TITLE = re.compile(r"# (\w+), (\d+) ranks?, ([\w+]+), (\w+) memory, (\w+) caches;")
_NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
_FIGURE = rf"(?P<figure>{_NUMBER}x?(?: \({_NUMBER} to {_NUMBER}\))?)"
_WANTED = rf"at (?:least|most) {_NUMBER}"
_BOUNDS = (
    rf"(?:met|MISSED) +(?P<what>.+): {_FIGURE}, {_WANTED} wanted",
    # As checkpoint_speed.py and rpc_against_torch.py printed them until 2026-11-23.
    rf"(?P<what>.+?) {{2,}}{_FIGURE}(?: times the state)?; wanted: {_WANTED}.*",
    rf"(?P<what>.+ us): +{_FIGURE}; {_WANTED}x: (?:kept|MISSED)",
)


@dataclass(frozen=True)
class Raw:
    """The output of one program, with the command, and the date, machine and conditions of the run."""

    command: str
    conditions: str
    output: str

    @classmethod
    def read(cls, name: str) -> Raw | None:
        """Return the results of a program, None if there are none yet."""
        path = FOLDER / f"{name}.txt"
        if not path.exists():
            return None
        head, _, output = path.read_text().partition("\n\n")
        command, _, conditions = head.partition("\n")
        return cls(command, conditions, output)

    def write(self, name: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.txt").write_text(f"{self.command}\n{self.conditions}\n\n{self.output}")

    @property
    def date(self) -> str:
        return self.conditions[:10]

    @property
    def machine(self) -> str:
        """The machine and its versions, without the conditions of this run."""
        return " ".join(self.conditions.split())[12:].partition(";")[0]


@dataclass(frozen=True)
class Timed:
    """One size in a table of unisono.tools.bench: times as printed, and their ratio, own over the peer's."""

    collective: str
    ranks: int
    memory: str
    caches: str
    nbytes: int
    own_us: str
    peer: str
    peer_us: str
    ratio: Spread


@dataclass(frozen=True)
class Figure:
    """A figure that a program printed beside its bound, with quartiles where it has any."""

    what: str
    shown: str

    @property
    def median(self) -> float:
        return float(self.shown.split()[0].rstrip("x"))


def timed(output: str) -> Iterator[Timed]:
    """Yield the lines of all tables of unisono.tools.bench that have a peer."""
    title, columns = None, list[str]()
    for line in output.splitlines():
        if found := _TITLE.match(line):
            title = found
        elif line.split()[:3] == ["#", "size", "count"]:
            columns = line.split()[1:]
        elif title and len(columns) > 11 and re.match(r" +\d", line):
            cells = line.split()
            # The columns of the first peer are its time, its time over that of unisono, and the quartiles of that.
            at = columns.index("#wrong") + 1
            low, high = cells[at + 2].split("..")
            # With two decimals, 0.00 stands for less than 0.005.
            own_over_peer = Spread(*(1 / max(float(each), 0.005) for each in (high, cells[at + 1], low)))
            kind = title[1], int(title[2]), title[4], title[5]
            yield Timed(*kind, int(cells[0]), cells[columns.index("time")], columns[at], cells[at], own_over_peer)


def figures(output: str) -> Iterator[Figure]:
    """Yield all figures that have a bound; whether it was met stands in the raw output."""
    for line in output.splitlines():
        for form in _BOUNDS:
            if found := re.fullmatch(form, line):
                yield Figure(found["what"], found["figure"])
                break


def size(text: str) -> int:
    """Return the bytes of a size as `shown_size` prints it."""
    return parse_sizes(text.replace(" ", ""))[0]
