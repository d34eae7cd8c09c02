"""Check that torch can use gloo."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from unisono.tools.doctor.checks.torch import load_torch
from unisono.tools.doctor.examination import Finding, Target, ok, problem

__all__ = ["ORDER", "check"]

ORDER = 20


def check(target: Target) -> Iterator[Finding]:
    """Ask torch whether gloo is available."""
    if not target.wants("gloo"):
        return
    dist = load_torch().distributed
    if dist.is_available() and dist.is_gloo_available():
        yield ok("torch has it")
    else:
        yield problem(
            "this torch was built without gloo; ranks of one host can use shm, those of several hosts cannot connect",
            f"{sys.executable} -m pip install --force-reinstall torch",
        )
