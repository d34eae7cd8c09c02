"""Target of an examination, and interface of a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from unisono.tools.doctor.finding import Finding

__all__ = ["PORT", "Check", "Target"]

PORT = 29555
"""Default rendezvous port of the hosts for `--hosts`."""


@dataclass(frozen=True, slots=True)
class Target:
    """This process's environment, and the caller's intended use of it.

    Attributes:
        backend: Backend that the program passes to `init`; None is any.
        ranks: Number of ranks to run on this host; None takes it from the launcher's environment.
        hosts: Names or addresses of the cooperating hosts, including this one.
        rank: Index of this host in `hosts`; None detects it.
        port: Port of the first host, free and open to the others.
        limit_s: Seconds that the examination may take.
    """

    backend: str | None = None
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    rank: int | None = None
    port: int = PORT
    limit_s: float = 60.0

    def wants(self, *backends: str) -> bool:
        """Return whether to examine the requirements of these backends only."""
        return self.backend is None or not {"auto", *backends}.isdisjoint(self.backend.split("+"))

    def requires(self, backend: str) -> bool:
        """Return whether the program passes this very backend to `init`."""
        return backend in (self.backend or "").split("+")


class Check(Protocol):
    """A file of `unisono.tools.doctor.checks`: its docstring's first line names the subject of the check.

    Attributes:
        ORDER: Lower ones come first in the report.
    """

    __doc__: str | None
    ORDER: int

    def check(self, target: Target) -> Iterable[Finding]:
        """Run the check, and return its findings; none if it does not apply to this target."""
        ...
