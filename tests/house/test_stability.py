"""Which public names are provisional: this list, the reference's marks and the docstrings say the same.

A name is added here by a decision, and removed when it becomes stable. A stable name never becomes provisional.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import unisono as un

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
NOTE = "Provisional: it may change in any minor version, without a deprecation."

PROVISIONAL = {
    "un": {"breakpoint", "debugger", "record", "replay"},
    "un.algorithms": {
        "Level", "Message", "Network", "Overlap", "ScalingPoint", "Simulation", "chrome_trace", "goal", "play",
        "plot_scaling", "scaling", "simulate", "simulate_backward",
    },
    "un.compression": {"onebit", "randomk"},
    "un.data": {"dirichlet"},
    "un.debugger": {"Session", "attach", "breakpoint"},
    "un.gradients": {
        "ClippedMean", "DiLoCo", "Gossip", "LocalSGD", "LogicalShards", "OuterUpdate", "PeriodicAverager", "SlowMo",
        "TrimmedMean",
    },
    "un.interop": {"watch"},
}  # fmt: skip
COMMANDS = {"debug", "play", "replay", "simulate", "watch"}


def packages() -> dict[str, Any]:
    found = {f"un.{name}": getattr(un, name) for name in un.__all__ if inspect.ismodule(getattr(un, name))}
    return {"un": un, **found}


def noted(value: Any) -> bool:
    """Whether a name's docstring has the note; partitioners are methods of the class that has it."""
    owner = getattr(value, "__self__", None)
    texts = [inspect.getdoc(value), inspect.getdoc(owner) if inspect.isclass(owner) else None]
    return any(NOTE in (text or "").splitlines() for text in texts)


@pytest.mark.parametrize("package", packages())
def test_docstrings_say_which_names_are_provisional(package: str) -> None:
    module = packages()[package]
    assert {name for name in module.__all__ if noted(getattr(module, name))} == PROVISIONAL.get(package, set())


def test_the_reference_marks_them() -> None:
    marked: dict[str, set[str]] = {}
    for title, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL):
        names = set(
            re.findall(r"^\| `(?:unisono )?([a-zA-Z_]+)[^`]*` \| .*; \*provisional\* \|$", section, re.MULTILINE)
        )
        package = re.match(r"`unisono(\.\w+)?[`,]", title)
        if names:
            marked[f"un{package[1] or ''}" if package else title] = names
    # The debugger has a page of its own instead of a section.
    expected = {package: names for package, names in PROVISIONAL.items() if package != "un.debugger"}
    assert marked == {**expected, "The command line": COMMANDS}
