"""Ranks of a script on this host: starts them, forwards their output, and kills them and their child processes."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

from unisono.core import clock
from unisono.core.work import seconds_left
from unisono.host.processes import interpreter_flags
from unisono.launcher.forked_ranks import StartedRank, fork_ranks
from unisono.launcher.script_job import Events, Report, ScriptJob
from unisono.launcher.supervisor import END_S

__all__ = ["LocalHost"]

_log = logging.getLogger("unisono")

_LINE_S = 0.05
"""Seconds to wait for the rest of a line, so that lines from several ranks do not interleave."""


class LocalHost:
    """Ranks of a script on this host.

    Args:
        job: The script, and its ranks on this host.
        ports: Ports for this library's rendezvous and for torch's.
        attempt: Number of times the ranks have been started before.
        events: Callbacks for the ranks' output and exits.
    """

    def __init__(self, job: ScriptJob, ports: tuple[int, int], attempt: int, events: Events) -> None:
        self._job = job
        self._ports = ports
        self._attempt = attempt
        self._events = events
        self._ranks: list[StartedRank] = []
        self._readers: list[threading.Thread] = []
        # Threads that wait for the ranks to end.
        self._waiters: list[threading.Thread] = []
        self._files = ExitStack()
        # Files to which the ranks write their uncaught errors.
        self._reports: list[IO[bytes]] = []
        # The launcher holds the pipe's write end: when the launcher ends, the pipe closes, and the ranks exit.
        self._alive, self._held = os.pipe()

    def start(self) -> None:
        """Start the ranks."""
        with ExitStack() as files:
            self._reports += [files.enter_context(tempfile.TemporaryFile()) for _ in range(self._job.ranks)]
            self._files = files.pop_all()
        reason = self._job.fork_obstacle()
        # Ranks inherit the signal mask, and unblock SIGINT once they can exit cleanly.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if reason is None:
                self._fork()
                return
            _log.info("unisono run: each rank starts a Python of its own: %s", reason)
            for rank in range(self._job.ranks):
                self._start(rank)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def signal(self, number: int) -> None:
        """Send a signal to each running rank."""
        for rank in self._ranks:
            if rank.status is None:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def end(self) -> dict[int, int]:
        """Kill running ranks, and all processes that ranks have started; return each rank's exit status."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self._ranks:
                with suppress(ProcessLookupError, PermissionError):
                    if number == signal.SIGKILL or rank.status is not None:
                        os.killpg(rank.pid, number)
            deadline = clock.now() + END_S
            for reader in self._readers:
                reader.join(seconds_left(deadline))
        os.close(self._alive)
        os.close(self._held)
        for waiter in self._waiters:
            waiter.join()
        self._files.close()
        # A rank without a waiter, whose thread could not be started, has been killed above.
        killed = -signal.SIGKILL
        statuses = [killed if rank.status is None else rank.status for rank in self._ranks]
        return dict(enumerate(statuses, self._job.before))

    def _start(self, rank: int) -> None:
        report = self._reports[rank].fileno()
        alive = self._alive
        process = subprocess.Popen(
            [
                sys.executable,
                *interpreter_flags(),
                "-m",
                "unisono.launcher.script_rank",
                str(alive),
                str(report),
                *self._job.command,
            ],
            env=self._job.environment(rank, self._ports, self._attempt),
            stdin=None if rank == self._job.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(alive, report),
            # Start each rank in its own session, so that Ctrl-C at the terminal reaches only the launcher, which
            # forwards it, and so that the rank's children can be killed together with the rank.
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        started = StartedRank(process.pid, process.stdout, process.stderr)

        def wait() -> None:
            started.status = process.wait()
            self._on_end(rank, started.status)

        self._follow([started], wait, rank)

    def _fork(self) -> None:
        ranks, messages, wait = fork_ranks(
            self._job.command,
            [self._job.environment(rank, self._ports, self._attempt) for rank in range(self._job.ranks)],
            self._alive,
            [report.fileno() for report in self._reports],
            self._on_end,
        )
        self._follow(ranks, wait)
        self._start_thread(self._readers, self._pass_on, None, 2, messages)

    def _on_end(self, rank: int, status: int) -> None:
        self._events.ended(self._job.before + rank, status, _report_in(self._reports[rank]))

    def _follow(self, ranks: Sequence[StartedRank], wait: Callable[[], None], first: int = 0) -> None:
        """Wait for ranks to end, and forward their output."""
        self._ranks += ranks
        # Start this thread first: without it, nothing would note the ranks' ends.
        self._start_thread(self._waiters, wait)
        for rank, started in enumerate(ranks, self._job.before + first):
            self._start_thread(self._readers, self._pass_on, rank, 1, started.stdout)
            self._start_thread(self._readers, self._pass_on, rank, 2, started.stderr)

    def _start_thread(self, threads: list[threading.Thread], target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        threads.append(thread)

    def _pass_on(self, rank: int | None, stream: int, source: IO[bytes]) -> None:
        """Forward a stream as it arrives, but hold an incomplete line back briefly to wait for its end."""
        left = b""
        # Ignore a broken pipe: the reader of the launcher's output may be gone, for example with `| head`.
        with source, suppress(BrokenPipeError):
            while True:
                chunk = b""
                if not left or select.select([source], [], [], _LINE_S)[0]:
                    chunk = os.read(source.fileno(), 1 << 16)
                left += chunk
                whole = max(left.rfind(b"\n") + 1, left.rfind(b"\r")) if chunk else len(left)
                self._events.output(rank, stream, left[:whole])
                ended = not chunk and not left
                left = left[whole:]
                if ended:
                    return


def _report_in(file: IO[bytes]) -> Report | None:
    """Return a rank's report about its uncaught error; None if there is no complete report."""
    try:
        file.seek(0)
        report = json.loads(file.read())
    except ValueError:
        return None
    return report if isinstance(report, dict) else None
