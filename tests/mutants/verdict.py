"""What laws say of code."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["complaint"]


def complaint(check: Callable[..., object], *arguments: object) -> str:
    """By what assertion a check fails; nothing, if it passes."""
    try:
        check(*arguments)
    except AssertionError as error:
        return str(error) or "an assertion without a word"
    return ""
