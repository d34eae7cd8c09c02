"""Calls of the doctor, and its results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from unisono.tools.doctor import Target, examine
from unisono.tools.doctor.examination import Finding

__all__ = ["ALONE", "DOCTOR", "Seen", "Start", "find", "the_problem"]


Start = Callable[..., "subprocess.Popen[str]"]

DOCTOR = (sys.executable, "-m", "unisono", "doctor")
ALONE = ("unshare", "--mount", "--uts")


@dataclass
class Seen:
    """Return the result of `unisono doctor --json`."""

    status: int
    findings: list[dict[str, str]]

    def problems(self, check: str) -> list[dict[str, str]]:
        return [one for one in self.findings if one["check"] == check and one["state"] == "problem"]

    def the_problem(self, check: str) -> str:
        """The only one of this check; all problems have a fix, and the status tells of them."""
        (problem,) = self.problems(check)
        assert self.status == 1
        assert problem["fix"]
        return problem["text"]


def find(check: str, target: Target | None = None) -> list[Finding]:
    """Return the findings of one check in this process."""
    ((name, found),) = examine(target or Target(limit_s=30.0), [check])
    assert name == check
    return found


def the_problem(check: str, target: Target | None = None) -> Finding:
    (found,) = [one for one in find(check, target) if one.state == "problem"]
    assert found.fix
    return found
