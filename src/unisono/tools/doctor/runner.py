"""All checks at the same time, each within the time that there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from unisono.core.registry import Registry
from unisono.tools.doctor.finding import Finding, cross
from unisono.tools.doctor.target import Check, Target

__all__ = ["CHECKS", "examine"]

CHECKS: Registry[Check] = Registry("check", "unisono.tools.doctor.checks")
"""A new check is one new file, or an entry point `unisono.tools.doctor.checks` of another package."""

# For checks that end by their own limit to say so.
_GRACE_S = 10.0


def examine(patient: Target, names: Sequence[str] | None = None) -> Iterator[tuple[str, list[Finding]]]:
    """Each check's name and what it found, in the order of the report, as soon as it is known.

    Args:
        patient: What to examine.
        names: Of the checks; all if None.

    Raises:
        ValueError: There is no such check.
    """
    chosen = {name: CHECKS[name] for name in (CHECKS.names() if names is None else names)}
    ordered = sorted(chosen, key=lambda name: (chosen[name].ORDER, name))
    deadline = time.monotonic() + patient.limit_s + _GRACE_S
    found: dict[str, list[Finding]] = {}

    def look(name: str) -> None:
        try:
            findings = list(chosen[name].check(patient))
        # Whatever goes wrong in one check is a finding too, and the others go on.
        except Exception as error:
            findings = [_broken(name, f"has failed: {type(error).__name__}: {error}")]
        found[name] = findings

    # Daemons, because a look-up of a name, say, cannot be ended from outside.
    threads = {name: threading.Thread(target=look, args=(name,), daemon=True) for name in ordered}
    for thread in threads.values():
        thread.start()
    for name in ordered:
        threads[name].join(max(0.0, deadline - time.monotonic()))
        yield name, found.get(name) or ([_broken(name, "has not ended in time")] if threads[name].is_alive() else [])


def _broken(name: str, what: str) -> Finding:
    return cross(f"the check itself {what}", f"unisono doctor {name} --timeout 300")
