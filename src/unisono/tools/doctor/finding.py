"""What an examination finds: a tick, a cross with its fix, or a remark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State", "cross", "note", "tick"]

State = Literal["tick", "cross", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        state: "tick" is right, "cross" is wrong and can be mended, "note" is neither.
        text: What was found, and what comes of it.
        fix: A command that mends it.
    """

    state: State
    text: str
    fix: str | None = None


def tick(text: str) -> Finding:
    """All is well."""
    return Finding("tick", text)


def note(text: str, fix: str | None = None) -> Finding:
    """Good to know; nothing is wrong."""
    return Finding("note", text, fix)


def cross(text: str, fix: str) -> Finding:
    """Something is wrong, and this mends it."""
    return Finding("cross", text, fix)
