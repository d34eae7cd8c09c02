"""Processes of a pool, as seen by the driver that assigns their work."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from unisono.errors import CommError, PeerLostError
from unisono.launcher.api import launch
from unisono.launcher.job import GRACE_S, Outcome, first_failure, reported
from unisono.testing import pool_worker
from unisono.testing.pool_threads import LIBRARY, overdue, where
from unisono.testing.pool_worker import PoolWorker, serve

__all__ = ["PoolProcesses"]

_DUMP_S = 0.5
_LEAVE_S = 10.0


class PoolProcesses:
    """Running ranks, each of which waits for programs on its own connection.

    The constructor starts the ranks. They end on `close`, or when this process ends.
    """

    def __init__(self, size: int, backend: str, options: dict[str, Any]) -> None:
        self._size, self._failures = size, 0
        self._connected: set[tuple[int, int]] = set()
        self._links: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._ends: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-pool-")
        service = PoolWorker(str(Path(self._folder.name) / "pool"), secrets.token_bytes(32), self._folder.name)
        arguments = {"args": (service,), **options}
        self._thread = threading.Thread(target=self._live, args=(service, backend, arguments), daemon=True)
        try:
            with Listener(service.address, authkey=service.key) as listener:
                self._thread.start()
                while len(self._links) < size and self._admit(listener):
                    pass
        except BaseException:
            self.close()
            raise
        if len(self._links) < size:
            self.close()
            raise next(end for end in self._ends if isinstance(end, BaseException))

    def _live(self, service: PoolWorker, backend: str, arguments: dict[str, Any]) -> None:
        """Run the ranks from start to end, in a separate thread."""
        try:
            self._ends = launch(serve, self._size, backend, on_failure="continue", **arguments)
        except BaseException as error:
            self._ends = [error] * self._size
        # Wake the accepting thread, in case the ranks ended before they connected.
        with suppress(OSError), Client(service.address, authkey=service.key) as link:
            link.send(None)

    def _admit(self, listener: Listener) -> bool:
        """Accept one connection; return False if the ranks have ended instead."""
        try:
            link = listener.accept()
            card = link.recv()
        except (AuthenticationError, EOFError):
            return True
        if card is None:
            link.close()
            return False
        rank, self._pids[rank] = card
        self._links[rank] = link
        return True

    def run(self, program: bytes, size: int, limit_s: float, on_failure: str) -> tuple[list[Outcome], bool]:
        """Return the outcomes of the first `size` ranks, in order of completion, and whether they are still usable.

        If they are not, they have been closed. After an error of the program itself they are usable.
        """
        ended: list[Outcome] = []
        pending = dict(enumerate(self._send(program, size)))
        try:
            broken = self._collect(pending, ended, limit_s, on_failure)
        except BaseException as error:
            error.add_note(where(self._stop(list(pending))))
            raise
        if pending:
            late = overdue(limit_s, self._stop(list(pending)))
            return [*ended, *(Outcome(rank, error=late) for rank in pending)], False
        failed = any(outcome.error is not None for outcome in ended)
        self._failures += failed
        if not isinstance(first_failure(ended).error, CommError) if failed else not broken:
            return ended, True
        self.close()
        for outcome in ended:
            # The cause of death is known only after the process has ended.
            if isinstance(outcome.error, PeerLostError) and not outcome.reported:
                outcome.error = self._ends[outcome.rank] or outcome.error
        return ended, False

    def _send(self, program: bytes, size: int) -> list[Connection]:
        """Send a program to the first `size` ranks; return their connections."""
        key = size, self._failures
        # Creating the communicator of the first `size` ranks needs all ranks: once, and again after a failure.
        called = size if key in self._connected else self._size
        self._connected.add(key)
        for rank in range(called):
            self._links[rank].send_bytes(pickle.dumps((*key, program)))
        return [self._links[rank] for rank in range(size)]

    def _collect(self, pending: dict[int, Connection], ended: list[Outcome], limit_s: float, on_failure: str) -> bool:
        """Move ranks from `pending` to `ended` until the time is over; return whether a communicator is broken."""
        deadline, broken = time.monotonic() + limit_s, False
        while pending:
            ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, link in pending.items() if link in ready]:
                outcome, whole = self._hear(rank, pending.pop(rank))
                ended.append(outcome)
                broken = broken or not whole
                if outcome.error is not None and on_failure == "end":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return broken

    def _hear(self, rank: int, link: Connection[Any, Any]) -> tuple[Outcome, bool]:
        try:
            data, whole = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            lost = PeerLostError(f"rank {rank} ended before it could answer", peer=rank)
            return Outcome(rank, error=lost, reported=False), False
        return reported(rank, data), whole

    def _stop(self, ranks: list[int]) -> dict[int, str]:
        """End all ranks; return the stacks of some."""
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_DUMP_S)
        stacks = {rank: _shown((Path(self._folder.name) / f"stacks-{rank}").read_text()) for rank in ranks}
        self._kill()
        self.close()
        return stacks

    def close(self) -> None:
        """Disconnect the ranks, and wait until they have ended."""
        for link in self._links.values():
            link.close()
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(_LEAVE_S)
        self._folder.cleanup()

    def _kill(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _shown(dump: str) -> str:
    """Return the frames of the program in a dump of all threads, without those of the library."""
    for thread in dump.split("\n\n"):
        above, found, _ = thread.partition(f'File "{pool_worker.__file__}"')
        if found:
            return "\n".join(line for line in reversed(above.splitlines()) if 'File "' in line and LIBRARY not in line)
    return dump
