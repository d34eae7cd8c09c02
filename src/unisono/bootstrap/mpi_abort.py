"""Under mpirun, what ends one rank too early ends the job: the others would wait for it in MPI for ever."""

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
    """What ends the job from now on with this process: an exception that nobody catches, or `sys.exit(3)`."""
    known = getattr(sys.excepthook, "__self__", None)
    if isinstance(known, MpiAbortGuard):
        return known
    made = MpiAbortGuard(mpi, rank, size)
    sys.excepthook, sys.exit = made.fail, made.leave
    return made


class MpiAbortGuard:
    """Stands in for `sys.excepthook` and `sys.exit`.

    Args:
        mpi: The module.
        rank, size: In MPI's world.
    """

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi, self._who = mpi, f"rank {rank} of {size}"
        self._process, self._open = os.getpid(), 0
        self._excepthook = sys.excepthook

    def await_closing(self, place: Rendezvous) -> None:
        """Until this one is closed, other ranks may wait for this process."""
        let_go = place.let_go
        self._open += 1

        def close() -> None:
            self._open -= 1
            let_go()

        place.let_go = close

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """As `sys.excepthook`; then the job ends."""
        if self._over():
            self._excepthook(kind, error, trace)
            return
        if isinstance(error, PeerLostError | AbortedError):
            # Another rank's failure is the cause; that rank tells, and ends the job, first.
            sys.stderr.write(f"{self._who}: {error.message}\n")
            sys.stderr.flush()
            time.sleep(_GRACE_S)
        sys.stderr.write(f"{self._who} ends the job:\n")
        self._excepthook(kind, error, trace)
        self._end(1)

    def leave(self, status: Any = None, /) -> NoReturn:
        """As `sys.exit`. If nobody catches it, and communicators were open at the call, the job ends too."""
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
            # This rank alone ends, and the others learn of it: that is what was asked for.
            close_all()
            os._exit(status)
        self._mpi.COMM_WORLD.Abort(status)


class _Exit(SystemExit):
    """Python tells nobody that it ends by this. But it then forgets it where no code runs any more."""

    def __init__(self, status: object, uncaught: Callable[[object], None]) -> None:
        super().__init__(status)
        self._uncaught = uncaught

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            self._uncaught(self.code)
