"""Job of a launched rank, and its outcome."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from tblib import pickling_support

from unisono.communicator import Check, Communicator
from unisono.core.control import ControlPlane
from unisono.core.failure import text_of
from unisono.core.group import Group
from unisono.core.staging import ACCELERATORS
from unisono.core.transport import Options, Transport
from unisono.errors import AbortedError, CommError, PeerLostError, UnavailableError
from unisono.launcher.supervisor import Outcome
from unisono.serialization.functions import dumps
from unisono.transports.hierarchical import Connectable

__all__ = [
    "Job",
    "check_chunk_bytes",
    "check_job",
    "conclude",
    "first_failure",
    "reported",
    "run_reported",
]

_SKIPS = frozenset({"Skipped", "SkipTest", "XFailed"})
"""Names of the exceptions with which pytest and unittest skip a test, or mark it as an expected failure."""
_SHOWN = 4
"""Maximum number of other ranks' errors whose first line is added to the raised error."""


@dataclass(slots=True)
class Job:
    """The program of every rank, and how its communicator is created."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    transport: Connectable
    options: Options
    check: Check
    wrap: Callable[[Transport], Transport] | None

    def run(self, group: Group, control: ControlPlane) -> Any:
        """Run one rank: connect, call the program, and notify the other ranks if it fails."""
        options = self.options_of(group.rank)
        transport = self.transport.connect(group, control, options)
        if self.wrap is not None:
            transport = self.wrap(transport)
        return self.call(Communicator(transport, control, options, check=self.check))

    def call(self, comm: Communicator) -> Any:
        """Call the program, notify the other ranks if it fails, and close the communicator."""
        with comm:
            return self.fn(comm, *self.args, **self.kwargs)

    def options_of(self, rank: int) -> Options:
        """Return the options of one rank, including the rank's GPU if the job uses GPUs."""
        options = self.options
        if options.device in ACCELERATORS:
            count = torch.get_device_module(options.device).device_count()
            if not count:
                raise UnavailableError(
                    f"device={options.device!r} needs a GPU for the ranks of backend {options.backend!r}, but torch "
                    "sees none; leave out device=, or use backend='gloo'"
                )
            options = replace(options, device=f"{options.device}:{rank % count}")
        return options


def check_job(
    fn: Callable[..., Any],
    nprocs: int,
    on_failure: str,
    chunk_bytes: int,
    choices: Sequence[str] = ("end", "continue"),
) -> None:
    """Raise `ValueError` or `TypeError` for an invalid argument of `launch` and `simulate`."""
    if not callable(fn):
        raise TypeError(f"fn must be a function that takes the communicator, not {type(fn).__name__}")
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a positive int, not {nprocs!r}")
    if on_failure not in choices:
        raise ValueError(f"on_failure must be {' or '.join(map(repr, choices))}, not {on_failure!r}")
    check_chunk_bytes(chunk_bytes)


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise `ValueError` for an invalid `chunk_bytes`."""
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be a positive int, not {chunk_bytes!r}")


def run_reported(rank: int, program: Callable[[], Any]) -> bytes:
    """Run a rank's program, and return its pickled outcome, which the launching process reads with `reported`."""
    try:
        message = ("result", _packed_result(program(), rank))
    except BaseException as error:
        message = ("error", _packed_error(error))
    return dumps(message)


def _packed_result(result: Any, rank: int) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank}, {type(result).__name__}, cannot be sent back ({error}); "
            "return numbers, strings, containers, tensors or None"
        ) from error


def _packed_error(error: BaseException) -> bytes:
    """Pickle an error with its traceback and causes, or, if it cannot be pickled, a `RuntimeError` with its text."""
    pickling_support.install(error)
    try:
        data = dumps(error)
        pickle.loads(data)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        return dumps(plain.with_traceback(error.__traceback__))
    return data


def reported(rank: int, data: bytes) -> Outcome:
    """Return the outcome that a rank's process has reported."""
    kind, content = pickle.loads(data)
    try:
        value = pickle.loads(content)
    except Exception as error:
        error.add_note(f"while reading the {kind} of rank {rank}")
        return Outcome(rank, error=error)
    return Outcome(rank, value) if kind == "result" else Outcome(rank, error=value)


def conclude(ended: Sequence[Outcome], size: int, on_failure: str) -> list[Any]:
    """Return the results by rank, or raise the first failure with its rank's traceback.

    Args:
        ended: Outcomes in the order in which ranks ended.
        size: Number of ranks.
        on_failure: With "end" and "replace", a failure is raised; with "continue", a failed rank's error is returned as
            its result.
    """
    results: list[Any] = [None] * size
    for outcome in ended:
        results[outcome.rank] = outcome.result if outcome.error is None else outcome.error
    failures = [outcome for outcome in ended if outcome.error is not None]
    if on_failure == "continue" or not failures:
        return results
    first = first_failure(ended)
    error = first.error
    assert error is not None
    if isinstance(error, SystemExit | KeyboardInterrupt):
        # If SystemExit were raised unchanged, it would silently end the caller's process.
        error = PeerLostError(f"rank {first.rank} of {size} ended by {type(error).__name__}({error})", peer=first.rank)
    witness = next((outcome for outcome in failures if outcome.reported), None)
    if not first.reported and witness is not None and witness.error is not None:
        # A rank that died without reporting has no traceback; show one from a rank that noticed the loss.
        error.__traceback__ = witness.error.__traceback__
        error.add_note(f"noticed by rank {witness.rank} of {size}")
    elif not isinstance(error, CommError) or error.rank is None:
        error.add_note(f"raised on rank {first.rank} of {size}")
    for note in _notes_on_others([outcome for outcome in failures if outcome is not first], text_of(error)):
        error.add_note(note)
    raise error


def _notes_on_others(failures: Sequence[Outcome], shown: str) -> list[str]:
    """Return the first lines of other ranks' own errors if they differ from `shown`, and a count of failures."""
    if not failures:
        return []
    notes: list[str] = []
    for outcome in sorted(failures, key=attrgetter("rank")):
        error = outcome.error
        # Show other ranks' errors if their first lines differ, for example because an assertion failed with different
        # values. Omit every `CommError`, because it is a consequence of another rank's error.
        if error is not None and not isinstance(error, CommError):
            line = text_of(error).partition("\n")[0]
            if line != shown.partition("\n")[0] and len(notes) < _SHOWN:
                notes.append(f"rank {outcome.rank}: {type(error).__name__}: {line}")
    others = Counter(type(outcome.error).__name__ for outcome in failures)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(others.items()))
    ranks = "rank" if len(failures) == 1 else "ranks"
    return [*notes, f"({len(failures)} other {ranks} failed too: {listed})"]


def first_failure(ended: Sequence[Outcome]) -> Outcome:
    """Return the failure that most likely caused all others."""
    return min((outcome for outcome in ended if outcome.error is not None), key=_consequence)


def _consequence(outcome: Outcome) -> int:
    """Return 0 for a death without a report, 1 for a rank's own error, 2 for a skip, 3 for another rank's failure."""
    if not outcome.reported:
        return 0
    if isinstance(outcome.error, PeerLostError | AbortedError):
        return 3
    # A rank that skips a test or fails as expected must not hide a failure on another rank.
    return 2 if type(outcome.error).__name__ in _SKIPS else 1
