"""Adds the wording of torch's errors to our errors, because programs that restart after failures search for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["add_torch_words", "torch_words"]

_MARK = "[torch: "


def add_torch_words(error: CommError) -> None:
    """Add to an error's message, once, the text that torch's backends use for the same failure.

    Example:
        >>> error = PeerLostError("rank 1 was lost")
        >>> add_torch_words(error)
        >>> print(error)
        rank 1 was lost [torch: Connection closed by peer]
    """
    if isinstance(error, PeerLostError):
        words = "Connection closed by peer"
    elif isinstance(error, CommTimeoutError):
        # Write the limit in milliseconds, as torch does, because programs and tests search for "timeout after 10ms".
        limit = "the limit" if error.waited_s is None else f"{1000 * error.waited_s:.0f}ms"
        words = f"Timed out waiting; timed out after {limit}; wait timeout after {limit}"
    else:
        return
    # Add torch's wording to an error only once: two waiters may get the same error, and a report to other ranks repeats
    # the message.
    if _MARK not in error.message:
        # The first line is the message itself; the lines after it list each rank's activity.
        sentence, *report = error.message.split("\n")
        error.message = "\n".join([f"{sentence} {_MARK}{words}]", *report])


@contextmanager
def torch_words() -> Iterator[None]:
    """Apply `add_torch_words` to errors raised in the block. For speed, tensor calls use `add_torch_words` itself."""
    try:
        yield
    except CommError as error:
        add_torch_words(error)
        raise
