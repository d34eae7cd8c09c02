"""Runs faults on backends, and checks the errors of the ranks; the table of docs/reliability.md."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fault_jobs import JOBS, ended
from fault_programs import Seen, observe
from fault_rows import FAULTS, ODD, SIZE, TOGETHER_S, Fault

from unisono.host.processors import cores
from unisono.launcher.api import launch
from unisono.testing import pool
from unisono.transports import TRANSPORTS

BACKENDS = ("thread", "shm", "tcp", "gloo", "mpi")
JOB = "mpi without ulfm"
TRIES = 3
AT_ONCE_S = 0.2


@dataclass(frozen=True)
class Cell:
    """Result of a fault on a backend.

    Attributes:
        wrong: What is not as it should be: wrong errors, and errors that came late.
        took_s: Seconds from the arrival of the last rank until the last rank has its error.
    """

    wrong: list[str]
    took_s: float
    kinds: tuple[str, ...]


def why_not(fault: Fault, backend: str) -> str | None:
    """Return why there is no such cell; None if there is one."""
    if backend not in TRANSPORTS.names():
        return "this transport is not there"
    return fault.impossible.get(backend)


def tried(name: str, backend: str) -> Cell:
    """A cell, tried again if all that was wrong is time: other programs run on this machine too."""
    for _ in range(TRIES - 1):
        cell = cell_of(name, backend)
        if not cell.wrong or any(not problem.startswith("late: ") for problem in cell.wrong):
            return cell
    return cell_of(name, backend)


def crowding() -> float:
    """How many runnable threads share a processor: moments between ranks take as many times as long as alone."""
    return max(1.0, os.getloadavg()[0] / cores())


def cell_of(name: str, backend: str) -> Cell:
    """A fault, on a backend, once."""
    if backend == JOB:
        return Cell(*ended(name), ())
    found = FAULTS[name]
    ends = _run(found, backend)
    seen = [end for end in ends if isinstance(end, Seen)]
    wrong = [f"rank {r} ended by {end!r}" for r, end in enumerate(ends) if r not in found.gone and end not in seen]
    for each in seen:
        wrong += [f"rank {each.rank}: {problem}" for problem in _wrong(found, each)]
    told = [each.told_s for each in seen if each.told_s and (each.rank != ODD or found.odd_counts)]
    if not told:
        return Cell([*wrong, "nobody was told"], 0.0, ())
    came = max(each.came_s for each in seen if each.rank != ODD or found.odd_counts)
    if max(told) - came > found.within_s * crowding():
        wrong.append(f"late: the last rank was told after {max(told) - came:.3f} s, not within {found.within_s}")
    others = [each.told_s for each in seen if each.told_s and each.rank != ODD]
    if others and max(others) - min(others) > TOGETHER_S * crowding():
        wrong.append(f"late: ranks were told {max(others) - min(others):.3f} s apart")
    return Cell(wrong, max(told) - came, tuple(sorted({each.kind for each in seen})))


def _run(found: Fault, backend: str) -> list[Any]:
    options: dict[str, Any] = {"timeout": 10.0, "check": found.check}
    own = found.fatal and not TRANSPORTS[backend].in_process
    if own:
        return launch(observe, SIZE, backend, (found.name, True), threads=1, on_failure="continue", **options)
    return pool(backend, SIZE, **options).run(observe, found.name, False, on_failure="continue")


def _wrong(found: Fault, seen: Seen) -> list[str]:
    """Return the faults in the error of one rank."""
    right = found.right(seen.rank)
    if seen.kind not in right:
        return [f"got {seen.kind} ({seen.text[:300]}), not {' or '.join(right)}"]
    wrong = []
    if "CommError" in seen.classes:
        lacking = [key for key in found.named if seen.fields.get(key) is None]
        if lacking:
            wrong.append(f"the error does not say {lacking}: {seen.text[:300]}")
        if f"rank {seen.fields['rank']} of {seen.fields['size']}" not in seen.text:
            wrong.append(f"the error does not say whose it is: {seen.text[:300]}")
        if found.names_odd and f"rank {ODD}" not in seen.text and f"ranks {ODD}" not in seen.text:
            wrong.append(f"the error does not name rank {ODD}: {seen.text[:300]}")
    if found.breaks and not seen.later:
        wrong.append("the communicator still works")
    if found.breaks and seen.later_took_s > AT_ONCE_S * crowding():
        wrong.append(f"late: the next call failed only after {seen.later_took_s:.3f} s")
    return wrong


def table(cells: dict[tuple[str, str], Cell]) -> str:
    """The matrix as it stands in docs/reliability.md."""
    lines = ["| fault | every live rank gets | " + " | ".join(BACKENDS) + " |", "|---|---|" + "---|" * len(BACKENDS)]
    notes: list[str] = []
    for name, found in FAULTS.items():
        row = []
        for backend in BACKENDS:
            reason = why_not(found, backend)
            if reason is not None:
                if reason not in notes:
                    notes.append(reason)
                row.append(f"n/a [{notes.index(reason) + 1}]")
            elif (name, backend) in cells:
                row.append(f"{cells[name, backend].took_s:.2f}")
            else:
                row.append("")
        kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(kind.__name__ for kind in found.kinds))
        lines.append(f"| {name} | {kinds} | {' | '.join(row)} |")
    notes.append("only MPI has ulfm")
    for name in JOBS:
        took_s = [f"{cells[name, JOB].took_s:.2f}"] if (name, JOB) in cells else [""]
        row = [f"n/a [{len(notes)}]"] * (len(BACKENDS) - 1) + took_s
        lines.append(f"| {name}, MPI without ulfm | the job ends, and rank {ODD} is named | {' | '.join(row)} |")
    lines += ["", *(f"{number}. {reason}." for number, reason in enumerate(notes, 1))]
    return "\n".join(lines)
