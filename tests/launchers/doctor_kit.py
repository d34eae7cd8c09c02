"""What the doctor says, and how a test asks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from unisono.tools.doctor import Target, examine
from unisono.tools.doctor.finding import Finding

__all__ = ["ALONE", "DOCTOR", "Seen", "Start", "find", "the_cross"]


Start = Callable[..., "subprocess.Popen[str]"]

DOCTOR = (sys.executable, "-m", "unisono", "doctor")
ALONE = ("unshare", "--mount", "--uts")


@dataclass
class Seen:
    """What `unisono doctor --json` said."""

    status: int
    findings: list[dict[str, str]]

    def crosses(self, check: str) -> list[dict[str, str]]:
        return [one for one in self.findings if one["check"] == check and one["state"] == "cross"]

    def the_cross(self, check: str) -> str:
        """The only one of this check; all crosses have a fix, and the status tells of them."""
        (cross,) = self.crosses(check)
        assert self.status == 1
        assert cross["fix"]
        return cross["text"]


def find(check: str, patient: Target | None = None) -> list[Finding]:
    """What one check finds in this process."""
    ((name, found),) = examine(patient or Target(limit_s=30.0), [check])
    assert name == check
    return found


def the_cross(check: str, patient: Target | None = None) -> Finding:
    (found,) = [one for one in find(check, patient) if one.state == "cross"]
    assert found.fix
    return found
