"""Life of a communicator: the thread that owns it, its failure by `abort`, and its end by `close`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from unisono.comm.base import CommunicatorBase
from unisono.comm.state import ANY_THREAD
from unisono.comm.teardown import CLOSE_S
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["LifecycleMixin"]


class LifecycleMixin(CommunicatorBase):
    """Ownership by a thread, abort and close.

    Attributes:
        _parts: Communicators made by `split`, while they have other references.
        _successor: The communicator that `rebuild` made of this one.
    """

    _control: ControlPlane
    _before_close: list[Callable[[], None]]
    _parts: list[weakref.ref[Any]]
    _successor: Any

    def release_thread(self) -> None:
        """Release the communicator from its thread: the next thread that uses it owns it.

        Raises:
            CommError: Another thread owns it.

        Example:
            >>> from threading import Thread
            >>> with un.init() as comm:
            ...     comm.barrier()
            ...     comm.release_thread()
            ...     worker = Thread(target=comm.barrier)
            ...     worker.start()
            ...     worker.join()
        """
        self._engine.own("release_thread")
        self._engine.owner = None
        self._engine.activity.owner = 0

    def allow_any_thread(self) -> None:
        """Allow every thread to use it from now on. The caller ensures that only one is in a collective at a time.

        Raises:
            CommError: Another thread owns it.

        Example:
            >>> from threading import Thread
            >>> with un.init() as comm:
            ...     comm.allow_any_thread()
            ...     comm.barrier()
            ...     worker = Thread(target=comm.barrier)
            ...     worker.start()
            ...     worker.join()
        """
        self._engine.own("allow_any_thread")
        self._engine.owner = ANY_THREAD

    def abort(self, reason: str = "the program asked for it") -> None:
        """End every wait on every rank with `AbortedError`, and break the communicator. Callable from any thread.

        Args:
            reason: Part of the error's text on every rank.

        Example:
            >>> def program(comm):
            ...     if comm.rank == 0:
            ...         comm.abort("no more data")
            ...     comm.barrier()
            >>> errors = un.launch(program, 2, "thread", on_failure="continue")
            >>> [type(error).__name__ for error in errors], "no more data" in str(errors[1])
            (['AbortedError', 'AbortedError'], True)
        """
        if not self._engine.closed:
            cause = Cause("AbortedError", self.rank, f"rank {self.rank} aborted the communicator: {reason}")
            self._engine.on_failure(self._control.report_failure(self._engine.group, cause))

    def close(self) -> None:
        """Release all resources, also those of sub-communicators. Every rank calls it when it is done. Idempotent.

        Waits up to a second for the other ranks, so that nothing in flight is cut off; and before that, for background
        saves, which end immediately if the communicator is broken. The error of one that has failed is raised at the
        end. A communicator without references to it, its
        sub-communicators or its unfinished works is closed in the background.

        Example:
            >>> comm = un.init()
            >>> comm.close()
        """
        try:
            if self._successor is not None or not self._engine.closed:
                self._finish()
        finally:
            if self._successor is not None:
                for part in self._open_parts():
                    part._close(0.0)
                self._successor.close()
            if not self._engine.closed:
                self._close(CLOSE_S)

    def before_close(self, action: Callable[[], None]) -> None:
        """Register an action for the start of `close`, while calls still work. The last one runs first.

        It does not run if the communicator is dropped without `close`. After a `rebuild`, the new communicator runs
        it.

        Args:
            action: Called without arguments, for instance to wait for background work that uses the communicator.

        Example:
            >>> comm = un.init()
            >>> comm.before_close(lambda: print("rank", comm.rank, "closes"))
            >>> comm.after_close(lambda: print("closed"))
            >>> comm.close()
            rank 0 closes
            closed
        """
        self._before_close.append(action)

    def after_close(self, action: Callable[[], None]) -> None:
        """Register an action for the end of `close`, to release resources. Actions run in the order registered.

        It also runs, in another thread, when the communicator is dropped without `close`; so it must not refer to the
        communicator. After a `rebuild`, the new communicator runs it.

        Args:
            action: Called without arguments.
        """
        self._engine.ending.closers.append(action)

    def _finish(self) -> None:
        """Wait for background users to finish, while the communicator still works."""
        if self._successor is not None:
            self._successor._finish()
        while self._before_close:
            self._before_close.pop()()
        for part in self._open_parts():
            part._finish()

    def _close(self, patience: float) -> None:
        self._engine.close(patience)
        for part in self._open_parts():
            part._close(0.0)
        self._engine.ending.finish()

    def _fail(self, error: BaseException) -> None:
        """Report this rank's error to the ranks that wait for it, also in the sub-communicators."""
        if self._successor is not None:
            self._successor._fail(error)
            return
        self._engine.report_failure(error, None)
        for part in self._open_parts():
            part._fail(error)
        self._engine.ending.fail(error)

    def _open_parts(self) -> list[Self]:
        return [part for ref in self._parts if (part := ref()) is not None and not part._engine.closed]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        try:
            self.close()
        except Exception:
            # Of a background save; it does not replace the error that ends the program.
            if error is None:
                raise
