"""Runs a script's ranks on this and other hosts: forwards output and signals, and ends all ranks when one fails."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from unisono.core.failure import ended_by
from unisono.core.step_boundaries import STOPPED_SAVED, STOPPED_UNSAVED
from unisono.launcher.local_host import LocalHost
from unisono.launcher.remote_host import RemoteHost, Shell
from unisono.launcher.script_job import Report, ScriptJob
from unisono.launcher.supervisor import SCRIPT_GRACE_S, Outcome, Supervisor

__all__ = ["ScriptResult", "run_script"]

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_PIECES = re.compile(rb"\r\n|\r?[^\r\n]*\n|\r?[^\r\n]+|\r")
"""Splits output into parts that start a new line or, after a carriage return, overwrite a line."""
_COLOURS = (36, 33, 32, 35, 34, 31)
_ORDER = {"HostLostError": 0, "PeerLostError": 2, "AbortedError": 2}
"""Sort keys of errors, 1 by default: a host's loss may cause other errors; the last two result from other errors."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """Result of a script's ranks.

    Attributes:
        status: 0 if all ranks succeeded; otherwise, the exit status of the rank that failed first or, if a signal
            killed that rank or ended this launcher, 128 plus the signal's number. With `on_failure="continue"`, 0 if
            any rank succeeded. If ranks stopped on request (`un.stop.exit_status`) and none failed, 75 if all of the
            stopped ranks saved a checkpoint, else 74.
        first: The rank that failed first; None if no rank failed.
        ranks: Exit status of each rank that this launcher started; negative if a signal killed the rank.
        restarts: Number of times that all ranks were restarted.
    """

    status: int
    first: int | None
    ranks: dict[int, int]
    restarts: int


def run_script(
    jobs: Sequence[ScriptJob], restarts: int = 0, on_failure: str = "end", shells: Mapping[int, Shell] | None = None
) -> ScriptResult:
    """Run a script's ranks to completion, restarting them after failures.

    The ranks' standard output and standard error are forwarded as they arrive. When a rank fails, all other ranks have
    5 s to fail with their own error, and are then killed. The first failure is printed, and the failures that follow
    from it are counted. Signals to this process are forwarded to the ranks. After SIGTERM, SIGHUP or SIGINT, ranks have
    a grace period to save a checkpoint and exit; a second signal ends the grace period. When ranks end, all processes
    that they have started are killed.

    Args:
        jobs: The script, and its ranks on each host.
        restarts: Maximum number of times to restart all ranks after a failure.
        on_failure: "end" ends all ranks after a failure; with "continue", the failure is printed immediately, and the
            other ranks continue.
        shells: Command prefixes for other hosts, by index in `jobs`; jobs without a prefix run on this host.
    """
    _open_standard_streams()
    for attempt in range(restarts + 1):
        attempted = _Attempt(jobs, shells or {}, attempt, on_failure)
        status = attempted.run()
        if status in (0, STOPPED_SAVED, STOPPED_UNSAVED) or attempted.signal is not None:
            break
        if attempt < restarts:
            _print_error(f"unisono run: start all ranks again ({attempt + 1} of {restarts} restarts)\n")
    return ScriptResult(status, attempted.first, attempted.statuses, attempt)


class _Attempt:
    """One attempt to run all ranks, from their start to their end."""

    def __init__(self, jobs: Sequence[ScriptJob], shells: Mapping[int, Shell], number: int, on_failure: str) -> None:
        self._job = jobs[0]
        self._continues = on_failure == "continue"
        ranks = [job.before + rank for job in jobs for rank in range(job.ranks)]
        # The supervisor does not start any ranks, because each host starts all of its ranks at once.
        self._supervisor = Supervisor(lambda rank, attempt: None, self._ends, ranks, on_failure, grace_s=SCRIPT_GRACE_S)
        self._size = self._job.size or self._job.ranks
        # Each item is the number of a rank that has ended and its exit status, or -1 and the number of a received
        # signal.
        self._events: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._failures: list[tuple[int, int]] = []
        self._reports: dict[int, Report | None] = {}
        self._writing = threading.Lock()
        # For each output whose last line is unfinished, the rank and the stream (1 or 2) that the line came from.
        self._lines: dict[TextIO | None, tuple[int, int]] = {}
        # Whether this launcher is terminating the ranks, in which case their exit statuses are not failures.
        self._ending = False
        self.signal: int | None = None
        self.first: int | None = None
        self.statuses: dict[int, int] = {}
        ports = (self._job.port, self._job.port + 1) if self._job.port else _free_ports()
        self._hosts: list[LocalHost | RemoteHost] = [
            RemoteHost(job, ports, number, self, shells[index])
            if index in shells
            else LocalHost(job, ports, number, self)
            for index, job in enumerate(jobs)
        ]

    def run(self) -> int:
        """Start the ranks, wait for them to end, and return the exit status."""
        try:
            with _passing_on_signals(self._events):
                for host in self._hosts:
                    host.start()
                self._supervisor.run()
                if self.signal is None and self._supervisor.open:
                    self._ending = True
                    self._signal(signal.SIGTERM)
                    self._supervisor.limit(self._job.grace_s)
                    self._supervisor.wait()
        finally:
            with ThreadPoolExecutor(len(self._hosts)) as pool:
                for statuses in pool.map(lambda host: host.end(), self._hosts):
                    self.statuses.update(statuses)
        stopped = self._stopped()
        if self.signal is None or stopped:
            return self._conclude() or stopped
        return 128 + self.signal

    def _stopped(self) -> int:
        """Return the exit status of ranks that stopped on request; 0 if there are none, or if any rank failed."""
        ends = set(self.statuses.values()) - {0}
        if not ends or not ends <= {STOPPED_SAVED, STOPPED_UNSAVED}:
            return 0
        return min(ends)

    # -- events of ranks -----------------------------------------------------------------------
    def output(self, rank: int | None, stream: int, data: bytes) -> None:
        """Write a rank's output, prefixing lines with the rank; end any unfinished line of another stream first."""
        target = sys.stderr if stream == 2 or self._job.to_stderr else sys.stdout
        front = f"[{rank}] " if self._job.prefix and rank is not None else ""
        if rank is not None and front and target is not None and target.isatty() and not os.environ.get("NO_COLOR"):
            front = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{front}\x1b[0m"
        with self._writing:
            if front and data:
                data = self._prefixed(data, front.encode(), target, (rank or 0, stream))
            try:
                _write_bytes(data, target)
            except BrokenPipeError:
                # The reader of this process's output is gone, for example with `| head`. Handle this like SIGPIPE.
                self._events.put((-1, signal.SIGPIPE))
                raise

    def _prefixed(self, data: bytes, front: bytes, target: TextIO | None, stream: tuple[int, int]) -> bytes:
        line = self._lines.pop(target, None)
        made = [b"\n"] if line not in (None, stream) else []
        inside = line == stream
        for piece in _PIECES.findall(data):
            again = piece.startswith(b"\r") and piece != b"\r\n"
            made += [b"\r"] if again and inside else []
            made += [b"" if inside and not again else front, piece[again:]]
            inside = not piece.endswith(b"\n")
        if inside:
            self._lines[target] = stream
        return b"".join(made)

    def ended(self, rank: int, status: int, report: Report | None) -> None:
        """Handle the exit of a rank."""
        self._reports[rank] = report
        self._events.put((rank, status))

    # -- the end -------------------------------------------------------------------------------
    def _ends(self, limit_s: float | None) -> list[Outcome]:
        try:
            rank, status = self._events.get(timeout=limit_s)
        except queue.Empty:
            return []
        if rank < 0:
            self._on_signal(status)
            return []
        if not status or self._ending or status in (STOPPED_SAVED, STOPPED_UNSAVED):
            return [Outcome(rank)]
        self._failures.append((rank, status))
        if self._continues:
            self._print_failure(rank, status, self._reports[rank])
        return [Outcome(rank, error=ChildProcessError(status))]

    def _on_signal(self, number: int) -> None:
        """Forward a signal. SIGUSR1 and SIGUSR2 aside, the first signal starts the grace period; a second ends it."""
        self._signal(signal.SIGTERM if number == signal.SIGPIPE else number)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._supervisor.limit(self._job.grace_s if self.signal is None else 0.0)
            self.signal = self.signal or number

    def _signal(self, number: int) -> None:
        for host in self._hosts:
            host.signal(number)

    def _conclude(self) -> int:
        """Print the first failure, and return its exit status."""
        if not self._failures:
            return 0
        reports = {rank: self._reports[rank] for rank, _ in self._failures}

        def order(failure: tuple[int, int]) -> tuple[int, float]:
            """Sort failures: ranks killed by a signal first, then errors by time, then errors due to other ranks."""
            report = reports[failure[0]]
            if report is None:
                return (0 if failure[1] < 0 else 1), 0.0
            return _ORDER.get(report["kind"], 1), float(report["time"])

        self.first, status = min(self._failures, key=order)
        if not self._continues:
            self._print_failure(self.first, status, reports.pop(self.first))
            # A killed rank usually cannot report, so show the report of another rank that noticed the loss.
            heard = [report for report in reports.values() if report and report["kind"] != "HostLostError"]
            witness = next(iter(heard), None)
            if status < 0 and witness:
                _print_error(witness["brief"])
            others = len(reports) - (status < 0 and witness is not None)
            if others:
                _print_error(f"({others} other {'rank' if others == 1 else 'ranks'} failed too)\n")
        if self._continues and len(self._failures) < len(self._supervisor.last):
            return 0
        return 128 - status if status < 0 else status

    def _print_failure(self, rank: int, status: int, report: Report | None) -> None:
        how = ended_by(-status) if status < 0 else f"exited with status {status}"
        _print_error(report["text"] if report else f"[rank {rank} of {self._size}] {how}\n")


@contextmanager
def _passing_on_signals(events: queue.SimpleQueue[tuple[int, int]]) -> Iterator[None]:
    """Turn signals into events, except for ignored ones (SIGHUP under nohup). Does nothing outside the main thread."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, frame: events.put((-1, number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Open file descriptors 0 to 2 on /dev/null if they are closed; otherwise, other files would get these numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _write_bytes(data: bytes, target: TextIO | None) -> None:
    try:
        number = target.fileno() if target is not None else None
    except (OSError, ValueError):
        assert target is not None
        target.write(data.decode(errors="replace"))
        return
    if number is not None and target is not None:
        target.flush()
        view = memoryview(data)
        while view:
            view = view[os.write(number, view) :]


def _print_error(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
