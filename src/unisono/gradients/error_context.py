"""Errors that say which parameter they are about, and which rank."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.communicator import Communicator
from unisono.errors import CommError, MismatchError

__all__ = ["ErrorContext", "check_skipped"]


class ErrorContext:
    """A context: a `CommError` raised inside also says during what it came."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommError):
            error.message += f" (while {self._what})"


def check_skipped(names: Sequence[str], lacking: Sequence[Sequence[str]], active: int, comm: Communicator) -> None:
    """`MismatchError` if a gradient is lacking on some ranks, and not on all that take part.

    Args:
        names: Of the parameters, in their order.
        lacking: For each rank which of them have no gradient there.
        active: How many ranks take part.
        comm: Whose ranks these are.
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
