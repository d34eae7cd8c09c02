"""Errors that name the parameter and the rank."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.communicator import Communicator
from unisono.errors import CommError, MismatchError

__all__ = ["ErrorContext", "check_skipped", "used_gradients"]


class ErrorContext:
    """Context manager that adds the current operation to a `CommError` raised inside."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommError):
            error.message += f" (while {self._what})"


def used_gradients(names: Sequence[str]) -> str:
    """Return the text of an error: hooks have used gradients of these parameters before they were averaged."""
    more = f" (and of {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"the gradient of {names[0]!r}{more} was used in this backward pass before it was averaged: a hook has removed "
        "it, or has made an optimizer's step with this rank's gradient alone, after which the parameters of ranks "
        "differ. Make the step after backward() has returned"
    )


def check_skipped(names: Sequence[str], lacking: Sequence[Sequence[str]], active: int, comm: Communicator) -> None:
    """Raise `MismatchError` if a gradient is missing on some, but not on all, ranks that take part.

    Args:
        names: Names of the parameters, in order.
        lacking: For each rank the names without a gradient there.
        active: Number of ranks that take part.
        comm: The communicator of these ranks.
    """
    partly = [name for name in names if 0 < sum(name in lacks for lacks in lacking) < active]
    if not partly:
        return
    ranks = [rank for rank, lacks in enumerate(lacking) if partly[0] in lacks]
    more = f" (and {len(partly) - 1} more)" if len(partly) > 1 else ""
    raise MismatchError(
        f"rank {', '.join(map(str, ranks))} has no gradient for {partly[0]!r}{more}, which other ranks have: it "
        "skipped a part of the model. Pass find_unused_parameters=True if that is intended",
        rank=comm.rank,
        size=comm.size,
        peer=ranks[0],
    )
