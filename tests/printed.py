"""Output of programs, without what torch adds to it."""

from __future__ import annotations


def printed(text: str) -> list[str]:
    """Return the lines of an output; gloo of torch 2.8 and 2.9 writes of its own to stdout, and ranks tear lines."""
    return [line for line in text.splitlines() if "[Gloo] Rank " not in line and "connected peer ranks" not in line]
