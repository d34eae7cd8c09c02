"""Findings of an examination: ok, a problem with its fix, an optional improvement, or information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State", "info", "ok", "optional", "problem"]

State = Literal["ok", "problem", "optional", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        state: "ok" is right, "problem" is wrong and can be fixed, "optional" is missing but needed only for what the
            text says, "info" is none of these.
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


def optional(text: str, fix: str, *, required: bool = False) -> Finding:
    """Report something missing that most programs do not need; a problem if this target requires it."""
    return Finding("problem" if required else "optional", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Report a fault and its fix."""
    return Finding("problem", text, fix)
