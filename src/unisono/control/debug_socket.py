"""A debugger's access to a process whose ranks are held: a Unix socket for processes of the same user.

A debugger can run any code in the process. Therefore, the socket exists only while the ranks are held, the kernel
identifies the user who connects, and the control plane carries none of a debugger's requests except "hold" and "go".

Requests and answers are frames of JSON.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from unisono.control.inspect_socket import is_this_user, names, opened, path_of, user_of
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause
from unisono.core.flight_recorder import ActivityRegistry, format_call, is_users, site_of, thread_frames, users_frame
from unisono.core.frames import READ_BYTES, FrameChannel, Kind, within
from unisono.core.hold import HOLD
from unisono.core.threads import spawn_thread
from unisono.errors import CommError

__all__ = ["DEBUGGED", "DebugConnection", "DebuggedProcess", "held_processes"]

_KIND = "unisono-debug"
_MOST_TEXT = 20_000
_MOST_BYTES = 1 << 20
_STACK = 12
_WITHIN_S = 30.0
"""Seconds for a process to answer, including code that a debugger runs there."""

_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _HeldRank:
    """One held rank: its handle, and its activity."""

    control: ControlPlane
    activities: ActivityRegistry

    @property
    def thread(self) -> int:
        """Identifier of the held thread, or else of the one that makes the rank's calls; 0 without open communicators.

        The two threads differ if several threads use the rank's communicators.
        """
        known = self.activities.open()
        return HOLD.thread_in(known) or (known[-1].owner if known else 0)

    def describe(self) -> _Json:
        """Return the rank's location, and its current call."""
        known = self.activities.open()
        frame = users_frame(thread_frames().get(self.thread))
        inside = [activity.now for activity in known if activity.inside and activity.now is not None]
        held = HOLD.waits(self.thread)
        return {
            "state": "held" if held else f"in {format_call(*inside[-1][:4])}" if inside else "running",
            "site": site_of(frame),
            "function": None if frame is None else frame.f_code.co_qualname,
            "file": None if frame is None else frame.f_code.co_filename,
            "line": None if frame is None else frame.f_lineno,
        }

    def _frames(self) -> list[FrameType]:
        """Return the program's frames, innermost first, without frames of launchers and installed packages."""
        frame = users_frame(thread_frames().get(self.thread))
        found: list[FrameType] = []
        # Stop at the launcher's frame: multiprocessing calls the launcher from code given as a string, and that code's
        # frame looks like the program's.
        while (
            frame is not None and len(found) < _STACK and "unisono.launcher" not in str(frame.f_globals.get("__name__"))
        ):
            # Keep the innermost frame even if it does not belong to the program.
            if not found or is_users(frame.f_code.co_filename):
                found.append(frame)
            frame = frame.f_back
        return found

    def stack(self) -> list[str]:
        """Return the program's frames as text, innermost last."""
        return [f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_qualname}" for f in reversed(self._frames())]

    def evaluate(self, code: str, up: int) -> str:
        """Return an expression's value as text, or the output of statements.

        Args:
            code: Source, evaluated with the names in one of the rank's frames.
            up: Index of the frame that supplies the names, counted outward from the innermost frame, which is 0.
        """
        frames = self._frames()
        if up >= len(frames):
            return "its thread has ended, or has left this frame"
        frame = frames[up]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                try:
                    compiled = compile(code, "<debugger>", "eval")
                except SyntaxError:
                    exec(compile(code, "<debugger>", "exec"), frame.f_globals, frame.f_locals)
                else:
                    value = eval(compiled, frame.f_globals, frame.f_locals)
                    if value is not None:
                        printed.write(repr(value))
        except BaseException as error:  # code entered in the debugger must not end the rank or the session
            printed.write("".join(traceback.format_exception_only(error)).rstrip())
        return printed.getvalue()[:_MOST_TEXT]

    def end(self) -> None:
        """Fail every group of the rank, which ends the job."""
        for activity in self.activities.open():
            group = activity.group
            cause = Cause("AbortedError", group.rank, f"the debugger has ended the job at rank {group.rank}")
            self.control.report_failure(group, cause)


