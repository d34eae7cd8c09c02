"""Records everything that a rank receives, and replays the rank alone, without its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unisono.communicator import Communicator, engine_of
from unisono.recording.recorder import Recording
from unisono.recording.recorder import begin as begin_recording
from unisono.recording.replayer import RankReplay, ReplayTransport

__all__ = ["Recording", "record", "replay"]

T = TypeVar("T")


def record(folder: str | Path, comm: Communicator, *, steps: int | None = None) -> Recording:
    """Record everything that this rank receives from now on, so that `replay` can rerun this rank alone.

    Provisional: it may change in any minor version, without a deprecation.

    Call `record` right after `init`, before loading a checkpoint: a replay runs the program from its beginning and
    loads the same checkpoint. Not all ranks need to record. The recording contains the results of collectives, received
    messages, the sender of each any-source receive, the return values of `is_completed`, the order in which futures
    complete, replies from the control plane, errors, the initial states of the global random generators, and a digest
    of everything that this rank sends.

    Args:
        folder: Folder in which each rank creates its own file, which must not exist yet. Ranks need not share the
            folder.
        comm: The communicator to record. Communicators that are later derived from `comm` are also recorded.
        steps: Number of optimizer steps in this thread after which the recording ends. If None, the recording ends when
            it or the communicator is closed, or when the process exits.

    Returns: The recording, which can be used as a context manager that ends the recording on exit. In a replay, the
    returned object does nothing.

    Raises:
        ValueError: The communicator has already been used, or communicators were derived from it, or `steps` is not
            positive.
        TypeError: `comm` is not a communicator.
        FileExistsError: The folder already contains a recording of this rank.

    Cost: all bytes that this rank receives are written to the file, and all bytes that it sends are hashed. During the
    recording, collectives don't use the native fast path.

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
    if isinstance(engine.transport, ReplayTransport):
        engine.transport.replay.begin()
        return Recording(None)
    return begin_recording(folder, comm, steps)


def replay(
    folder: str | Path, rank: int, program: Callable[..., T], args: Sequence[Any] = (), **kwargs: Any
) -> T | None:
    """Run `program(comm, *args, **kwargs)` as a recorded rank, alone in this process, and return its result.

    Provisional: it may change in any minor version, without a deprecation.

    The program must call `record` at the same point as in the recorded run; from then on, the program receives the
    recorded data. To replay a script, use `unisono replay`.

    Args:
        folder: Folder that was passed to `record`.
        rank: The recorded rank's number in the job's initial group.
        program, args, kwargs: As for `launch`.

    Returns: The program's result; None if the recording ends before the program does.

    Raises:
        MismatchError: A call differs from the recorded call in operation, tensor, peer or sent bytes.
        FileNotFoundError: The rank was not recorded.
        ValueError: The file is not a recording, or the program has not called `record`.

    Example: see `record`.
    """
    return RankReplay(folder, rank).run(program, args, kwargs)
