"""Results of checks."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["assertion_of"]


def assertion_of(check: Callable[..., object], *arguments: object) -> str:
    """Return the text of the assertion that fails, or an empty string if the check passes."""
    try:
        check(*arguments)
    except AssertionError as error:
        return str(error) or "an assertion without a text"
    return ""
