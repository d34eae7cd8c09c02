"""Runs programs with a time limit, without leaving processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.bootstrap import launchers
from unisono.host.mpi_library import env_without_launcher

__all__ = ["CompletedRun", "clean_environment", "run"]

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class CompletedRun:
    """Result of a completed program.

    Attributes:
        status: Exit status, negative for a signal; None if the program did not end in time.
        out, err: The program's output.
    """

    status: int | None
    out: str
    err: str

    @property
    def why(self) -> str:
        """How the program ended, with the last line of its output, for a message."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        if self.status is None:
            return f"it did not end in time ({last})"
        if self.status < 0:
            return f"it was ended by {signal.Signals(-self.status).name} ({last})"
        return f"exit status {self.status}: {last}"


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> CompletedRun:
    """Run a program, and kill all of its processes if it takes longer than `limit_s` seconds."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return CompletedRun(127, "", f"{command[0]} cannot be run: {error.strerror or error}")
    with process:
        try:
            out, err = process.communicate(timeout=limit_s)
            return CompletedRun(process.returncode, out, err)
        except subprocess.TimeoutExpired:
            # Send SIGTERM first, so that mpiexec can terminate its ranks.
            for how in (signal.SIGTERM, signal.SIGKILL):
                _signal_all(process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_GRACE_S)
                    return CompletedRun(None, out, err)
            # A process that still keeps the pipes open has left the session, so it was not killed; don't wait for it.
            return CompletedRun(None, "", "")
        finally:
            _signal_all(process.pid, signal.SIGKILL)


def _signal_all(session: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, how)


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without its launcher's variables, plus the variables in `more`."""
    of_launchers = tuple(prefix for launcher in launchers() for prefix in launcher.PREFIXES)
    kept = env_without_launcher(os.environ)
    return {name: text for name, text in kept.items() if not name.startswith(of_launchers)} | more
