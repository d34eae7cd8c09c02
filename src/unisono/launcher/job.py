"""Job of a launched rank, and its outcome."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unisono.communicator import Check, Communicator
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.errors import AbortedError, CommError, PeerLostError, UnavailableError
from unisono.transports.hierarchical import Connectable

__all__ = ["GRACE_S", "Job", "Outcome", "RankTracebackError", "conclude", "name_of", "reported"]

GRACE_S = 3.0
"""After a first failure, how long the others may take to end by their own error."""


class RankTracebackError(Exception):
    """Stands before an error that a rank raised, to show where in the rank that was."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(slots=True)
class Job:
    """The program of every rank, and how its communicator is made."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    transport: Connectable
    options: Options
    check: Check
    wrap: Callable[[Transport], Transport] | None

    def run(self, group: Group, control: ControlPlane) -> Any:
        """Run one rank: connect, call the program, notify the others if it fails."""
        options = self.options
        if options.device == "cuda":
            count = torch.cuda.device_count()
            if not count:
                raise UnavailableError(
                    f"ranks of backend {options.backend!r} were to have their tensors on GPUs, but torch sees none; "
                    "leave out device=, or use backend='gloo'"
                )
            options = replace(options, device=f"cuda:{group.rank % count}")
        transport = self.transport.connect(group, control, options)
        if self.wrap is not None:
            transport = self.wrap(transport)
        with Communicator(transport, control, options, check=self.check) as comm:
            return self.fn(comm, *self.args, **self.kwargs)


@dataclass(slots=True)
class Outcome:
    """Outcome of one rank.

    Attributes:
        result: The return value of its program.
        error: The error that it raised, or one that describes how its process ended.
        trace: Its traceback as text, if it could still report one.
    """

    rank: int
    result: Any = None
    error: BaseException | None = None
    trace: str | None = field(default=None)

    @classmethod
    def failed(cls, rank: int, error: BaseException) -> Outcome:
        return cls(rank, error=error, trace="".join(traceback.format_exception(error)))


def reported(rank: int, data: bytes) -> Outcome:
    """Return the outcome that a rank's process has reported."""
    kind, content, *trace = pickle.loads(data)
    try:
        value = pickle.loads(content)
    except Exception as error:
        error.add_note(f"while the {kind} of rank {rank} was read")
        return Outcome.failed(rank, error)
    return Outcome(rank, value) if kind == "result" else Outcome(rank, error=value, trace=trace[0])


def name_of(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def conclude(ended: Sequence[Outcome], size: int, on_failure: str) -> list[Any]:
    """The results by rank; or raise the failure that was first, with its rank's own traceback before it.

    Args:
        ended: In the order in which ranks ended.
        size: How many there are.
        on_failure: "end" raises; "continue" puts a failed rank's error in its place.
    """
    results: list[Any] = [None] * size
    for outcome in ended:
        results[outcome.rank] = outcome.result if outcome.error is None else outcome.error
    failures = [outcome for outcome in ended if outcome.error is not None]
    if on_failure == "continue" or not failures:
        return results
    first = min(failures, key=_consequence)
    error = first.error
    assert error is not None
    if isinstance(error, SystemExit | KeyboardInterrupt):
        # Raised here unchanged, it would silently end the caller, which did not ask for that.
        error = PeerLostError(f"rank {first.rank} of {size} ended by {type(error).__name__}({error})", peer=first.rank)
    if not isinstance(error, CommError) or error.rank is None:
        error.add_note(f"raised on rank {first.rank} of {size}")
    if first.trace is not None:
        raise error from RankTracebackError(first.trace)
    raise error


def _consequence(outcome: Outcome) -> int:
    """0 for a rank that ended unheard, 1 for an error of its own, 2 for one that tells of another rank."""
    if outcome.trace is None:
        return 0
    return 2 if isinstance(outcome.error, PeerLostError | AbortedError) else 1
