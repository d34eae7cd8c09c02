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
        words: The prefix, such as `ssh` and the host's name.
        python: Python on that host.
    """

    name: str
    words: Sequence[str]
    python: str


class RemoteHost:
    """Ranks of a script on another host. They end with this process, because that closes the agent's input.

    Args:
        job: The script, and its ranks on that host.
        ports: Ports of the rendezvous, of this library and of torch.
        attempt: Number of times that all ranks were started before.
        events: Called with the ranks' output and their ends.
        shell: Command prefix that starts the agent there.
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
        # Messages for the agent; None closes its input.
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
            # This works in any shell, and before the agent has received anything.
            command = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", *command]
        self._process = subprocess.Popen(
            [*self._shell.words, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # An interrupt at the terminal must reach only the launcher, which forwards it.
            start_new_session=True,
        )
        self._orders.put((Kind.ORDER, json.dumps(self._order).encode(), 0))
        self._follower.start()

    def signal(self, number: int) -> None:
        """Send a signal to each running rank."""
        self._orders.put((Kind.SIGNAL, b"", int(number)))

    def end(self) -> dict[int, int]:
        """Kill ranks that are still running, and everything started by any rank; return each rank's exit status."""
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
        """Read the agent's output to its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        writer = threading.Thread(target=self._write, args=(self._process.stdin,), daemon=True)
        listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        writer.start()
        listener.start()
        # If the shell reads its input, or executes another shell, the agent never starts.
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
                    # Anything that a shell prints after the last frame, for example in `.bash_logout`, is not a frame.
                    if frame.kind == Kind.STATUSES:
                        break
            except ConnectionError:
                # The host was lost in the middle of a frame.
                pass
            except ValueError as error:
                self._kill(f"what came from there is not what an agent sends: {error}")
        self._orders.put(None)
        status = self._process.wait()
        # A process left behind by the shell may keep this open.
        listener.join(1.0)
        for rank in self._ranks():
            if rank not in self._statuses:
                self._statuses[rank] = status or 1
                text = self._loss(status)
                report = {"kind": "HostLostError", "time": 0.0, "text": text, "brief": text}
                self._events.ended(rank, self._statuses[rank], report)

    def _on_frame(self, frame: Frame) -> None:
        """Handle a frame from the agent; raise `ValueError` if it is invalid."""
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
        words = "".join(f"  {line}\n" for line in self._last_words)
        return (
            f"host {self._shell.name}, with {these} of {self._job.size}, {what}: {self._shell.words[0]} {how}\n{words}"
        )


def _environment() -> dict[str, str]:
    """Return this process's variables that have the same meaning on another host."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_HOST and not name.startswith(_OF_A_SESSION)
    }
