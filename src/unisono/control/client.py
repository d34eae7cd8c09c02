"""One rank's connection to a control server."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from unisono import wire
from unisono.control.base import Cause
from unisono.control.channel import HELLO_BYTES, PROOF_BYTES, Channel, Greeting
from unisono.control.requester import Requester
from unisono.control.sockets import close_after_fork, tune
from unisono.errors import CommError, CommTimeoutError

__all__ = ["SocketControl"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_CLOSE_WITHIN_S = 5.0
_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)
_HELLO_WITHIN_S = 5.0


class SocketControl(Requester):
    """A handle to the control plane at `address`, with one daemon thread that reads.

    Callbacks of `join` and `on_orphan` run in that thread; they must not ask anything of this handle.

    Args:
        address: Host and port of the server. It may start later than this client.
        secret: The one that the server has.
        timeout: Seconds to reach it, and later for an answer that nothing holds up.
        on_orphan: Called if the server vanishes without a goodbye.

    Raises:
        CommTimeoutError: Nobody answers there.
        CommError: Something else answers there, or the secrets differ.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        timeout: float = 30.0,
        on_orphan: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(timeout)
        self._address, self._on_orphan = address, on_orphan
        self._process = os.getpid()
        self._socket, self._channel = _connect(address, secret, timeout)
        self._sending = threading.Lock()
        self._sharing = threading.RLock()
        self._objects: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, name="unisono control client", daemon=True)
        self._reader.start()
        close_after_fork(self)

    @property
    def local_host(self) -> str:
        """The address of this host on the way to the server: its peers can reach it there."""
        host: str = self._socket.getsockname()[0]
        return host

    @property
    def _where(self) -> str:
        return f"the control plane at {self._address[0]}:{self._address[1]}"

    def enrol(self, job: str, rank: int, process: str) -> str:
        """The name of the next world of a job that this rank is to be in: "world1", "world2", ...

        Args:
            process: Unique to the calling process. Another process that claims a rank whose holder
                is still connected is refused.

        Raises:
            MismatchError: Two processes claim the same rank.
        """
        return str(self._ask("enrol", job, rank, process))

    def share(self, key: str, make: Callable[[], T]) -> T:
        with self._sharing:
            if key not in self._objects:
                self._objects[key] = make()
            shared: T = self._objects[key]
            return shared

    def close(self) -> None:
        if self._process != os.getpid() or self._socket.fileno() < 0:
            return
        if self._ended is None:
            with contextlib.suppress(CommError):
                self._finish(self._begin("bye"), min(self._patience_s, _CLOSE_WITHIN_S))
            self._end(Cause("ClosedError", None, "this control handle is closed"), fails_groups=False)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(_CLOSE_WITHIN_S)
        self._socket.close()

    def let_go(self) -> None:
        """Close the descriptor, as a forked child does."""
        self._socket.close()

    # -- out -----------------------------------------------------------------------------------
    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        if self._process != os.getpid():
            raise CommError(
                f"this communicator belongs to process {self._process}, of which this one is a fork; "
                "make a new one here, or start processes with multiprocessing's spawn or forkserver"
            )
        if self._reader is threading.current_thread():
            raise CommError("a callback of the control plane must not ask anything of it; use another thread")
        content = wire.encode((number, words))
        deadline = time.monotonic() + self._patience_s
        with self._sending:
            try:
                self._send_all(self._channel.seal(content), deadline)
            except OSError:
                # The reader finds out, and tells everybody who waits, this request among them.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self, frame: bytes, deadline: float) -> None:
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._socket.send(rest, _DO_NOT_WAIT) :]
            except BlockingIOError:
                if not select.select([], [self._socket], [], max(0.0, deadline - time.monotonic()))[1]:
                    raise TimeoutError("the server reads nothing") from None

    # -- in ------------------------------------------------------------------------------------
    def _read(self) -> None:
        goodbye = False
        try:
            while data := self._socket.recv(_READ_BYTES):
                for content in self._channel.open(data):
                    reply = wire.decode(content)
                    goodbye = goodbye or reply[1] == "goodbye"
                    if not goodbye:
                        self._call(self._receive(reply))
        except (OSError, ValueError) as error:
            _log.debug("%s: %s", self._where, error)
        if goodbye:
            cause = Cause("ClosedError", None, f"{self._where} has ended: rank 0 or the launcher closed it")
            self._end(cause, fails_groups=False)
        elif self._ended is None:
            cause = Cause("PeerLostError", None, f"{self._where} was lost: its process ended, or the way to it")
            for callback in self._end(cause, fails_groups=True):
                self._call(callback)
            self._call(self._on_orphan)

    def _call(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            try:
                callback()
            except Exception:
                _log.exception("a callback on the failure of a group failed itself")


_DO_NOT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)


def _connect(address: tuple[str, int], secret: bytes, timeout: float) -> tuple[socket.socket, Channel]:
    """Try again and again, since the server may start later."""
    deadline = time.monotonic() + timeout
    attempt = 0
    while True:
        try:
            return _greet(address, secret, max(0.05, min(_HELLO_WITHIN_S, deadline - time.monotonic())))
        except OSError as error:
            pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
            attempt += 1
            if time.monotonic() + pause >= deadline:
                host, port = address
                raise CommTimeoutError(
                    f"nobody answers at {host}:{port} after {timeout:.1f} s ({error.strerror or error}). "
                    "Is rank 0 running there, is the address right on every rank, and is the port open?",
                    waited_s=timeout,
                ) from error
            time.sleep(pause)


def _greet(address: tuple[str, int], secret: bytes, timeout: float) -> tuple[socket.socket, Channel]:
    peer = socket.create_connection(address, timeout)
    try:
        tune(peer)
        greeting = Greeting(secret, client=True)
        peer.sendall(greeting.hello)
        if not greeting.meet(_exactly(peer, HELLO_BYTES)):
            raise CommError(
                f"what answers at {address[0]}:{address[1]} is no control plane of unisono; choose another port"
            )
        if not greeting.accepts(_exactly(peer, PROOF_BYTES)):
            raise CommError(
                f"the control plane at {address[0]}:{address[1]} does not know this secret, the secrets differ: "
                "set UNISONO_SECRET to the same value on every host, or pass the same secret to every rank"
            )
        peer.sendall(greeting.proof())
        peer.settimeout(None)
    except BaseException:
        peer.close()
        raise
    return peer, greeting.channel()


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed at once")
        data += more
    return data
