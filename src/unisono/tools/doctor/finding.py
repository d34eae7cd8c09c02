"""Findings of an examination: ok, a problem with its fix, or information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State", "info", "ok", "problem"]

State = Literal["ok", "problem", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        state: "ok" is right, "problem" is wrong and can be fixed, "info" is neither.
        text: The finding and its consequence.
        fix: A command that fixes it.
    """

    state: State
    text: str
    fix: str | None = None


def ok(text: str) -> Finding:
    """Report that all is well."""
    return Finding("ok", text)


def info(text: str, fix: str | None = None) -> Finding:
    """Report useful information; nothing is wrong."""
    return Finding("info", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Report a fault and its fix."""
    return Finding("problem", text, fix)