class DebuggedProcess:
    """The held ranks of this process, and the socket through which a debugger reaches them."""

    def __init__(self) -> None:
        self._ranks: dict[int, _HeldRank] = {}
        self._reason = self._job = ""
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        HOLD.on_go.append(self._end)

    def hold(self, ranks: Iterable[tuple[ControlPlane, ActivityRegistry]], job: str, reason: str | None) -> None:
        """Hold ranks of this process, or release all of them if `reason` is None.

        Args:
            ranks: Each rank's handle and activity.
            job: Identifier of the job, the same in all of its processes.
            reason: Text to show in a debugger that attaches.
        """
        if reason is None:
            HOLD.go()
            return
        self._reason = reason
        self._job = job
        for control, activities in ranks:
            if known := activities.open():
                group = known[0].group
                self._ranks[group.members[group.rank]] = _HeldRank(control, activities)
                HOLD.stop(None if control.simulated else known)
        if not self._ranks:
            return
        with self._lock:
            if self._listener is not None:
                return
            listener = self._listener = opened(_KIND)
        if listener is not None:
            spawn_thread(partial(self._serve, listener), "unisono debugger")

    def _end(self) -> None:
        """Close the socket, because the ranks are continuing."""
        with self._lock:
            listener = self._listener
            self._listener = None
        self._ranks.clear()
        if listener is not None:
            # `shutdown` wakes the accepting thread, which closes the socket.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)

    def _serve(self, listener: socket.socket) -> None:
        listener.setblocking(True)
        with listener:
            while self._listener is listener:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                spawn_thread(partial(self._answer_all, peer), "unisono debugger")

    def _answer_all(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError):
            if not is_this_user(peer):
                return
            channel = FrameChannel(most_bytes=_MOST_BYTES)
            for frame in channel.frames(partial(peer.recv, READ_BYTES), Kind.DEBUG):
                peer.sendall(channel.encode_json(Kind.ANSWER, self._answer(frame.json())))

    def _answer(self, asked: Any) -> _Json:
        if not isinstance(asked, dict):
            return {"error": "a request is an object with what to do"}
        do = asked.get("do")
        if do == "ranks":
            ranks = {str(number): rank.describe() for number, rank in sorted(self._ranks.items())}
            return {"reason": self._reason, "job": self._job, "ranks": ranks}
        number = asked.get("rank")
        rank = self._ranks.get(number) if isinstance(number, int) else None
        if rank is None:
            return {"error": f"rank {number} is not held in this process"}
        if do == "evaluate":
            up = asked.get("up")
            return {"text": rank.evaluate(str(asked.get("code", "")), up if isinstance(up, int) and up > 0 else 0)}
        if do == "stack":
            return {"stack": rank.stack()}
        if do == "step":
            return {"stepped": HOLD.step(rank.thread)}
        if do in ("go", "quit"):
            if do == "quit":
                rank.end()
            rank.control.hold(None)
            return {}
        return {"error": f"there is no request {do!r}"}


DEBUGGED = DebuggedProcess()
"""The process has one instance, because it has one clock and one set of sockets."""


class DebugConnection:
    """A debugger's connection to one process whose ranks are held.

    Args:
        pid, number: The socket's process ID and number, as returned by `held_processes`.

    Raises:
        CommError: The socket does not exist, or belongs to another user.
    """

    def __init__(self, pid: int, number: int) -> None:
        self.pid = pid
        self.number = number
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_WITHIN_S)
        try:
            self._socket.connect(path_of(_KIND, pid, number))
        except OSError as error:
            self._socket.close()
            raise CommError(f"process {pid} holds no ranks: {error}") from error
        # Any process can bind an abstract socket name, but the kernel knows which process has bound it.
        if user_of(self._socket)[0] != pid or not is_this_user(self._socket):
            self._socket.close()
            raise CommError(f"the socket of process {pid} belongs to another process or user")
        self._channel = FrameChannel(most_bytes=_MOST_BYTES)

    def ask(self, do: str, **more: Any) -> _Json:
        """Return the answer to one request.

        Raises:
            CommError: The process has ended, or has released its ranks.
            ValueError: The request is too long.
        """
        request = self._channel.encode_json(Kind.DEBUG, {"do": do, **more})
        try:
            self._socket.settimeout(_WITHIN_S)
            self._socket.sendall(request)
            frame = self._channel.receive(within(self._socket, _WITHIN_S), Kind.ANSWER)
            answer: _Json = {} if frame is None else frame.json()
        except (OSError, ValueError) as error:
            self.close()
            raise CommError(f"process {self.pid} has ended, or this connection to it") from error
        if frame is None:
            self.close()
            raise CommError(f"process {self.pid} has ended, or was let go")
        if "error" in answer:
            raise CommError(answer["error"])
        return answer

    def close(self) -> None:
        self._socket.close()


def held_processes() -> list[tuple[int, int]]:
    """Return the process ID of each socket of held ranks on this host, and the socket's number in that process."""
    return names(_KIND)
