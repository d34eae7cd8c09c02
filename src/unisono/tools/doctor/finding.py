"""Findings of an examination: a tick, a cross with its fix, or a remark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State", "cross", "note", "tick"]

State = Literal["tick", "cross", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        state: "tick" is right, "cross" is wrong and can be fixed, "note" is neither.
        text: The finding and its consequence.
        fix: A command that fixes it.
    """

    state: State
    text: str
    fix: str | None = None


def tick(text: str) -> Finding:
    """Report that all is well."""
    return Finding("tick", text)


def note(text: str, fix: str | None = None) -> Finding:
    """Report useful information; nothing is wrong."""
    return Finding("note", text, fix)


def cross(text: str, fix: str) -> Finding:
    """Report a fault and its fix."""
    return Finding("cross", text, fix)
