"""The monitor process of `unisono watch`, which compares the ranks' calls, and outlives all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from unisono import serialization
from unisono.control.client import SocketControl
from unisono.control.report_ring import REPORT_BYTES, ReportWriter
from unisono.control.server import ControlServer
from unisono.control.watched_calls import Overdue, WatchedCalls
from unisono.core import clock
from unisono.core.failure import Cause
from unisono.core.frames import Kind
from unisono.core.group import Group
from unisono.diagnostics.hang_report import BlockedRank, blocked_ranks, lines_of
from unisono.errors import CommError, UnavailableError
from unisono.host.anonymous_files import create_file
from unisono.host.network import why_no_shm
from unisono.host.processes import interpreter_flags

__all__ = ["CallControl", "start_monitor"]

_LOOK_EVERY_S = 0.05
_QUERY_EVERY_S = 0.2
_LEAST_SHARE = 10.0
_ANSWER_WITHIN_S = 0.5
_PATIENCE_S = 30.0


class CallControl(SocketControl):
    """A rank's handle to the monitor, or the monitor's own handle.

    Reports, which get no reply, go through shared memory if the rank and the monitor are on one host: a report then
    costs no system call, and does not wake the monitor. Other ranks send their reports over the connection.
    """

    _reports: ReportWriter | None = None

    def attend(self, group: Group, on_failure: Callable[[Cause], None], pid: int) -> None:
        """Join the watched ranks. `on_failure` is as for `join`; `pid` is 0 on a host other than the monitor's."""
        self.join(group, on_failure)
        handle = b""
        with contextlib.ExitStack() as stack:
            # Descriptors or memory may be exhausted, and /proc may not be mounted.
            with contextlib.suppress(OSError, ValueError):
                if pid and why_no_shm() is None:
                    made = stack.enter_context(create_file("watch", REPORT_BYTES))
                    reports = ReportWriter(made, lambda: self._ended is not None)
                    handle = made
            if self._request("attend", group.name, pid, handle):
                self._reports = reports

    def tell(self, *words: object) -> None:
        """Send a request that gets no reply."""
        self._report(Kind.REQUEST, serialization.encode((0, words)))

    def call(self, content: bytes) -> None:
        """Report a call. Blocks only while the monitor is not reading."""
        self._report(Kind.CALL, content)

    def _report(self, kind: Kind, content: bytes) -> None:
        try:
            if self._reports is None:
                self._connection.send(content, clock.now() + self._patience_s, kind)
            else:
                self._reports.write(kind, content, self._patience_s)
        except OSError:
            self._stop()

    def settle(self) -> bool:
        """Return whether the watched ranks have failed, once all calls that they have reported are compared."""
        return bool(self._request("settle"))

    def compare(self, content: bytes, timeout: float | None) -> None:
        """Report a call, and wait until all ranks have made the same call, or until the timeout, if there is one.

        Raises:
            CommError: The group of watched ranks has failed; see `unisono.core.failure.error_of`.
        """
        waiter = self._begin("compare", content)
        if self._wait(waiter, 1e6 if timeout is None else timeout):
            self._finish(waiter, self._patience_s)
        self._waiters.pop(waiter.number, None)

    def examine(self, blocked: Sequence[BlockedRank]) -> tuple[bool, bool, Overdue | None]:
        """Look for failures, given the ranks that have just been found blocked.

        Returns: Whether all ranks have exited, whether a rank has reported nothing lately, and an overdue call or None.
        """
        content = serialization.encode([tuple(each) for each in blocked])
        ended, quiet, overdue = self._request("examine", content)
        return ended, quiet, None if overdue is None else Overdue(*overdue)


def start_monitor(host: str, secret: bytes) -> tuple[str, int]:
    """Start a process that compares the calls of all ranks with the given secret; return its address.

    The process exits when the last rank has exited, or if no rank calls `attend` within a minute.
    """
    process = subprocess.Popen(
        [sys.executable, *interpreter_flags(), "-m", __name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Start the process in its own session, because Ctrl-C and the launcher's signals must not end the process that
        # reports their effects.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout, contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps([host, secret.hex()]).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    if not answer:
        raise UnavailableError(f"the process that compares calls did not start: exit status {process.wait()}")
    # Set `returncode`, because Python would warn that the child process is still running: the child outlives this
    # process, so nobody waits for the child.
    process.returncode = 0
    where = json.loads(answer)
    return where[0], where[1]


def _report(control: CallControl, overdue: Overdue) -> str:
    """Return each rank's activity as lines of text."""
    found = control.query(None, _ANSWER_WITHIN_S)
    lines = [line for (_, rank), report in sorted(found.items()) for line in lines_of(f"rank {rank}", report)]
    question = "Has no rank sent anything?" if overdue.rank is None else "Is it alive, or did it skip a call?"
    return "\n  ".join([f"{overdue.text}. {question}", *lines])


def _main() -> None:
    """Serve until all ranks have exited."""
    host, secret = json.loads(sys.stdin.readline())
    server = ControlServer(bytes.fromhex(secret), host, state=WatchedCalls)
    print(json.dumps(server.address), flush=True)  # noqa: T201
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    control = CallControl(server.address, bytes.fromhex(secret), _PATIENCE_S)
    ended = quiet = False
    query_at = 0.0
    with contextlib.suppress(CommError):
        while not ended:
            time.sleep(_LOOK_EVERY_S)
            blocked: list[BlockedRank] = []
            began = clock.now()
            if quiet and began >= query_at:
                blocked = blocked_ranks(control.query(None, _ANSWER_WITHIN_S))
                # With many ranks, a query takes long; wait ten times as long, so that the monitor is mostly idle.
                query_at = began + max(_QUERY_EVERY_S, _LEAST_SHARE * (clock.now() - began))
            ended, quiet, overdue = control.examine(blocked)
            if overdue is not None:
                control.fail_all(Cause("CommTimeoutError", overdue.rank, _report(control, overdue)))
    control.close()
    server.close()


if __name__ == "__main__":
    _main()
