"""Ranks that a pool starts for itself: this process is rank 0, the workers are ranks of `launch`."""

from __future__ import annotations

import queue
import secrets
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.communicator import Communicator
from unisono.errors import PeerLostError
from unisono.host.network import why_no_shm
from unisono.launcher.api import init, launch
from unisono.pool.worker import Worker
from unisono.transports.hierarchical import transport_named

__all__ = ["OwnRanks"]


class OwnRanks:
    """Workers of this pool alone, which end with it.

    Args:
        size: Number of workers.
        backend: A transport's name.
        initialize: Called on each worker before its first task.

    Attributes:
        rank: Part of rank 0.
    """

    def __init__(self, size: int, backend: str, initialize: Callable[[], object] | None) -> None:
        if backend == "auto":
            backend = "shm" if why_no_shm() is None else "gloo"
        kind = transport_named(backend)
        if kind.simulated or kind.launcher == "mpirun":
            raise ValueError(
                f"a pool cannot start ranks of backend {backend!r} itself: pass it the communicator of ranks that are "
                "running, as in Pool(comm)"
            )
        self._begun: queue.SimpleQueue[Worker | BaseException] = queue.SimpleQueue()
        self._over = threading.Event()
        if kind.in_process:
            lives: list[Callable[[], object]] = [lambda: launch(self._be, size + 1, backend, (initialize,))]
        else:
            folder = tempfile.TemporaryDirectory(prefix="unisono-pool-")
            address = f"file://{Path(folder.name) / 'meeting'}", size + 1, secrets.token_hex(32), backend
            lives = [lambda: self._start(size, backend, (address, initialize)), lambda: self._lead(folder, address)]
        self._threads = [threading.Thread(target=self._live, args=(life,), daemon=True) for life in lives]
        for thread in self._threads:
            thread.start()
        first = self._begun.get()
        if isinstance(first, BaseException):
            self._over.set()
            raise first
        self.rank = first

    def close(self) -> None:
        """Return when the workers have ended, and the communicator is closed."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _live(self, life: Callable[[], object]) -> None:
        try:
            life()
        except BaseException as error:
            # Once the pool has begun, nothing reads it: whatever ends a worker is an error of its tasks.
            self._begun.put(error)

    def _be(self, comm: Communicator, initialize: Callable[[], object] | None) -> None:
        """Be any rank, in a thread."""
        rank = Worker(comm, True, initialize)
        if comm.rank:
            return rank.serve()
        self._begun.put(rank)
        self._over.wait()

    def _start(self, size: int, backend: str, args: tuple[Any, ...]) -> None:
        """Start the processes, and outlive them."""
        ended: list[object] = launch(_serve, size, backend, args, on_failure="continue")
        failures = [end for end in ended if isinstance(end, BaseException)]
        raise failures[0] if failures else PeerLostError("the workers of the pool ended before they began")

    def _lead(self, folder: tempfile.TemporaryDirectory[str], address: tuple[str, int, str, str]) -> None:
        """Be rank 0 of the processes."""
        with folder, _join(0, *address) as comm:
            self._be(comm, None)


def _join(rank: int, meeting: str, size: int, secret: str, backend: str) -> Communicator:
    return init(backend, init_method=meeting, rank=rank, world_size=size, secret=secret, device="cpu")


def _serve(comm: Communicator, address: tuple[str, int, str, str], initialize: Callable[[], object] | None) -> None:
    """Be a worker, in a process."""
    with _join(comm.rank + 1, *address) as whole:
        Worker(whole, True, initialize).serve()
