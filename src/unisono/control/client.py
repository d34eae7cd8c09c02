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

from unisono import serialization
from unisono.control import handshake
from unisono.control.client_base import CLOSED, ControlClient, PendingRequest, SharedObjects, news_of, reply_of
from unisono.control.encryption import UntrustedError
from unisono.control.inspect_socket import InspectSocket
from unisono.control.process_exit import close_at_exit
from unisono.control.sockets import check_platform, limit_silence, outage
from unisono.core import clock
from unisono.core.failure import Cause
from unisono.core.forks import invalidate_after_fork
from unisono.core.frames import Frame, FrameChannel, Kind
from unisono.core.group import Group
from unisono.errors import CommError, CommTimeoutError
from unisono.host.network import host_identity, host_in, in_zone_of, is_loopback, means_here

__all__ = ["ClientConnection", "SocketControl", "connect", "place_of", "reach"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CLOSE_WITHIN_S = 5.0
_NOTIFY_WITHIN_S = 1.0


class SocketControl(ControlClient):
    """A handle to the control plane at `address`.

    The handle has one connection for requests and answers, and another for notifications, such as group failures. The
    thread that waits for an answer reads it itself, because being woken by another thread would take longer than the
    answer itself. A daemon thread reads the notifications, and runs the callbacks: `on_orphan`, and those passed to
    `join`. Callbacks must not send requests on this handle.

    Args:
        address: Host and port of the server. The server may start later than this client.
        secret: The server's secret.
        timeout: Seconds to reach the server, and later to wait for answers that do not depend on other ranks.
        on_orphan: Called if the server disappears without announcing that it shuts down.
        reach_within_s: Seconds to reach the server; `timeout` if None.
        host_rank: Rank (in the job) that hosts the server, named in the error if the server is lost; None if no rank
            hosts it.
        rank: This process's rank in the job; error messages on other ranks name it if this process has a different
            secret.

    Attributes:
        server_lost: Whether the server has shut down, or the connection to it was lost.
        local_host: This host's address on the route to the server, at which peers can reach it.

    Raises:
        CommTimeoutError: No server answers at the address.
        CommError: Another program answers at the address, the secrets differ, or only one side uses TLS.
    """

    connectable = True

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        timeout: float = 30.0,
        on_orphan: Callable[[], None] | None = None,
        reach_within_s: float | None = None,
        host_rank: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(timeout, SharedObjects())
        self._host_rank = host_rank
        self.address = address
        self._on_orphan = on_orphan
        self._process = os.getpid()
        self._reading = threading.Lock()
        self._heartbeat_s: float | None = None
        self.server_lost: bool = False
        self._connection, self._news = connect(
            address, secret, timeout if reach_within_s is None else reach_within_s, rank
        )
        self.local_host: str = self._connection.local_host
        self._inspect_socket = InspectSocket(address, secret)
        self._news.serve(self._inspect_socket)
        invalidate_after_fork(self)
        close_at_exit(self)
        self._reader = threading.Thread(target=self._read_news, name="unisono control client", daemon=True)
        self._reader.start()

    def address_for_all(self, group: Group, timeout: float) -> str:
        """Return this host's address for a group's other ranks; all ranks on this host get the same one. Collective.

        If the server is on this host, return the address at which ranks on other hosts have reached the server.
        Resolving the host's own name would often return a loopback address, or one of an IP version that the other
        hosts do not use.
        """
        here = host_identity()
        reports = self.exchange(group, "addresses", (here, self.local_host, self._connection.remote_host), timeout)
        far = (in_zone_of(reached, self.local_host) for host, _, reached in reports if host != here)
        # Skip loopback addresses, because every host has its own loopback.
        own = (address for address in far if means_here(address) and not is_loopback(address))
        return next(own, next(address for host, address, _ in reports if host == here))

    @property
    def _where(self) -> str:
        return place_of(self.address)

    def register_rank(self, job: str, rank: int, size: int, process: str) -> str:
        """Register for the next world group of a job, and return the group's name: "world1", then "world2", ...

        To be notified of failures, the caller must also join the group.

        Args:
            job: Prefix of the names.
            rank: This rank.
            size: Number of ranks.
            process: Identifier of the calling process. While the process that holds a rank is connected, any other
                process that claims the rank is rejected.

        Raises:
            MismatchError: Two processes claim the same rank, or ranks pass different sizes.
        """
        return str(self._request("enrol", job, rank, size, process))

    def identify(self, label: str) -> None:
        """Label this client, or relabel it. The server passes the last label to `on_left` when the client leaves."""
        self._request("identify", label)

    def set_heartbeat(self, seconds: float) -> None:
        if self._heartbeat_s is None:
            # Use one second less than requested, because `limit_silence` may take effect up to a second late.
            self._heartbeat_s = max(1.0, seconds - 1.0)
            self._news.limit_silence(self._heartbeat_s)
            self._request("heartbeat", self._heartbeat_s)

    def outage(self) -> str:
        return self._news.outage()

    def fail_all(self, cause: Cause) -> None:
        """Report a failure to every group."""
        self._request("fail_all", cause.kind, cause.message)

    def leave(self, group: Group, patience: float = 0.0) -> None:
        super().leave(group, patience)
        self._shared.drop(group.name)

    def close(self) -> None:
        if self._process != os.getpid():
            return
        if self._ended is None:
            with contextlib.suppress(CommError):
                self._finish(self._begin("bye"), min(self._patience_s, _CLOSE_WITHIN_S))
            self._end(CLOSED, fails_groups=False)
        self._connection.hang_up()
        self._news.hang_up()
        if self._reader is not threading.current_thread():
            self._reader.join(_CLOSE_WITHIN_S)
        self.invalidate_after_fork()

    def invalidate_after_fork(self) -> None:
        """Close the descriptors in a forked child."""
        self._connection.close()
        self._news.close()
        self._inspect_socket.close()

    # -- requests and answers ------------------------------------------------------------------
    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        if self._process != os.getpid():
            raise CommError(
                f"this communicator belongs to process {self._process}, of which this process is a fork; create a "
                "new communicator here, or start processes with spawn or forkserver"
            )
        if self._reader is threading.current_thread():
            raise CommError("a callback of the control plane must not call it; use another thread")
        try:
            self._connection.send(serialization.encode((number, words)), clock.now() + self._patience_s)
        except OSError:
            self._stop()

    def _notify(self, words: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(serialization.encode((0, words)), clock.now() + _NOTIFY_WITHIN_S)

    def _wait(self, waiter: PendingRequest, timeout: float) -> bool:
        """Read replies for all threads until this thread's reply has arrived, or sleep while another thread reads."""
        deadline = clock.now() + timeout
        left_s = timeout
        while waiter.reply is None:
            if self._reading.acquire(blocking=False):
                try:
                    self._read_until(waiter, deadline)
                finally:
                    self._reading.release()
                    self._wake_others()
            else:
                waiter.awake.wait(left_s)
            left_s = deadline - clock.now()
            if left_s <= 0:
                break
        return waiter.reply is not None

    def _read_until(self, waiter: PendingRequest, deadline: float) -> None:
        try:
            while waiter.reply is None:
                left_s = deadline - clock.now()
                frames = self._connection.receive(left_s, Kind.REPLY)
                for frame in frames:
                    self.receive(reply_of(frame.content))
                if left_s <= 0 and not frames:
                    return
        except (OSError, ValueError):
            self._stop()
            waiter.awake.wait(deadline - clock.now())

    def _wake_others(self) -> None:
        """Wake all waiting threads, because it is unknown which are asleep; one of them takes over reading."""
        for other in list(self._waiters.values()):
            if other.reply is None:
                other.awake.set()

    def _stop(self) -> None:
        """Handle the end of the connection.

        Only the thread that reads notifications knows why the connection ended, so that thread notifies all waiters.
        """
        self._news.hang_up()

    # -- notifications -------------------------------------------------------------------------
    def _read_news(self) -> None:
        goodbye = False
        away = ""
        try:
            while not goodbye:
                for frame in self._news.receive(None, Kind.NEWS):
                    news = news_of(frame)
                    goodbye = goodbye or news[1] == "goodbye"
                    self._call(None if goodbye else self.receive(news))
        except (OSError, ValueError) as error:
            _log.debug("%s: %s", self._where, error)
            away = self._news.outage(error)
        # Set `server_lost` before any waiter is woken, because waiters check this flag.
        self.server_lost = self._ended is None
        if goodbye:
            cause = Cause("ClosedError", None, f"{self._where} has ended: rank 0 or the launcher closed it")
            self._end(cause, fails_groups=False)
        elif self._ended is None:
            host = "" if self._host_rank is None else f"rank {self._host_rank} of the job, its host, was lost: "
            why = away or "its process ended, or the connection broke"
            cause = Cause("PeerLostError", None, f"{host}{self._where} was lost: {why}")
            for callback in self._end(cause, fails_groups=True, failed_rank=self._host_rank):
                self._call(callback)
            self._call(self._on_orphan)
        self._connection.hang_up()

    def _call(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            try:
                callback()
            except Exception:
                _log.exception("a failure callback of a group raised an exception")


_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)
_HELLO_WITHIN_S = 5.0
_MAX_POLL_S = 1e6


class ClientConnection:
    """An authenticated connection. One thread at a time may send, and one may receive.

    Attributes:
        local_host: This host's address on the route to the server.
    """

    def __init__(self, peer: socket.socket, channel: FrameChannel) -> None:
        peer.setblocking(False)
        self._peer = peer
        self.local_host: str = host_in(peer.getsockname())
        self._host = ""
        self._channel = channel
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._writable = select.poll()
        self._readable.register(peer, select.POLLIN)
        self._writable.register(peer, select.POLLOUT)
        self._inspect_socket: InspectSocket | None = None
        self._inspect_number = -1

    @property
    def remote_host(self) -> str:
        """The address at which this host has reached the server."""
        return host_in(self._peer.getpeername())

    def send(self, content: bytes, deadline: float, kind: Kind = Kind.REQUEST) -> None:
        """Send a request. Raises `OSError` unless the whole request is sent by `deadline` (on the library's clock)."""
        with self._sending:
            rest = memoryview(self._channel.encode(kind, content))
            while rest:
                try:
                    rest = rest[self._peer.send(rest) :]
                except BlockingIOError:
                    if not self._writable.poll(_milliseconds(deadline - clock.now())):
                        raise TimeoutError("the server does not read") from None

    def serve(self, inspect_socket: InspectSocket) -> None:
        """Also answer requests at an inspect socket while a thread waits for data on this connection."""
        if inspect_socket.socket is not None:
            self._inspect_socket = inspect_socket
            self._inspect_number = inspect_socket.socket.fileno()
            self._readable.register(inspect_socket.socket, select.POLLIN)

    def receive(self, timeout: float | None, kind: Kind) -> list[Frame]:
        """Return the frames that have arrived, or none on timeout. Raises `OSError` if the connection has ended."""
        found = dict(self._readable.poll(None if timeout is None else _milliseconds(timeout)))
        if self._inspect_socket is not None and self._inspect_number in found:
            self._inspect_socket.answer()
        return self._channel.available(self._peer, kind) if found else []

    def limit_silence(self, seconds: float) -> None:
        """End the connection once the server's host has been silent for `seconds`."""
        self._host = self._peer.getpeername()[0]
        limit_silence(self._peer, seconds)

    def outage(self, error: BaseException | None = None) -> str:
        """Return how long the server's host has been silent, as a sentence; empty if it responds or no limit is set."""
        return outage(self._peer, self._host, error) if self._host else ""

    def hang_up(self) -> None:
        """End the connection, which wakes the threads that read from it."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._peer.close()


def place_of(address: tuple[str, int]) -> str:
    """Return the name of the control plane at an address."""
    return f"the control plane at {address[0]}:{address[1]}"


def _milliseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), _MAX_POLL_S) * 1000 + 0.5)


def connect(
    address: tuple[str, int], secret: bytes, timeout: float, rank: int | None = None
) -> tuple[ClientConnection, ClientConnection]:
    """Open two connections to the server, for requests and for notifications. The server may start later.

    If the secrets differ, `rank` is reported to the server, unless it is None.

    Raises:
        CommTimeoutError: No server answers at the address.
        CommError: Another program answers at the address, or the secrets differ.
        UnavailableError: The platform is Windows.
    """
    check_platform()
    return reach(address, timeout, lambda left_s: _both(address, secret, left_s, rank))


def reach(address: tuple[str, int], timeout: float, attempt: Callable[[float], T]) -> T:
    """Call `attempt`, passing a time limit in seconds, until it succeeds; return its result.

    Raises:
        CommTimeoutError: No server answers at the address.
        CommError: The host does not exist.
    """
    deadline = clock.now() + timeout
    failures = 0
    while True:
        try:
            return attempt(max(0.05, min(_HELLO_WITHIN_S, deadline - clock.now())))
        except UnicodeError as error:
            raise CommError(f"{address[0]!r} is not the name of a host") from error
        except UntrustedError as error:
            raise CommError(f"no connection to {address[0]}:{address[1]}: {error}") from error
        except OSError as error:
            pause = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            failures += 1
            if clock.now() + pause >= deadline:
                raise CommTimeoutError(
                    f"no answer from {address[0]}:{address[1]} after {timeout:.1f} s ({error.strerror or error}). "
                    "Is rank 0 running there, is the address right on every rank, and is the port open?",
                    waited_s=timeout,
                ) from error
            time.sleep(pause)


def _both(
    address: tuple[str, int], secret: bytes, timeout: float, rank: int | None
) -> tuple[ClientConnection, ClientConnection]:
    with contextlib.ExitStack() as undo:
        requests = undo.enter_context(contextlib.closing(_reach(address, secret, timeout, rank)))
        news = undo.enter_context(contextlib.closing(_reach(address, secret, timeout, rank)))
        # The server assigns a number to the client, which the second connection sends to identify the client.
        number = _request(requests, requests, ("number",), timeout)
        _request(news, requests, ("news", number), timeout)
        undo.pop_all()
    return requests, news


def _request(out: ClientConnection, back: ClientConnection, words: tuple[object, ...], timeout: float) -> object:
    out.send(serialization.encode((1, words)), clock.now() + timeout)
    frames = back.receive(timeout, Kind.REPLY)
    if not frames:
        raise TimeoutError("the server does not answer")
    return reply_of(frames[0].content)[2]


def _reach(address: tuple[str, int], secret: bytes, timeout: float, rank: int | None) -> ClientConnection:
    try:
        return ClientConnection(*handshake.connect(address, secret, timeout, rank))
    except handshake.AuthenticationError as error:
        if error.versions:
            raise CommError(f"the control plane at {address[0]}:{address[1]} {error.versions}") from error
        if not error.other_secret:
            raise CommError(
                f"the program at {address[0]}:{address[1]} is not a control plane of unisono; choose another port"
            ) from error
        raise CommError(
            f"authentication failed: this rank and the control plane at {address[0]}:{address[1]} use different "
            "secrets. Set UNISONO_SECRET to the same value on every host, or pass the same secret to every rank"
        ) from error
