"""From what went wrong on one rank to what all ranks are told of it."""

from __future__ import annotations

from unisono.control import Cause, Control
from unisono.control.failure import text_of
from unisono.control.hang import hang_report, last_calls
from unisono.errors import CommError, CommTimeoutError, DeadlockError, MismatchError
from unisono.group import Group

__all__ = ["cause_of", "explained"]

_FIELDS = ("operation", "call", "peer", "nbytes", "waited_s")


def cause_of(error: BaseException, rank: int, operation: str) -> Cause:
    """The error as the other ranks are told of it."""
    if isinstance(error, MismatchError):
        return Cause("MismatchError", error.peer, error.message)
    if isinstance(error, CommError):
        about = error.peer if error.peer is not None else rank
        return Cause(type(error).__name__, about, f"rank {rank} gave up in {operation}: {error.message}")
    return Cause("PeerLostError", rank, f"rank {rank} failed in {operation}: {type(error).__name__}: {text_of(error)}")


def explained(error: BaseException, control: Control, group: Group) -> BaseException:
    """A wait in vain with what every rank is doing (a deadlock is called so), a mismatch with the last calls of each.

    Cost: one question to all ranks, which those that are stopped hold up by 0.15 s.
    """
    if not isinstance(error, CommError) or "\n" in str(error) or group.size == 1:
        return error
    if isinstance(error, MismatchError):
        error.message += last_calls(control, group)
    elif isinstance(error, CommTimeoutError):
        hang = hang_report(control, group)
        if error.peer is None and hang.missing:
            error.peer = hang.missing[0]
            error.message += f": {hang.verdict}"
        error.message += hang.report
        if hang.deadlock:
            return DeadlockError(error.message, **{name: getattr(error, name) for name in _FIELDS})
    return error
