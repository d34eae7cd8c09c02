"""Resources that a forked child must not share with its parent."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol

__all__ = ["ForkUnsafeResource", "invalidate_after_fork"]


class ForkUnsafeResource(Protocol):
    """An object with descriptors that a forked child must not keep open."""

    def invalidate_after_fork(self) -> None:
        """Close every descriptor, without touching anything that the parent still uses."""
        ...


# One set for the process, because a fork copies every descriptor; the set is weak, so that it keeps no descriptors
# open.
_holders: weakref.WeakSet[ForkUnsafeResource] = weakref.WeakSet()


def invalidate_after_fork(holder: ForkUnsafeResource) -> None:
    """Register a resource to release in forked children; otherwise a killed rank seems alive until its forks exit."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        with contextlib.suppress(OSError):
            holder.invalidate_after_fork()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
