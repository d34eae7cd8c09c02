"""Ranks of a script on this host: start them, pass their output on line by line, end all when one fails."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from unisono.core.failure import ended_by
from unisono.host import numa
from unisono.host.cpu_count import cores

__all__ = ["ScriptJob", "ScriptResult", "run_script"]

_GRACE_S = 5.0
_END_S = 5.0
_COLOURS = (36, 33, 32, 35, 34, 31)
_CONSEQUENCES = ("PeerLostError", "AbortedError")


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A script, and where its ranks run.

    Attributes:
        command: Arguments of Python: a file or "-m" and a module, then the script's own arguments.
        ranks: Number of ranks on this host.
        host: Index of this host among all hosts.
        hosts: Number of hosts, each with as many ranks.
        address: Address of the first host.
        port: Where rank 0 listens, for torch too at the port after it; free ports if None.
        backend: What `init` uses where a program passes none; None for its own choice.
        binding: Which processors a rank may use; see `unisono.host.numa.placement`.
        prefix: Whether each line of output begins with its rank.
        to_stderr: Whether the ranks' standard output goes to standard error too.
    """

    command: Sequence[str]
    ranks: int
    host: int = 0
    hosts: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    backend: str | None = None
    binding: numa.Binding = "none"
    prefix: bool = True
    to_stderr: bool = False

    def environment(self, local_rank: int, ports: tuple[int, int], attempt: int, folder: str) -> dict[str, str]:
        """Return the variables of one rank: torchrun's, and the port of this library beside torch's."""
        places = {
            "RANK": self.host * self.ranks + local_rank,
            "WORLD_SIZE": self.hosts * self.ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": self.host,
            "MASTER_ADDR": self.address,
            "UNISONO_PORT": ports[0],
            "MASTER_PORT": ports[1],
            "UNISONO_RESTARTS": attempt,
            "UNISONO_ERROR_FILE": f"{folder}/{local_rank}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or max(1, cores() // self.ranks),
            "PYTHONUNBUFFERED": 1,
        }
        chosen = {} if self.backend is None else {"UNISONO_BACKEND": self.backend}
        if self.binding != "none":
            chosen[numa.BOUND] = numa.shown(numa.placement(self.ranks, self.binding)[local_rank])
        return {**os.environ, **{name: str(value) for name, value in places.items()}, **chosen}


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """The end of a script's ranks.

    Attributes:
        status: 0, or the exit status of the rank that failed first: 128 and the signal's number if a signal ended it.
            With "continue", 0 if any rank has ended well.
        first: The rank that failed first; None if none did.
        ranks: Exit status of each rank of this host, by rank; negative if a signal ended it.
        restarts: How often all ranks were started again.
    """

    status: int
    first: int | None
    ranks: dict[int, int]
    restarts: int


def run_script(job: ScriptJob, restarts: int = 0, on_failure: str = "end") -> ScriptResult:
    """Run a script's ranks to their end, again after a failure.

    Standard output and error of the ranks are passed on line by line. When a rank fails, the others may end by their
    own error for 5 s, then they are ended, and the first failure is printed; failures that follow from it are counted.

    Args:
        job: The script, and its ranks.
        restarts: How often all ranks are started again after a failure.
        on_failure: "continue" lets the others go on after a failure, which is printed immediately.
    """
    for attempt in range(restarts + 1):
        attempted = _Attempt(job, attempt, on_failure)
        status = attempted.run()
        if not status or attempted.interrupted:
            break
        if attempt < restarts:
            _print_error(f"unisono run: start all ranks again ({attempt + 1} of {restarts} restarts)\n")
    return ScriptResult(status, attempted.first, attempted.statuses, attempt)


