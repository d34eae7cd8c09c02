"""Saves that go on while training does: one after another for each communicator, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.checkpoint.errors import CheckpointError
from unisono.errors import CommTimeoutError, MismatchError

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["SaveHandle", "begin", "finish_earlier"]

_log = logging.getLogger("unisono.checkpoint")


class SaveHandle:
    """A save under way, as `async_save` returns it.

    Attributes:
        path: Where it goes.

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
        self._thread = threading.Thread(target=self._run, name=f"unisono save {path}")
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._work is not None:
                self._work()
        except BaseException as error:
            self._error = error
            _log.error("saving %s failed: %s", self.path, error)
        finally:
            # The copy of the state goes with it.
            self._work = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint counts on all ranks, or raise why it does not.

        Args:
            timeout: Seconds; None is as long as it takes.

        Raises:
            CheckpointError, MismatchError, TypeError: As `save`.
            CommTimeoutError: It is still under way.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CommTimeoutError(f"the save of {self.path} is still under way after {timeout:g} s", waited_s=timeout)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error instead of raising it; None if the checkpoint counts."""
        try:
            self.wait(timeout)
        except BaseException as error:
            if error is self._error:
                return error
            raise
        return None


class _SaveQueue:
    """The saves of one communicator: they have a twin of it for themselves, and go one after another."""

    def __init__(self, comm: Communicator) -> None:
        self.twin = comm.dup()
        self.twin.allow_any_thread()
        self.last: SaveHandle | None = None
        comm.on_close(self._finish, first=True)

    def _finish(self) -> None:
        """Nobody closes a communicator to lose a checkpoint. Why it failed has been logged, and `wait` says it."""
        if self.last is not None:
            self.last.exception()


# What is under way belongs to a communicator, whose class knows nothing of checkpoints; without one, to a path.
_lanes: weakref.WeakKeyDictionary[Communicator, _SaveQueue] = weakref.WeakKeyDictionary()
_alone: dict[str, SaveHandle] = {}


def finish_earlier(path: str, comm: Communicator | None) -> None:
    """Wait for the save that is under way for this communicator, or to this path. Its error is its own."""
    lane = _lanes.get(comm) if comm is not None else None
    earlier = lane.last if lane is not None else _alone.pop(path, None) if comm is None else None
    if earlier is not None:
        earlier.exception()
        spoiled = not isinstance(earlier.exception(), CheckpointError | MismatchError | TypeError | ValueError | None)
        if comm is not None and spoiled:
            _lanes.pop(comm, None)


def begin(path: str, comm: Communicator | None, work: Callable[[Communicator | None], None]) -> SaveHandle:
    """Start `work` in a thread, with a communicator of its own. Collective when it is the first of a communicator."""
    if comm is None:
        for done in [known for known, earlier in _alone.items() if earlier.done()]:
            del _alone[done]
        _alone[path] = saving = SaveHandle(path, lambda: work(None))
        return saving
    if comm not in _lanes:
        _lanes[comm] = _SaveQueue(comm)
    lane = _lanes[comm]
    lane.last = SaveHandle(path, lambda: work(lane.twin))
    return lane.last
