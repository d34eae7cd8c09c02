"""What is examined, and what a check is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from unisono.tools.doctor.finding import Finding

__all__ = ["PORT", "Check", "Target"]

PORT = 29555
"""Where hosts meet for `--hosts`, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Target:
    """This process's surroundings, with what the caller wants to do in them.

    Attributes:
        backend: What the program passes to `init`; None is anything.
        ranks: How many shall run on this host; None is what the launcher's environment says.
        hosts: Names or addresses of hosts that shall work together, this one among them.
        rank: Which of the hosts this one is; None finds out.
        port: Of the first host, free and open to the others.
        limit_s: Seconds that the examination may take.
    """

    backend: str | None = None
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    port: int = PORT
    limit_s: float = 60.0

    def wants(self, *backends: str) -> bool:
        """Whether what only these backends need is to be examined."""
        return self.backend is None or not {"auto", *backends}.isdisjoint(self.backend.split("+"))


class Check(Protocol):
    """A file of `unisono.tools.doctor.checks`: its docstring's first line says what it looks at.

    Attributes:
        ORDER: Lower ones come first in the report.
    """

    __doc__: str | None
    ORDER: int

    def check(self, patient: Target) -> Iterable[Finding]:
        """Look, and say what was found; nothing if it does not matter to this patient."""
        ...
