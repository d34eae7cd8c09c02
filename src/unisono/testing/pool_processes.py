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
from typing import Any, cast

import cloudpickle

from unisono.errors import CommTimeoutError, PeerLostError
from unisono.launcher.api import launch
from unisono.launcher.job import Outcome, reported
from unisono.testing.pool_worker import PoolWorker, serve

__all__ = ["PoolProcesses"]

_DUMP_S = 0.5
_LEAVE_S = 10.0


class PoolProcesses:
    """Running ranks, each of which waits for programs on its own connection.

    The constructor starts the ranks. They end on `close`, or when this process ends.
    """

    def __init__(self, size: int, backend: str, options: dict[str, Any]) -> None:
        self._size, self._sizes = size, {size}
        self._links: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._ends: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-pool-")
        service = PoolWorker(str(Path(self._folder.name) / "pool"), secrets.token_bytes(32), self._folder.name)
        arguments = {"args": (service,), **options}
        self._thread = threading.Thread(target=self._live, args=(service, backend, arguments), daemon=True)
        with Listener(service.address, authkey=service.key) as listener:
            self._thread.start()
            while len(self._links) < size and self._admit(listener):
                pass
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

    def run(self, program: bytes, size: int, limit_s: float) -> tuple[list[Outcome], bool]:
        """Return the outcomes of the first `size` ranks, in order of completion, and whether they are still usable.

        If they are not, they have been closed.
        """
        # Creating the communicator of the first `size` ranks needs all ranks, once.
        called = self._links.values() if size not in self._sizes else [self._links[rank] for rank in range(size)]
        self._sizes.add(size)
        for link in called:
            link.send_bytes(cloudpickle.dumps((size, program)))
        left = {self._links[rank]: rank for rank in range(size)}
        deadline = time.monotonic() + limit_s
        ended: list[Outcome] = []
        usable = True
        while left:
            ready = wait(list(left), max(0.0, deadline - time.monotonic()))
            if not ready:
                return [*ended, *self._stop(list(left.values()), limit_s)], False
            for link in cast("list[Connection[Any, Any]]", ready):
                outcome, whole = self._hear(left.pop(link), link)
                ended.append(outcome)
                usable = usable and whole
        if not usable:
            self.close()
            for outcome in ended:
                # The cause of death is known only after the process has ended.
                if isinstance(outcome.error, PeerLostError) and not outcome.reported:
                    outcome.error = self._ends[outcome.rank] or outcome.error
        return ended, usable

    def _hear(self, rank: int, link: Connection[Any, Any]) -> tuple[Outcome, bool]:
        try:
            data, whole = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            lost = PeerLostError(f"rank {rank} ended before it could answer", peer=rank)
            return Outcome(rank, error=lost, reported=False), False
        return reported(rank, data), whole

    def _stop(self, ranks: list[int], limit_s: float) -> list[Outcome]:
        """End all ranks; return the outcomes of those that did not complete, with their stacks."""
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_DUMP_S)
        stacks = {rank: (Path(self._folder.name) / f"stacks-{rank}").read_text() for rank in ranks}
        self._kill()
        self.close()
        return [
            Outcome(
                rank,
                error=CommTimeoutError(
                    f"the program did not end within {limit_s:g} s on rank {rank}, and was ended. Its stack:\n{stack}"
                ),
            )
            for rank, stack in stacks.items()
        ]

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