class _Attempt:
    """One start of all ranks."""

    def __init__(self, job: ScriptJob, number: int, on_failure: str) -> None:
        self._job, self._number, self._continues = job, number, on_failure == "continue"
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._failures: list[tuple[int, int]] = []
        self._readers: list[threading.Thread] = []
        self._writing = threading.Lock()
        self.interrupted = False
        self.first: int | None = None
        self.statuses: dict[int, int] = {}

    def run(self) -> int:
        """Start the ranks, wait for their end, and return the exit status."""
        # A rank notices by the end of this pipe that its launcher is gone.
        alive, held = os.pipe()
        with tempfile.TemporaryDirectory(prefix="unisono-run-") as folder:
            ports = (self._job.port, self._job.port + 1) if self._job.port else _free_ports()
            ranks: list[subprocess.Popen[bytes]] = []
            try:
                with _interrupts_blocked():
                    ranks.extend(self._start(rank, ports, folder, alive) for rank in range(self._job.ranks))
                    os.close(alive)
                self._wait(ranks, folder)
            except KeyboardInterrupt:
                self.interrupted = True
                self._end(ranks, signal.SIGINT)
                return 128 + signal.SIGINT
            finally:
                self._end(ranks, signal.SIGTERM)
                os.close(held)
                for reader in self._readers:
                    reader.join(_END_S)
                before = self._job.host * self._job.ranks
                self.statuses = {before + rank: process.wait() for rank, process in enumerate(ranks)}
            return self._conclude(folder)

    def _start(self, rank: int, ports: tuple[int, int], folder: str, alive: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.launcher.script_rank", str(alive), *self._job.command],
            env=self._job.environment(rank, ports, self._number, folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(alive,),
            # An interrupt at the terminal is for the launcher, which passes it on.
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        number = self._job.host * self._job.ranks + rank
        output = sys.stderr if self._job.to_stderr else sys.stdout
        for source, target in ((process.stdout, output), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=self._pass_on, args=(number, source, target), daemon=True)
            reader.start()
            self._readers.append(reader)
        threading.Thread(target=lambda: self._ended.put((rank, process.wait())), daemon=True).start()
        return process

    def _pass_on(self, rank: int, source: IO[bytes], target: TextIO) -> None:
        """Copy a stream line by line, each in one write."""
        front = f"[{rank}] " if self._job.prefix else ""
        if front and target.isatty() and not os.environ.get("NO_COLOR"):
            front = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{front}\x1b[0m"
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                with self._writing:
                    target.write(f"{front}{text}\n")
                    target.flush()

    def _wait(self, ranks: list[subprocess.Popen[bytes]], folder: str) -> None:
        """Wait until all ranks have ended, or the grace after a failure is over."""
        deadline: float | None = None
        for _ in ranks:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                rank, status = self._ended.get(timeout=left)
            except queue.Empty:
                return
            if status:
                self._failures.append((rank, status))
                if self._continues:
                    self._print_failure(rank, status, _read_report(Path(folder) / str(rank)))
                else:
                    deadline = deadline or time.monotonic() + _GRACE_S

    def _end(self, ranks: list[subprocess.Popen[bytes]], how: signal.Signals) -> None:
        """End the ranks that still run, first by a signal."""
        running = [process for process in ranks if process.poll() is None]
        for process in running:
            process.send_signal(how)
        deadline = time.monotonic() + _END_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _conclude(self, folder: str) -> int:
        """Print the first failure, and return its exit status."""
        if not self._failures:
            return 0
        reports = {rank: _read_report(Path(folder) / str(rank)) for rank, _ in self._failures}

        def order(failure: tuple[int, int]) -> tuple[int, float]:
            """A rank that a signal ended comes first, then the earliest error that does not follow from another's."""
            report = reports[failure[0]]
            if report is None:
                return (0 if failure[1] < 0 else 1), 0.0
            return (2 if report["kind"] in _CONSEQUENCES else 1), float(report["time"])

        first, status = min(self._failures, key=order)
        self.first = self._job.host * self._job.ranks + first
        if not self._continues:
            self._print_failure(first, status, reports.pop(first))
            # Where the others missed a rank that ended unheard.
            witness = next((report for report in reports.values() if report), None)
            if status < 0 and witness:
                _print_error(witness["brief"])
            others = len(reports) - (status < 0 and witness is not None)
            if others:
                _print_error(f"({others} other {'rank' if others == 1 else 'ranks'} failed too)\n")
        if self._continues and len(self._failures) < self._job.ranks:
            return 0
        return 128 - status if status < 0 else status

    def _print_failure(self, rank: int, status: int, report: dict[str, Any] | None) -> None:
        number, world = self._job.host * self._job.ranks + rank, self._job.hosts * self._job.ranks
        how = ended_by(-status) if status < 0 else f"exited with status {status}"
        _print_error(report["text"] if report else f"[rank {number} of {world}] {how}\n")


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Defer interrupts of this thread. Ranks inherit this, and unblock them when they can end without a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_report(path: Path) -> dict[str, Any] | None:
    """Return what a rank wrote about its uncaught error, if it wrote it whole."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def _print_error(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
