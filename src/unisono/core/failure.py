"""Group failures: the first error becomes the group's `Cause`, from which each rank makes the error that it raises."""

from __future__ import annotations

import copy
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from unisono import errors
from unisono.core.group import Group
from unisono.errors import CommError, MismatchError, PeerLostError

__all__ = [
    "Cause",
    "connection_error",
    "detached",
    "ended_by",
    "error_of",
    "left_error",
    "raise_caused",
    "signal_name",
    "text_of",
    "to_cause",
    "waited_for",
    "with_notes_of",
]

_MOST_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class Cause:
    """First failure of a group.

    Attributes:
        kind: Name of the error class in `unisono.errors` that the other ranks raise.
        rank: The rank that failed or is to blame, numbered as in the failed group.
        message: The error text, the same on every rank: `error_of` adds the rank that raises the error.
    """

    kind: str
    rank: int | None
    message: str


def raise_caused(raised: BaseException, error: BaseException) -> NoReturn:
    """Raise `raised` with the caught `error` as its cause, unless both are the same, or `detached` has copied it."""
    if raised is not error and error.__traceback__ is not None:
        raised.__cause__ = error
    raise raised


def detached(error: CommError) -> CommError:
    """Return a copy of an error that a transport may raise again; the traceback, cause and notes move to the copy.

    The frames of a traceback refer to the caller's models and tensors, which must not live as long as the transport.
    """
    found = copy.copy(error).with_traceback(error.__traceback__)
    found.__cause__ = error.__cause__
    error.__traceback__ = error.__context__ = error.__cause__ = None
    vars(error).pop("__notes__", None)
    return found


def to_cause(error: BaseException, rank: int, operation: str) -> Cause:
    """The cause that a rank reports to the other ranks for its own error."""
    if isinstance(error, MismatchError):
        return Cause("MismatchError", error.peer, error.message)
    if isinstance(error, CommError):
        about = error.peer if error.peer is not None else rank
        return Cause(type(error).__name__, about, f"rank {rank} gave up in {operation}: {error.message}")
    return Cause("PeerLostError", rank, f"rank {rank} failed in {operation}: {type(error).__name__}: {text_of(error)}")


def error_of(cause: Cause, group: Group | None = None) -> CommError:
    """The error that a member of `group` raises because of `cause`.

    Example:
        >>> print(error_of(Cause("PeerLostError", 1, "rank 1 was lost"), Group.world(0, 4)))
        rank 0 of 4: rank 1 was lost
    """
    kind = getattr(errors, cause.kind, CommError)
    if not (isinstance(kind, type) and issubclass(kind, CommError)):
        kind = CommError
    rank, size = (None, None) if group is None else (group.rank, len(group.members))
    return kind(cause.message, peer=cause.rank, rank=rank, size=size)


def left_error(rank: int) -> PeerLostError:
    """Return the error to raise when waiting for a rank that has exited without a failure.

    Example:
        >>> print(left_error(2))
        rank 2 has left (it closed the communicator, or its program has ended). Did it make fewer calls?
    """
    return PeerLostError(
        f"rank {rank} has left (it closed the communicator, or its program has ended). Did it make fewer calls?",
        peer=rank,
    )


def connection_error(rank: int | None) -> PeerLostError:
    """Return the error for a lost connection; the control plane may know the reason.

    Example:
        >>> print(connection_error(2))
        the connection to rank 2 was lost
    """
    return PeerLostError(f"the connection to {'a rank' if rank is None else f'rank {rank}'} was lost")


def waited_for(missing: Sequence[int], waited_s: float, topic: str = "") -> str:
    """Return the error text for a wait for ranks that have not arrived.

    Example:
        >>> waited_for([1], 2.0)
        'waited 2.0 s for rank 1, which has not arrived. Is it alive, or did it skip a call?'
    """
    first, *others = missing
    where = f" in {topic}" if topic else ""
    if topic == "init":
        hint = f"{'Were they' if others else 'Was it'} started, and is WORLD_SIZE right?"
    else:
        hint = "Are they alive, or did they skip a call?" if others else "Is it alive, or did it skip a call?"
    listed = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    who = f"rank {first} (and {listed}), which have" if others else f"rank {first}, which has"
    return f"waited {waited_s:.1f} s{where} for {who} not arrived. {hint}"


def with_notes_of(error: BaseException, other: CommError) -> CommError:
    """Return `other`, which replaces `error`, with the notes of `error` added.

    Example:
        >>> error = ValueError()
        >>> error.add_note("in step 3 of the algorithm")
        >>> with_notes_of(error, CommError("timed out")).__notes__
        ['in step 3 of the algorithm']
    """
    for note in getattr(error, "__notes__", ()):
        other.add_note(note)
    return other


def text_of(error: BaseException) -> str:
    """Return an error's text for other ranks: truncated if long, and with a placeholder if its `__str__` fails.

    Example:
        >>> text_of(KeyError("x"))
        "'x'"
    """
    try:
        text = str(error)
    except Exception as another:
        text = f"(its str() failed: {type(another).__name__})"
    return f"{text[:_MOST_CHARACTERS]}... ({len(text)} characters)" if len(text) > _MOST_CHARACTERS else text


def ended_by(number: int) -> str:
    """Describe how a signal terminated a process.

    Example:
        >>> ended_by(9)
        'was ended by SIGKILL (by the kernel, if memory ran out)'
    """
    name = signal_name(number)
    return f"was ended by {name}{' (by the kernel, if memory ran out)' if name == 'SIGKILL' else ''}"


def signal_name(number: int) -> str:
    """Return the name of a signal, or a description for real-time signals, which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
