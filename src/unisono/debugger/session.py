"""A debugger's connection to the ranks of one job while they are held, that is, paused for debugging."""

from __future__ import annotations

import sys
import time
from collections.abc import Container
from contextlib import suppress
from itertools import chain
from typing import Any

from unisono.control.client import place_of
from unisono.control.debug_socket import DebugConnection, held_processes
from unisono.control.inspect_socket import find_control
from unisono.core.closing import Closing
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import CommError, UnavailableError

__all__ = ["Session", "attach"]

_LOOK_EVERY_S = 0.01


class Session(Closing):
    """A debugger's connection to the held (paused) ranks of one job on this host, as returned by `attach`.

    Provisional: it may change in any minor version, without a deprecation.

    To close the session on exit from a block, use it as a context manager. The ranks remain held, and another debugger
    can attach.

    Args:
        job: Name of the job.
        connections: Connections to the job's processes.

    Attributes:
        reason: Why the ranks are held.

    Example:
        >>> # session = un.debugger.attach(pid)
        >>> # session.evaluate(2, "loss.item()"), session.evaluate_all("step")
        >>> # session.go()
    """

    def __init__(self, job: str, connections: list[DebugConnection]) -> None:
        self._job = job
        self._connections = connections
        self._of: dict[int, DebugConnection] = {}
        self.reason: str = ""
        try:
            self.ranks()
        except CommError:
            self.close()
            raise

    def ranks(self) -> dict[int, dict[str, Any]]:
        """Return each rank's "state" (held, in a call, running), "site", "function", "file" and "line".

        Each call also finds ranks that have become held since the previous call.
        """
        known = {(connection.pid, connection.number) for connection in self._connections}
        for job, more in _held_jobs(known).items():
            for connection in more:
                if job == self._job:
                    self._connections.append(connection)
                else:
                    connection.close()
        found: dict[int, dict[str, Any]] = {}
        for connection in self._connections:
            answer = connection.ask("ranks")
            self.reason = answer["reason"]
            for rank, described in answer["ranks"].items():
                found[int(rank)] = described
                self._of[int(rank)] = connection
        return dict(sorted(found.items()))

    def evaluate(self, rank: int, code: str, up: int = 0) -> str:
        """Return the value of an expression as text, or the output of statements, in a rank's current frame.

        Args:
            rank: Number of the rank in the job.
            code: Python code, which cannot set local variables.
            up: Which frame to use: 0 is the innermost frame of `stack`, 1 is its caller, and so on.

        Raises:
            ValueError: The rank is not on this host.
            CommError: The rank's process has ended or is no longer held.
        """
        return str(self._at(rank).ask("evaluate", rank=rank, code=code, up=up)["text"])

    def evaluate_all(self, code: str) -> dict[int, str]:
        """Return the result of `evaluate` for each rank.

        Args:
            code: Python code.
        """
        return {rank: self.evaluate(rank, code) for rank in self.ranks()}

    def stack(self, rank: int) -> list[str]:
        """Return the frames of a rank's program as "file:line in function", innermost last.

        Frames of launchers and of installed packages are left out.

        Args:
            rank: Number of the rank in the job.
        """
        return list(self._at(rank).ask("stack", rank=rank)["stack"])

    def step(self, rank: int, timeout: Timeout = 1.0) -> bool:
        """Run a held rank to its next line, and wait until it has reached that line.

        Args:
            rank: Number of the rank in the job.
            timeout: Seconds to wait, or a `timedelta`. If the current line calls a collective, the collective waits for
                ranks that are still held.

        Returns:
            Whether the rank has reached its next line.
        """
        deadline = time.perf_counter() + resolve_timeout(timeout)
        stepped: bool = self._at(rank).ask("step", rank=rank)["stepped"]
        while stepped and self.ranks()[rank]["state"] != "held":
            if time.perf_counter() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return stepped

    def go(self) -> None:
        """Continue all ranks."""
        self._end("go")

    def quit(self) -> None:
        """Abort the job: every rank raises `AbortedError`.

        Example:
            >>> # session.quit()
        """
        self._end("quit")

    def close(self) -> None:
        """Disconnect from the ranks, which remain held."""
        for connection in self._connections:
            connection.close()

    def _end(self, how: str) -> None:
        try:
            rank = next(iter(self.ranks()), None)
            if rank is None:
                raise CommError("the ranks were let go")
            self._of[rank].ask(how, rank=rank)
        finally:
            self.close()

    def _at(self, rank: int) -> DebugConnection:
        if rank not in self._of:
            raise ValueError(f"rank {rank} is not held on this host; {sorted(self._of)} are")
        return self._of[rank]


def attach(pid: int | None = None) -> Session:
    """Connect to the ranks of a job that are held on this host.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        pid: PID of a process of the job, or of the process that started the ranks; None if only one job is held.

    Returns:
        The session.

    Raises:
        CommError: No job is held, or several jobs are held and `pid` is None.
        UnavailableError: The platform is not Linux.

    Example:
        >>> un.debugger.attach(1)
        Traceback (most recent call last):
        ...
        unisono.errors.CommError: process 1 is in no job whose ranks are held...
    """
    if sys.platform != "linux":
        raise UnavailableError("attaching to held ranks needs Linux")
    jobs = _held_jobs()
    try:
        job = _chosen(jobs, pid)
        return Session(job, jobs.pop(job))
    finally:
        for connection in chain.from_iterable(jobs.values()):
            connection.close()


def _held_jobs(without: Container[tuple[int, int]] = ()) -> dict[str, list[DebugConnection]]:
    """Return connections to the processes on this host that have held ranks, grouped by job.

    Processes of other users, and processes in `without`, are skipped.
    """
    jobs: dict[str, list[DebugConnection]] = {}
    for process in held_processes():
        if process in without:
            continue
        # Skip a process that has continued in the meantime or belongs to another user.
        with suppress(CommError):
            connection = DebugConnection(*process)
            answer = connection.ask("ranks")
            if answer["ranks"]:
                jobs.setdefault(answer["job"], []).append(connection)
            else:
                connection.close()
    return jobs


def _chosen(jobs: dict[str, list[DebugConnection]], pid: int | None) -> str:
    """Return the job of a process, which need not hold any ranks itself. If `pid` is None, return the only job."""
    if pid is None:
        if len(jobs) > 1:
            named = sorted(connection.pid for connections in jobs.values() for connection in connections)
            raise CommError(f"several jobs are held; pass a process of one of them: {named}")
        if not jobs:
            raise CommError("no job is held on this host that this user may debug")
        return next(iter(jobs))
    for job, connections in jobs.items():
        if pid in {connection.pid for connection in connections}:
            return job
    with suppress(CommError):
        (host, port), _ = find_control(pid)
        if (job := place_of((host, port))) in jobs:
            return job
    raise CommError(f"process {pid} is in no job whose ranks are held, or that this user may debug")
