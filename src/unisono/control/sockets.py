"""Sockets configured for the control plane, and errors for sockets that cannot be opened."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import weakref
from typing import Protocol

from unisono.errors import CommError, UnavailableError

__all__ = ["ForkUnsafeResource", "check_platform", "invalidate_after_fork", "listen", "recv_exactly", "tune"]

# Seconds after which a host that vanishes without a message is noticed, approximately.
_SILENCE_S = 20


class ForkUnsafeResource(Protocol):
    """An object with descriptors that a forked child must not keep open."""

    def invalidate_after_fork(self) -> None:
        """Close every descriptor, and touch nothing that the parent still uses."""
        ...


_holders: weakref.WeakSet[ForkUnsafeResource] = weakref.WeakSet()


def invalidate_after_fork(holder: ForkUnsafeResource) -> None:
    """Register a resource to be released in forked children; else a killed rank seems alive while its children are."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        with contextlib.suppress(OSError):
            holder.invalidate_after_fork()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def check_platform() -> None:
    """Raise UnavailableError where processes cannot be ranks."""
    if not hasattr(select, "poll"):
        raise UnavailableError(
            "ranks that are processes need select.poll, which Windows does not have; use backend='thread' or 'sim', "
            "or run the program in WSL"
        )


def tune(peer: socket.socket) -> None:
    """Disable Nagle's delay of small messages, and enable detection of a lost host."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _SILENCE_S // 2,
        "TCP_KEEPINTVL": _SILENCE_S // 4,
        "TCP_KEEPCNT": 2,
        "TCP_USER_TIMEOUT": _SILENCE_S * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket at exactly this address.

    Raises:
        CommError: The address cannot be listened at; the message names the reason and the fix.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # Connections of a server that has just ended do not keep its port from the next one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise CommError(f"cannot listen at {host}:{port}: {_reason(error, host, port)}") from error
    return listener


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is taken by another program; choose another port (in MASTER_PORT, or in "
            "tcp://host:port), the same on every rank, or end that program"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this host; rank 0 must run on the host that the address names"
    if error.errno == errno.EACCES:
        return f"port {port} is reserved; choose one from 1024 to 65535"
    return f"{error.strerror or error}"


def recv_exactly(peer: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes. Raises `ConnectionError` if the connection is closed before."""
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed immediately")
        data += more
    return data
