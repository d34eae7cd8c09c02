"""One row of the matrix of faults: a fault, and the expected error of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIZE = 3
ODD = 1
SHORT_S = 0.5
LONG_S = 20.0
MISMATCH_S, DEATH_S, LATE_S, TOGETHER_S = 0.2, 0.5, 0.5, 0.3

Program = Callable[[Any], None]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name: Name in the table.
        run: Program of every rank; it raises, or fails the test.
        kinds: Error class of every rank, by rank; a single one applies to all.
        within_s: Time limit in seconds, from the arrival of the last rank.
        or_kind: Alternative error class.
        names_odd: Whether every error names rank 1.
        fatal: Whether it ends a process, so that ranks of its own are needed.
        gone: Ranks that have ended at the end.
        impossible: For some backends, why it cannot happen there.
        breaks: Whether the communicator is broken afterwards.
        check: As for `init`.
        named: Fields of the errors.
        odd_counts: Whether the time limit applies to the error of rank 1 itself.
    """

    name: str
    run: Program
    kinds: tuple[type[BaseException], ...]
    within_s: float = MISMATCH_S
    or_kind: type[BaseException] | None = None
    names_odd: bool = True
    fatal: bool = False
    gone: frozenset[int] = frozenset()
    impossible: dict[str, str] = field(default_factory=dict)
    breaks: bool = True
    check: str = "auto"
    named: tuple[str, ...] = ("rank", "size", "operation", "call", "group")
    odd_counts: bool = True

    def right(self, rank: int) -> list[str]:
        """The names of the classes that are right on this rank."""
        kind = self.kinds[rank] if len(self.kinds) > 1 else self.kinds[0]
        return [each.__name__ for each in (kind, self.or_kind) if each is not None]


FAULTS: dict[str, Fault] = {}


def fault(name: str, *kinds: type[BaseException], **more: Any) -> Callable[[Program], Program]:
    def keep(run: Program) -> Program:
        FAULTS[name] = Fault(name, run, kinds, **more)
        return run

    return keep


def odd(comm: Any) -> bool:
    return bool(comm.rank == ODD)
