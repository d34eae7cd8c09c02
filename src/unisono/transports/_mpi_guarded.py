"""What each call of MPI tells and asks, whatever it is: whether MPI may still be called, and until when it may take."""

from __future__ import annotations

from unisono.compiled import compiled

__all__ = ["Guarded"]


@compiled
class Guarded:
    """The part of `Comms` that is in haste; src/compiled/guarded.c does the same.

    Attributes:
        broken: Why nothing can be called any more, if so.
        deadline: On the monotonic clock, for `Watch`; None while no call of MPI's is under way.
    """

    broken: BaseException | None = None
    deadline: float | None = None
