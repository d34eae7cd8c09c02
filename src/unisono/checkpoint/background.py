"""Saves in the background of training: one after another for each communicator, each in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.checkpoint.errors import CheckpointError
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import AbortedError, CommTimeoutError, MismatchError, PeerLostError

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["SaveHandle", "begin", "finish_earlier", "raise_failed"]

_log = logging.getLogger("unisono.checkpoint")

# Saves in progress, and those whose error no caller has seen yet.
_open: set[SaveHandle] = set()


class SaveHandle:
    """A save in progress, as `async_save` returns it.

    Args:
        path: The checkpoint's path, for messages.
        work: The save, called in a thread that starts immediately.

    Attributes:
        path: The checkpoint's path.

    Example:
        >>> import tempfile
        >>> saving = un.checkpoint.async_save(tempfile.mkdtemp(), {"w": torch.ones(3)})
        >>> saving.wait()
        >>> saving.done(), saving.exception()
        (True, None)
    """

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path = path
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        _open.add(self)
        self._thread = threading.Thread(target=self._run, name=f"unisono save {path}")
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._work is not None:
                self._work()
            _open.discard(self)
        except BaseException as error:
            self._error = error
            _log.error("saving %s failed: %s", self.path, error)
        finally:
            # Frees the copy of the state.
            self._work = None

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the checkpoint is published on all ranks; raise the error if it is not.

        Args:
            timeout: Seconds or a `timedelta`; None waits without limit.

        Raises:
            CheckpointError, MismatchError, TypeError: As `save`.
            CommTimeoutError: The save is still in progress.
        """
        limit = None if timeout is None else resolve_timeout(timeout)
        self._thread.join(limit)
        if self._thread.is_alive():
            raise CommTimeoutError(f"the save of {self.path} is still running after {limit:g} s", waited_s=limit)
        _open.discard(self)
        if self._error is not None:
            raise self._error

    def _join(self) -> BaseException | None:
        """Wait, and return the error, which the caller does not see."""
        self._thread.join()
        return self._error

    def _unseen(self) -> BaseException | None:
        """Wait, and return the error if no caller has seen it; None for that of a rank that was lost, or of `abort`."""
        error = self._join()
        is_seen = self not in _open
        _open.discard(self)
        return None if is_seen or isinstance(error, PeerLostError | AbortedError) else error

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def exception(self, timeout: Timeout | None = None) -> BaseException | None:
        """Wait as `wait` does, but return the error of the save.

        Args:
            timeout: As for `wait`.

        Returns:
            The error; None if the checkpoint is published.

        Raises:
            CommTimeoutError: The save is still in progress.
        """
        try:
            self.wait(timeout)
        except BaseException as error:
            if error is self._error:
                return error
            raise
        return None


class _SaveQueue:
    """The saves of one communicator: they run one after another on a duplicate of it."""

    def __init__(self, comm: Communicator) -> None:
        self.twin = comm.dup()
        self.twin.allow_any_thread()
        self.last: SaveHandle | None = None
        comm.before_close(self._finish)

    def _finish(self) -> None:
        """Wait for the last save before the communicator closes, and raise its error."""
        if self.last is not None and (error := self.last._unseen()) is not None:
            raise error


# Saves in progress, by communicator: its class does not know of checkpoints.
_queues: weakref.WeakKeyDictionary[Communicator, _SaveQueue] = weakref.WeakKeyDictionary()
# Those of this process alone, by path: the next save to a path waits for the last.
_alone: dict[str, SaveHandle] = {}


def finish_earlier(path: str, comm: Communicator | None, *, raises: bool = True) -> None:
    """Wait for the save in progress on this communicator, or to this path, and raise its error if none has seen it."""
    queue = _queues.get(comm) if comm is not None else None
    earlier = queue.last if queue is not None else _alone.get(path) if comm is None else None
    if earlier is None:
        return
    error = earlier._join()
    if comm is not None and not isinstance(error, CheckpointError | MismatchError | TypeError | ValueError | None):
        _queues.pop(comm, None)
    if raises and (unseen := earlier._unseen()) is not None:
        raise unseen


@atexit.register
def raise_failed() -> None:
    """Wait for all saves of this process, and raise the error of one that no caller has seen. At exit it is printed."""
    for saving in [*_open]:
        if (error := saving._unseen()) is not None:
            raise error


def begin(path: str, comm: Communicator | None, work: Callable[[Communicator | None], None]) -> SaveHandle:
    """Start `work` in a thread, with a communicator of its own. The first call for a communicator is collective."""
    if comm is None:
        for done in [known for known, earlier in _alone.items() if earlier.done()]:
            del _alone[done]
        _alone[path] = saving = SaveHandle(path, lambda: work(None))
        return saving
    if comm not in _queues:
        _queues[comm] = _SaveQueue(comm)
    queue = _queues[comm]
    queue.last = SaveHandle(path, lambda: work(queue.twin))
    return queue.last
