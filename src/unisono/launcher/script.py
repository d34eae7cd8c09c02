"""Ranks of a script on this host: start them, pass output and signals on, end all when one fails."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Literal, TextIO

from unisono.core.failure import ended_by
from unisono.core.work import seconds_left
from unisono.host import processors
from unisono.host.processors import cores
from unisono.launcher.forked_ranks import ForkedRank, fork_ranks, why_plain

__all__ = ["ScriptJob", "ScriptResult", "run_script"]

_GRACE_S = 5.0
_END_S = 1.0
_LINE_S = 0.05
"""How long the rest of a line may take, so that lines of several ranks do not run into each other."""
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_PIECES = re.compile(rb"\r\n|\r?[^\r\n]*\n|\r?[^\r\n]+|\r")
"""Parts of an output that begin a line, or begin it again."""
_COLOURS = (36, 33, 32, 35, 34, 31)
_CONSEQUENCES = ("PeerLostError", "AbortedError")
_log = logging.getLogger("unisono")

_Rank = subprocess.Popen[bytes] | ForkedRank


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
        binding: Which processors a rank may use; see `unisono.host.processors.placement`.
        prefix: Whether each line of output begins with its rank.
        to_stderr: Whether the ranks' standard output goes to standard error too.
        grace_s: Seconds in which ranks that were asked to end may save and leave.
        stdin: The rank on this host that reads standard input.
        start: "fork" forks the ranks from one process that has imported torch, "plain" starts a Python for each;
            "auto" forks where there are more ranks than cores, and the script shows no objection.
    """

    command: Sequence[str]
    ranks: int
    host: int = 0
    hosts: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    backend: str | None = None
    binding: processors.Binding = "none"
    prefix: bool = True
    to_stderr: bool = False
    grace_s: float = 30.0
    stdin: int | None = None
    start: Literal["auto", "fork", "plain"] = "auto"

    def why_plain(self) -> str | None:
        """Return why each rank gets a Python of its own, in words; None if ranks are forked from one process."""
        if self.start == "plain":
            return "that was asked for"
        return why_plain(self.command, self.ranks, binding=self.binding, stdin=self.stdin, asked=self.start == "fork")

    def environment(self, local_rank: int, ports: tuple[int, int], attempt: int) -> dict[str, str]:
        """Return the variables of one rank: torchrun's, and the port of this library beside torch's.

        The former names the latter, so that it does not lead a job that another launcher starts in a rank here.
        """
        places = {
            "RANK": self.host * self.ranks + local_rank,
            "WORLD_SIZE": self.hosts * self.ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": self.host,
            "MASTER_ADDR": self.address,
            "UNISONO_PORT": f"{ports[0]}/{ports[1]}",
            "MASTER_PORT": ports[1],
            "UNISONO_RESTARTS": attempt,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or max(1, cores() // self.ranks),
            "PYTHONUNBUFFERED": 1,
        }
        chosen = {} if self.backend is None else {"UNISONO_BACKEND": self.backend}
        if self.binding != "none":
            chosen[processors.BOUND] = processors.shown(processors.placement(self.ranks, self.binding)[local_rank])
        # An outer torchrun's would lead the ranks to its own store.
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        return {**outer, **{name: str(value) for name, value in places.items()}, **chosen}


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """The end of a script's ranks.

    Attributes:
        status: 0, or the exit status of the rank that failed first: 128 and the signal's number if a signal ended it,
            or if it ended this launcher. With "continue", 0 if any rank has ended well.
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

    Standard output and error of the ranks are passed on as they come. When a rank fails, the others may end by their
    own error for 5 s, then they are ended, and the first failure is printed; failures that follow from it are counted.
    Signals to this process reach the ranks; after SIGTERM, SIGHUP or SIGINT they have the grace to save and leave, but
    none after a second one. What ranks have started ends with them.

    Args:
        job: The script, and its ranks.
        restarts: How often all ranks are started again after a failure.
        on_failure: "continue" lets the others go on after a failure, which is printed immediately.
    """
    _open_standard_streams()
    for attempt in range(restarts + 1):
        attempted = _Attempt(job, attempt, on_failure)
        status = attempted.run()
        if not status or attempted.signal is not None:
            break
        if attempt < restarts:
            _print_error(f"unisono run: start all ranks again ({attempt + 1} of {restarts} restarts)\n")
    return ScriptResult(status, attempted.first, attempted.statuses, attempt)


class _Attempt:
    """One start of all ranks."""

    def __init__(self, job: ScriptJob, number: int, on_failure: str) -> None:
        self._job = job
        self._number = number
        self._continues = on_failure == "continue"
        # Ranks that have ended, with their status; and signals, after the rank -1.
        self._events: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._failures: list[tuple[int, int]] = []
        self._readers: list[threading.Thread] = []
        # Where ranks write their uncaught errors.
        self._reports: list[IO[bytes]] = []
        self._writing = threading.Lock()
        # For each output the stream whose line has not ended.
        self._lines: dict[TextIO | None, int] = {}
        self._deadline: float | None = None
        # Whether ranks end because this launcher ends them.
        self._ending = False
        self.signal: int | None = None
        self.first: int | None = None
        self.statuses: dict[int, int] = {}

    def run(self) -> int:
        """Start the ranks, wait for their end, and return the exit status."""
        with ExitStack() as files:
            self._reports = [files.enter_context(tempfile.TemporaryFile()) for _ in range(self._job.ranks)]
            self._run()
            return self._conclude() if self.signal is None else 128 + self.signal

    def _run(self) -> None:
        # A rank notices by the end of this pipe that its launcher is gone.
        alive, held = os.pipe()
        ports = (self._job.port, self._job.port + 1) if self._job.port else _free_ports()
        ranks: list[_Rank] = []
        reason = self._job.why_plain()
        try:
            with _passing_on_signals(self._events):
                with _interrupts_blocked():
                    if reason is None:
                        ranks.extend(self._fork(ports, alive))
                    else:
                        _log.info(
                            "unisono run: ranks are started one by one, each with a Python of its own: %s", reason
                        )
                        ranks.extend(self._start(rank, ports, alive) for rank in range(self._job.ranks))
                self._wait(ranks)
                if self.signal is None and any(process.poll() is None for process in ranks):
                    self._ending = True
                    self._signal(ranks, signal.SIGTERM)
                    self._deadline = time.monotonic() + self._job.grace_s
                    self._wait(ranks)
        finally:
            self._kill(ranks)
            os.close(alive)
            os.close(held)
            before = self._job.host * self._job.ranks
            self.statuses = {before + rank: process.wait() for rank, process in enumerate(ranks)}

    def _start(self, rank: int, ports: tuple[int, int], alive: int) -> subprocess.Popen[bytes]:
        report = self._reports[rank].fileno()
        # As multiprocessing passes them on; there is no public name.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        process = subprocess.Popen(
            [sys.executable, *flags, "-m", "unisono.launcher.script_rank", str(alive), str(report), *self._job.command],
            env=self._job.environment(rank, ports, self._number),
            stdin=None if rank == self._job.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(alive, report),
            # An interrupt at the terminal is for the launcher, which passes it on; and what the rank starts is with it.
            start_new_session=True,
        )
        self._follow(rank, process)
        threading.Thread(target=lambda: self._events.put((rank, process.wait())), daemon=True).start()
        return process

    def _fork(self, ports: tuple[int, int], alive: int) -> list[ForkedRank]:
        ranks, messages = fork_ranks(
            self._job.command,
            [self._job.environment(rank, ports, self._number) for rank in range(self._job.ranks)],
            alive,
            [report.fileno() for report in self._reports],
            lambda rank, status: self._events.put((rank, status)),
        )
        for rank, process in enumerate(ranks):
            self._follow(rank, process)
        self._read(None, messages, sys.stderr)
        return ranks

    def _follow(self, rank: int, process: _Rank) -> None:
        """Pass on what a rank prints."""
        number = self._job.host * self._job.ranks + rank
        assert process.stdout is not None
        assert process.stderr is not None
        self._read(number, process.stdout, sys.stderr if self._job.to_stderr else sys.stdout)
        self._read(number, process.stderr, sys.stderr)

    def _read(self, rank: int | None, source: IO[bytes], target: TextIO | None) -> None:
        reader = threading.Thread(target=self._pass_on, args=(rank, source, target), daemon=True)
        reader.start()
        self._readers.append(reader)

    # -- output --------------------------------------------------------------------------------
    def _pass_on(self, rank: int | None, source: IO[bytes], target: TextIO | None) -> None:
        """Copy a stream as it comes; the beginning of a line waits a moment for the rest."""
        left = b""
        with source:
            while True:
                chunk = b""
                if not left or select.select([source], [], [], _LINE_S)[0]:
                    chunk = os.read(source.fileno(), 1 << 16)
                    left += chunk
                    whole = max(left.rfind(b"\n") + 1, left.rfind(b"\r")) if chunk else len(left)
                else:
                    whole = len(left)
                try:
                    self._write(rank, source.fileno(), left[:whole], target)
                except BrokenPipeError:
                    # As of a command before `| head`.
                    self._events.put((-1, signal.SIGPIPE))
                    return
                ended = not chunk and not left
                left = left[whole:]
                if ended:
                    return

    def _write(self, rank: int | None, stream: int, data: bytes, target: TextIO | None) -> None:
        """Write to this process's output, each line after its rank; end another stream's unfinished line first."""
        front = f"[{rank}] " if self._job.prefix and rank is not None else ""
        if rank is not None and front and target is not None and target.isatty() and not os.environ.get("NO_COLOR"):
            front = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{front}\x1b[0m"
        with self._writing:
            if front and data:
                line = self._lines.pop(target, None)
                made = [b"\n"] if line not in (None, stream) else []
                inside = line == stream
                for piece in _PIECES.findall(data):
                    again = piece.startswith(b"\r") and piece != b"\r\n"
                    made += [b"\r"] if again and inside else []
                    made += [b"" if inside and not again else front.encode(), piece[again:]]
                    inside = not piece.endswith(b"\n")
                if inside:
                    self._lines[target] = stream
                data = b"".join(made)
            _write_bytes(data, target)

    # -- the end -------------------------------------------------------------------------------
    def _wait(self, ranks: Sequence[_Rank]) -> None:
        """Wait until all ranks have ended, or until the deadline that a failure or a signal has set."""
        while any(process.returncode is None for process in ranks) or not self._events.empty():
            try:
                left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                rank, status = self._events.get(timeout=left)
            except queue.Empty:
                return
            if rank < 0:
                self._on_signal(ranks, status)
            elif status and not self._ending:
                self._failures.append((rank, status))
                if self._continues:
                    self._print_failure(rank, status, self._read_report(rank))
                else:
                    self._deadline = self._deadline or time.monotonic() + _GRACE_S

    def _on_signal(self, ranks: Sequence[_Rank], number: int) -> None:
        """Pass a signal on. One that ends the job sets the deadline: to now, if it is the second."""
        self._signal(ranks, signal.SIGTERM if number == signal.SIGPIPE else number)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._deadline = time.monotonic() + (self._job.grace_s if self.signal is None else 0.0)
            self.signal = self.signal or number

    def _signal(self, ranks: Sequence[_Rank], number: int) -> None:
        for process in ranks:
            process.send_signal(number)

    def _kill(self, ranks: Sequence[_Rank]) -> None:
        """End the ranks that still run, and all that any of them has started."""
        for number, patience in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
            for process in ranks:
                with suppress(ProcessLookupError, PermissionError):
                    if number == signal.SIGKILL or process.poll() is not None:
                        os.killpg(process.pid, number)
            deadline = time.monotonic() + patience
            for reader in self._readers:
                reader.join(seconds_left(deadline))

    def _conclude(self) -> int:
        """Print the first failure, and return its exit status."""
        if not self._failures:
            return 0
        reports = {rank: self._read_report(rank) for rank, _ in self._failures}

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

    def _read_report(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank wrote about its uncaught error, if it wrote it whole."""
        self._reports[rank].seek(0)
        try:
            report = json.loads(self._reports[rank].read())
        except ValueError:
            return None
        return report if isinstance(report, dict) else None

    def _print_failure(self, rank: int, status: int, report: dict[str, Any] | None) -> None:
        number = self._job.host * self._job.ranks + rank
        world = self._job.hosts * self._job.ranks
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


@contextmanager
def _passing_on_signals(events: queue.SimpleQueue[tuple[int, int]]) -> Iterator[None]:
    """Let signals become events, unless they are ignored, as SIGHUP under nohup. Only the main thread may do that."""
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
    """Open descriptors 0 to 2 where they are closed, as under cron: another file would get such a number."""
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
