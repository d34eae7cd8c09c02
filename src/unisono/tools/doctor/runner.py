"""Runner of all checks concurrently, within one time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from unisono.core.registry import Registry
from unisono.tools.doctor.finding import Finding, problem
from unisono.tools.doctor.target import Check, Target

__all__ = ["CHECKS", "examine"]

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
        threads[name].join(max(0.0, deadline - time.monotonic()))
        yield name, found.get(name) or ([_broken(name, "did not end in time")] if threads[name].is_alive() else [])


def _broken(name: str, what: str) -> Finding:
    return problem(f"the check itself {what}", f"unisono doctor {name} --timeout 300")
