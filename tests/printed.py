"""Output of programs, without what torch adds to it."""

from __future__ import annotations


def printed(text: str) -> list[str]:
    """Return the lines of an output; gloo of torch 2.8 writes of its own to stdout, which nothing turns off."""
    return [line for line in text.splitlines() if "[Gloo] Rank " not in line]
