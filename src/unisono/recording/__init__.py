"""Record what a rank receives, and run it again alone, without its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unisono.communicator import Communicator, engine_of
from unisono.recording import replayer
from unisono.recording.recorder import Recording
from unisono.recording.recorder import begin as begin_recording

__all__ = ["Recording", "record", "replay"]

T = TypeVar("T")


def record(folder: str | Path, comm: Communicator, *, steps: int | None = None) -> Recording:
    """Record what this rank receives from now on, so that `replay` can run it again alone.

    Provisional: it may change in any minor version, without a deprecation.

    Call it right after `init`, before a checkpoint is loaded: a replay runs the program from its beginning, and loads
    the same checkpoint again. Ranks need not all record. Kept are the results of collectives, received messages, from
    which rank a receive from any rank was, what a work answered to `is_completed` and when its future completed,
    replies of the control plane, errors, the states of the global random generators now, and a digest of all that this
    rank sends.

    Args:
        folder: Where to; each rank writes a file of its own, which must not exist. No other rank reads it.
        comm: The communicator; communicators that are made of it from now on are recorded too.
        steps: Ends the recording after so many steps of optimizers in this thread; None for no end but `close`, the
            communicator's end and that of the process.

    Returns: The recording; a context manager that ends it. In a replay it does nothing.

    Raises:
        ValueError: The communicator has made calls, or communicators were made of it; `steps` is not positive.
        TypeError: `comm` is no communicator.
        FileExistsError: The folder holds a recording of this rank.

    Cost: writing the bytes that this rank receives, and hashing those that it sends. Calls take no fast path.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> def program(comm):
        ...     with un.record(folder, comm):
        ...         total = comm.rank + torch.ones(2)
        ...         comm.all_reduce(total)
        ...     return total.tolist()
        >>> un.launch(program, 3, "thread")[1], un.replay(folder, 1, program)
        ([6.0, 6.0], [6.0, 6.0])
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, or None, not {steps}")
    if not isinstance(comm, Communicator):
        raise TypeError(f"record takes a folder and a Communicator, not a {type(comm).__name__}")
    engine = engine_of(comm)
    if engine.ending.left() or engine.activity.calls or engine.activity.messages:
        raise ValueError(
            "this communicator has made calls, or communicators were made of it: call record right after init, because "
            "a replay knows only what comes after it"
        )
    if replayer.begin(comm):
        return Recording(None)
    return begin_recording(folder, comm, steps)


def replay(
    folder: str | Path, rank: int, program: Callable[..., T], args: Sequence[Any] = (), **kwargs: Any
) -> T | None:
    """Run `program(comm, *args, **kwargs)` as one recorded rank, alone in this process, and return its result.

    Provisional: it may change in any minor version, without a deprecation.

    The program calls `record` where it called it then, which begins the replay: from there on it receives what it
    received then. A script is replayed by `unisono replay`.

    Args:
        folder: As of `record`.
        rank: The rank's number in the first group of the job.
        program, args, kwargs: As for `launch`.

    Returns: What the program returns; None if the recording ends before the program does.

    Raises:
        MismatchError: The first call that is not as recorded: another operation, tensor or peer, or other bytes sent.
        FileNotFoundError: The rank was not recorded.
        ValueError: The file is not one of a recording, or the program has not called `record`.

    Example: see `record`.
    """
    return replayer.RankReplay(folder, rank).run(program, args, kwargs)
