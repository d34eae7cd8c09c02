"""Authenticated connections between ranks: all ranks listen, and in each pair the higher rank connects."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import selectors
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from unisono import serialization
from unisono.control.handshake import Acceptor, AuthenticationError, connect
from unisono.control.sockets import limit_silence, listen
from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.frames import FrameChannel
from unisono.core.group import Group
from unisono.errors import ClosedError, CommError, CommTimeoutError
from unisono.host.network import INTERFACE, host_in, in_zone_of, interface_of, is_loopback

__all__ = ["Link", "Mesh", "say_farewell"]

Link = tuple[socket.socket, FrameChannel]
"""A non-blocking connection, and the channel that encodes and decodes its frames."""

_LOOK_EVERY_S = 0.1
_LEAST_S = 0.1
_LAST_PROOF_WITHIN_S = 5.0
_FAREWELL_S = 0.3
_AFTER_CLOSE_S = 60
_READ_BYTES = 64 << 10
_SPARE = 4
"""Number of additional descriptors needed while ranks connect."""


def say_farewell(connections: Sequence[socket.socket], broken: BaseException | None = None) -> None:
    """Shut down sending, and discard incoming data, because closing immediately may cut off the last messages.

    Args:
        connections: Connections that the caller is about to close.
        broken: Error that broke the group, or None. After an error, `say_farewell` does not wait, because no rank waits
            for a failed group's messages.
    """
    waiting = {connection.fileno(): connection for connection in connections if connection.fileno() >= 0}
    watch = select.poll()
    for number, connection in waiting.items():
        # Limit how long the peer's host may be silent. Otherwise, the kernel would keep retransmitting to a lost host
        # even after this process has ended.
        limit_silence(connection, _AFTER_CLOSE_S)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        watch.register(number, select.POLLIN)
    failed = broken is not None and not isinstance(broken, ClosedError)
    deadline = clock.now() + (0.0 if failed else _FAREWELL_S)
    while waiting and (left := deadline - clock.now()) > 0:
        for number, _ in watch.poll(left * 1000):
            try:
                over = not waiting[number].recv(_READ_BYTES)
            except OSError:
                over = True
            if over:
                watch.unregister(number)
                del waiting[number]


class Mesh:
    """One rank's part in connecting a group's ranks. The ranks exchange addresses and a secret via the control plane.

    Args:
        group: The ranks' group, whose failure ends the wait for their addresses.
        control: This rank's handle.
        topic: Prefix of the keys in the control plane.
        ranks: The ranks to connect, including this one; the first one creates the secret.
        address: This host's address, for the other ranks.
        apart: Ranks that this rank neither connects to nor accepts connections from.
    """

    def __init__(
        self,
        group: Group,
        control: ControlPlane,
        topic: str,
        ranks: Sequence[int],
        address: str,
        apart: Collection[int] = (),
    ) -> None:
        self._group = group
        self._control = control
        self._topic = topic
        self._ranks = ranks
        self._others = [rank for rank in ranks if rank != group.rank and rank not in apart]
        self._address = address
        self._links: dict[int, Link] = {}

    def connect(self, timeout: float, within_s: float, conclude: Callable[[list[CommError]], None]) -> dict[int, Link]:
        """Connect to the lower ranks, and accept connections from the higher ranks. Collective.

        Args:
            timeout: Seconds for the lower ranks to publish their addresses.
            within_s: Seconds within which all lower ranks must answer.
            conclude: Function that receives this rank's errors, exchanges them with the other ranks, and raises an
                error if any rank has failed to connect.

        Raises:
            CommError: A rank is missing, or `conclude` raised.
        """
        rank = self._group.rank
        if rank == self._ranks[0]:
            self._publish("secret", secrets.token_bytes(32))
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            try:
                listener = undo.enter_context(listen(self._address, 0))
                _reserve(listener, len(self._others))
            except CommError as error:
                self._publish(f"at {rank}", ("", 0))
                conclude([CommError(f"rank {rank} {error.message}", peer=rank)])
                raise
            self._publish(f"at {rank}", (host_in(listener.getsockname()), listener.getsockname()[1]))
            secret = self._learn("secret", timeout)
            accepting = _Accepting(listener, secret, {other for other in self._others if other > rank}, self._links)
            undo.callback(accepting.end)
            addresses = {other: self._learn(f"at {other}", timeout) for other in self._others if other < rank}
            deadline = clock.now() + within_s
            found = [self._reach(other, address, secret, deadline) for other, address in addresses.items()]
            conclude([problem for problem in found if problem is not None])
            missing = accepting.end(_LAST_PROOF_WITHIN_S)
            if missing:
                raise CommTimeoutError(f"rank {min(missing)} has not connected to rank {rank}", peer=min(missing))
            undo.pop_all()
            listener.close()
        for peer, _ in self._links.values():
            peer.setblocking(False)
        return self._links

    def _publish(self, name: str, value: Any) -> None:
        self._control.set(f"{self._topic} {name}", serialization.encode(value))

    def _learn(self, name: str, timeout: float) -> Any:
        return serialization.decode(self._control.get(f"{self._topic} {name}", timeout, self._group))

    def _reach(self, rank: int, address: tuple[str, int], secret: bytes, deadline: float) -> CommError | None:
        """Connect to a rank; return None, or the reason for a failure."""
        host, port = address
        if not host:
            # A rank that cannot listen publishes an empty host, and reports its own error.
            return None
        host = in_zone_of(host, self._address)
        try:
            self._links[rank] = connect((host, port), secret, max(_LEAST_S, deadline - clock.now()), self._group.rank)
        except AuthenticationError as error:
            return CommError(f"the program at {host}:{port} {error.versions or f'is not rank {rank}'}", peer=rank)
        except OSError as error:
            return CommTimeoutError(self._unreachable(rank, host, port, error), peer=rank)
        return None

    def _unreachable(self, rank: int, host: str, port: int, error: OSError) -> str:
        interface = interface_of(self._address)
        mine = f"{self._address} on {interface}" if interface else self._address
        why = error.strerror or str(error) or type(error).__name__
        text = f"rank {self._group.rank} (at {mine}) cannot reach rank {rank} at {host}:{port} ({why})"
        if is_loopback(host):
            text += f". That is the loopback of the host of rank {rank}, which no other host can reach"
        return (
            f"{text}. On the host of rank {rank}, set {INTERFACE} to the network interface by which the others reach "
            "it (or pass interface= to init; `ip -brief address` lists them), and check that no firewall blocks "
            "the port"
        )

    def _close(self) -> None:
        for peer, _ in self._links.values():
            peer.close()


def _reserve(listener: socket.socket, connections: int) -> None:
    """Raise an error if the process cannot open this many connections; otherwise, a peer would wait in vain."""
    try:
        with contextlib.ExitStack() as copies:
            for _ in range(connections + _SPARE):
                copies.callback(os.close, os.dup(listener.fileno()))
    except OSError as error:
        raise CommError(
            f"cannot open a connection to each of the other ranks: {error.strerror}. The limit of this process is "
            f"{os.sysconf('SC_OPEN_MAX')}: raise it (`ulimit -n`), or close communicators that are not needed"
        ) from error


class _Accepting:
    """Thread that accepts connections from higher ranks.

    The higher ranks need not wait while this rank tries to reach the lower ranks.
    """

    def __init__(self, listener: socket.socket, secret: bytes, missing: set[int], links: dict[int, Link]) -> None:
        self._missing = missing
        self._links = links
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(listener, secret), name="unisono mesh", daemon=True)
        self._thread.start()

    def _run(self, listener: socket.socket, secret: bytes) -> None:
        selector = selectors.DefaultSelector()
        with selector, contextlib.closing(Acceptor(listener, secret, selector)) as acceptor:
            while self._missing and not self._ended:
                for key, _ in selector.select(_LOOK_EVERY_S):
                    if key.fileobj is listener:
                        acceptor.accept()
                    elif (channel := acceptor.advance(key.data)) is not None:
                        self._admit(key.data.rank, key.data.peer, channel)
                acceptor.tidy()

    def _admit(self, rank: int, peer: socket.socket, channel: FrameChannel) -> None:
        if rank in self._missing:
            self._links[rank] = peer, channel
            self._missing.remove(rank)
        else:
            peer.close()

    def end(self, patience_s: float = 0.0) -> set[int]:
        """Wait at most `patience_s` seconds for ranks that have not connected yet; return those still missing."""
        self._thread.join(patience_s)
        self._ended = True
        self._thread.join()
        return self._missing
