"""Ranks of a script on another host, started over ssh."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from io import BufferedReader
from typing import IO, cast

from unisono.core.failure import signal_name
from unisono.core.frames import READ_BYTES, Frame, FrameChannel, Kind
from unisono.host.processes import interpreter_flags
from unisono.launcher.host_agent import MARKER
from unisono.launcher.script_job import Events, ScriptJob
from unisono.launcher.supervisor import AGENT_END_S, AGENT_START_S

__all__ = ["RemoteHost", "Shell"]

_FROM_AGENT = (Kind.OUT, Kind.ERR, Kind.STARTED, Kind.ENDED, Kind.STATUSES)

_OF_A_HOST = {
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOST", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"),
    *("TMPDIR", "TMP", "TEMP", "TERM", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY"),
}
_OF_A_SESSION = ("SSH_", "XDG_", "DBUS_", "GPG_", "SUDO_", "SLURM", "PMI", "OMPI_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True)
class Shell:
    """Command prefix that runs a command on another host.

    Attributes:
        name: The host's name.
        words: The words of the prefix, such as `ssh` and the host's name.
        python: Path of the Python interpreter on the other host.
    """

    name: str
    words: Sequence[str]
    python: str


class RemoteHost:
    """Ranks of a script on another host, run by an agent, which kills the ranks if this process ends.

    Args:
        job: The script, and its ranks on the other host.
        ports: Ports for this library's rendezvous and for torch's.
        attempt: Number of times the ranks have been started before.
        events: Callbacks for the ranks' output and exits.
        shell: Command prefix that starts the agent on the other host.
    """

    def __init__(self, job: ScriptJob, ports: tuple[int, int], attempt: int, events: Events, shell: Shell) -> None:
        self._job = job
        self._events = events
        self._shell = shell
        self._order = {
            "job": asdict(job),
            "ports": ports,
            "attempt": attempt,
            "folder": os.getcwd(),  # noqa: PTH109
            "environment": _environment(),
        }
        # Messages to send to the agent; None closes the agent's standard input.
        self._orders: queue.SimpleQueue[tuple[Kind, bytes, int] | None] = queue.SimpleQueue()
        self._last_words: deque[str] = deque(maxlen=6)
        self._started = False
        self._statuses: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._follower = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Start the agent, which starts the ranks."""
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        command = [self._shell.python, *interpreter_flags(), "-m", "unisono.launcher.host_agent"]
        if paths:
            # Set the path on the command line, because the agent must import this library before it can receive
            # anything. `env` works in any shell.
            command = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", *command]
        self._process = subprocess.Popen(
            [*self._shell.words, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # In a session of its own, ssh does not receive Ctrl-C from the terminal; the launcher forwards it to the
            # ranks.
            start_new_session=True,
        )
        self._orders.put((Kind.ORDER, json.dumps(self._order).encode(), 0))
        self._follower.start()

    def signal(self, number: int) -> None:
        """Send a signal to each running rank."""
        self._orders.put((Kind.SIGNAL, b"", int(number)))

    def end(self) -> dict[int, int]:
        """Kill running ranks, and all processes that ranks have started; return each rank's exit status."""
        if self._process is None:
            return {}
        self._orders.put(None)
        self._follower.join(AGENT_END_S)
        if self._follower.is_alive():
            self._kill(f"the agent has not ended within {AGENT_END_S:g} s")
            self._follower.join()
        return {rank: self._statuses.get(rank, -signal.SIGKILL) for rank in self._ranks()}

    def _kill(self, why: str) -> None:
        self._last_words.append(why)
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ranks(self) -> range:
        return range(self._job.before, self._job.before + self._job.ranks)

    def _follow(self) -> None:
        """Read and handle the agent's output until it ends."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        writer = threading.Thread(target=self._write, args=(self._process.stdin,), daemon=True)
        listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        writer.start()
        listener.start()
        # Limit the start time, because the agent never starts if a startup file of the remote shell reads standard
        # input or executes another shell.
        why = f"no agent of unisono has begun there within {AGENT_START_S:g} s"
        limit = threading.Timer(AGENT_START_S, self._kill, [why])
        limit.daemon = True
        limit.start()
        with self._process.stdout as frames:
            for line in frames:
                foreign, begun, _ = line.partition(MARKER)
                if foreign.strip():
                    self._show(None, Kind.ERR, f"{self._shell.name}: ".encode() + foreign.rstrip() + b"\n")
                if begun:
                    break
            limit.cancel()
            read = partial(cast(BufferedReader, frames).read1, READ_BYTES)
            try:
                for frame in FrameChannel().frames(read, *_FROM_AGENT):
                    self._on_frame(frame)
                    # Stop at the last frame: a shell may print more after it, for example in `.bash_logout`.
                    if frame.kind == Kind.STATUSES:
                        break
            except ConnectionError:
                # The host was lost while it sent a frame; the code below reports the loss.
                pass
            except ValueError as error:
                self._kill(f"what came from there is not what an agent sends: {error}")
        self._orders.put(None)
        status = self._process.wait()
        # Limit the wait, because a process that the shell has left behind may keep standard error open.
        listener.join(1.0)
        for rank in self._ranks():
            if rank not in self._statuses:
                self._statuses[rank] = status or 1
                text = self._loss(status)
                report = {"kind": "HostLostError", "time": 0.0, "text": text, "brief": text}
                self._events.ended(rank, self._statuses[rank], report)

    def _on_frame(self, frame: Frame) -> None:
        """Handle a frame from the agent. Raises `ValueError` if the frame is invalid."""
        rank = frame.number
        match frame.kind, frame.json() if frame.kind in (Kind.ENDED, Kind.STATUSES) else None:
            case Kind.STARTED, None:
                self._started = True
            case Kind.ENDED, [int(status), dict() | None as report] if rank in self._ranks():
                self._statuses[rank] = status
                self._events.ended(rank, status, report)
            case Kind.STATUSES, dict(statuses) if all(isinstance(status, int) for status in statuses.values()):
                self._statuses.update({int(name): status for name, status in statuses.items()})
            case (Kind.OUT | Kind.ERR) as stream, None if rank in (-1, *self._ranks()):
                self._show(None if rank < 0 else rank, stream, frame.content)
            case _:
                raise ValueError(f"{frame.kind.name} of rank {rank}: {frame.content[:100]!r}")

    def _show(self, rank: int | None, stream: int, data: bytes) -> None:
        with suppress(BrokenPipeError):
            self._events.output(rank, stream, data)

    def _write(self, stdin: IO[bytes]) -> None:
        channel = FrameChannel()
        with suppress(OSError), stdin:
            while (order := self._orders.get()) is not None:
                stdin.write(channel.encode(*order))
                stdin.flush()

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                self._last_words.append(line.decode(errors="replace").rstrip())

    def _loss(self, status: int) -> str:
        """Return the error text for a host whose agent ended before its ranks."""
        ranks = self._ranks()
        these = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        what = "was lost" if self._started else "has started none of them"
        how = f"was ended by {signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
        # Copy the lines, because a process that the shell has left behind may still be printing.
        words = "".join(f"  {line}\n" for line in list(self._last_words))
        return (
            f"host {self._shell.name}, with {these} of {self._job.size}, {what}: {self._shell.words[0]} {how}\n{words}"
        )


def _environment() -> dict[str, str]:
    """Return the environment variables of this process that also make sense on another host."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_HOST and not name.startswith(_OF_A_SESSION)
    }
