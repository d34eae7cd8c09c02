"""Runner of all checks concurrently, within one time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from unisono.core.registry import Registry
from unisono.core.work import seconds_left
from unisono.tools.doctor.report import Finding, problem

__all__ = ["CHECKS", "PORT", "Check", "Target", "examine"]

CHECKS: Registry[Check] = Registry("check", "unisono.tools.doctor.checks")
"""A new check is one new file, or an entry point `unisono.tools.doctor.checks` of another package."""

# Grace period in which checks report that they reached their own limit.
_GRACE_S = 10.0


def examine(target: Target, names: Sequence[str] | None = None) -> Iterator[tuple[str, list[Finding]]]:
    """Yield each check's name and findings, in the order of the report, as soon as they are known.

    Args:
        target: The target of the examination.
        names: Names of the checks; all if None.

    Raises:
        ValueError: There is no such check.
    """
    chosen = {name: CHECKS[name] for name in (CHECKS.names() if names is None else names)}
    ordered = sorted(chosen, key=lambda name: (chosen[name].ORDER, name))
    deadline = time.monotonic() + target.limit_s + _GRACE_S
    found: dict[str, list[Finding]] = {}

    def look(name: str) -> None:
        try:
            findings = list(chosen[name].check(target))
        # Any error of a check is a finding, too, and the other checks continue.
        except Exception as error:
            findings = [_broken(name, f"has failed: {type(error).__name__}: {error}")]
        found[name] = findings

    # Daemon threads, because a name look-up, for example, cannot be cancelled.
    threads = {name: threading.Thread(target=look, args=(name,), daemon=True) for name in ordered}
    for thread in threads.values():
        thread.start()
    for name in ordered:
        threads[name].join(seconds_left(deadline))
        yield name, found.get(name) or ([_broken(name, "did not end in time")] if threads[name].is_alive() else [])


def _broken(name: str, what: str) -> Finding:
    return problem(f"the check itself {what}", f"unisono doctor {name} --timeout 300")


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
