"""Abort of an mpirun job when a rank ends too early: the others would wait for it in MPI without limit."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from unisono.bootstrap.result import Rendezvous
from unisono.control.process_exit import close_all
from unisono.errors import AbortedError, PeerLostError
from unisono.host.mpi_library import has_ulfm

__all__ = ["MpiAbortGuard", "job_end"]

_GRACE_S = 2.0


def job_end(mpi: Any, rank: int, size: int) -> MpiAbortGuard:
    """Install hooks that end the job with this process: after an uncaught exception, or `sys.exit(3)`."""
    known = getattr(sys.excepthook, "__self__", None)
    if isinstance(known, MpiAbortGuard):
        return known
    made = MpiAbortGuard(mpi, rank, size)
    sys.excepthook, sys.exit = made.fail, made.leave
    return made


class MpiAbortGuard:
    """Replacement of `sys.excepthook` and `sys.exit`.

    Args:
        mpi: The module.
        rank, size: In MPI's world.
    """

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi, self._who = mpi, f"rank {rank} of {size}"
        self._process, self._open = os.getpid(), 0
        self._excepthook = sys.excepthook

    def await_closing(self, rendezvous: Rendezvous) -> None:
        """Record that other ranks may wait for this process until `rendezvous` is closed."""
        release = rendezvous.release
        self._open += 1

        def close() -> None:
            self._open -= 1
            release()

        rendezvous.release = close

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report as `sys.excepthook` does; then end the job."""
        if self._over():
            self._excepthook(kind, error, trace)
            return
        if isinstance(error, PeerLostError | AbortedError):
            # Another rank's failure is the cause; that rank reports it, and ends the job, first.
            self._excepthook(kind, error, trace)
            time.sleep(_GRACE_S)
            sys.stderr.write(f"{self._who} ends the job\n")
        else:
            sys.stderr.write(f"{self._who} ends the job:\n")
            self._excepthook(kind, error, trace)
        self._end(1)

    def leave(self, status: Any = None, /) -> NoReturn:
        """Exit as `sys.exit` does. If this is not caught, and communicators were open at the call, the job ends too."""
        raise SystemExit(status) if status in (None, 0) or not self._open else _Exit(status, self._uncaught)

    def _uncaught(self, status: object) -> None:
        if not self._over():
            sys.stderr.write(f"{self._who} ends the job by sys.exit({status!r})\n")
            # As Python sees it: whatever is no number has been printed, and means 1.
            self._end(status & 0xFF or 1 if isinstance(status, int) else 1)

    def _over(self) -> bool:
        # What was caught and kept is forgotten when the interpreter ends.
        return os.getpid() != self._process or sys.is_finalizing() or self._mpi.Is_finalized()

    def _end(self, status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if has_ulfm():
            # This rank alone ends, and the others are notified: ULFM was requested for that.
            close_all()
            os._exit(status)
        self._mpi.COMM_WORLD.Abort(status)


class _Exit(SystemExit):
    """Exit that notices when it ends the process: Python has no hook for it, but then drops it where no code runs."""

    def __init__(self, status: object, uncaught: Callable[[object], None]) -> None:
        super().__init__(status)
        self._uncaught = uncaught

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            self._uncaught(self.code)
