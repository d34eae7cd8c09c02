"""Connections between all ranks of a group, each of which has proved that it belongs there."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import struct
import threading
import time

from unisono import wire
from unisono.control import Control, error_of
from unisono.control.channel import HELLO_BYTES, PROOF_BYTES, Channel, Greeting
from unisono.control.sockets import listen, recv_exactly, tune
from unisono.crew import Crew
from unisono.errors import CommError, CommTimeoutError
from unisono.group import Group

__all__ = ["Link", "meet"]

Link = tuple[socket.socket, Channel]
"""A connection, and what seals and opens what travels on it."""

_HELLO_WITHIN_S = 5.0
_ACCEPT_SLICE_S = 0.01
_MOST_STRANGERS = 64
_RANK = struct.Struct("<I")


def meet(group: Group, control: Control, address: str, timeout: float) -> dict[int, Link]:
    """A connection to every other rank. Collective.

    Each rank listens at a port of its own until all are there, and no longer; the higher rank of two connects. The
    secret by which they know each other is told over the control plane. Who does not know it is hung up on.

    Raises:
        CommTimeoutError: Not all came.
    """
    deadline = time.monotonic() + timeout
    links: dict[int, Link] = {}
    with contextlib.closing(listen(address, 0)) as listener:
        control.set(f"{group.name}/mail at {group.rank}", wire.encode(listener.getsockname()[:2]))
        if group.rank == 0:
            control.set(f"{group.name}/mail secret", secrets.token_bytes(32))
        try:
            secret = control.get(f"{group.name}/mail secret", timeout, group)
            for peer in range(group.rank):
                place = wire.decode(control.get(f"{group.name}/mail at {peer}", _left(deadline), group))
                links[peer] = _reach(place, secret, group.rank, peer, deadline)
            links.update(_await(listener, secret, set(range(group.rank + 1, group.size)), group, control, deadline))
        except BaseException:
            for peer_socket, _ in links.values():
                peer_socket.close()
            raise
    for peer_socket, _ in links.values():
        peer_socket.setblocking(False)
    return links


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def _reach(place: tuple[str, int], secret: bytes, rank: int, peer: int, deadline: float) -> Link:
    try:
        line = socket.create_connection((place[0], place[1]), min(_left(deadline), 30.0))
    except OSError as error:
        raise CommTimeoutError(
            f"rank {peer} cannot be reached at {place[0]}:{place[1]} ({error}). Is that the address of its host that "
            "the others can reach, and are its ports open?",
            peer=peer,
        ) from error
    try:
        line.settimeout(min(_left(deadline), 30.0))
        tune(line)
        greeting = Greeting(secret, client=True)
        line.sendall(greeting.hello)
        if not greeting.meet(recv_exactly(line, HELLO_BYTES)) or not greeting.accepts(recv_exactly(line, PROOF_BYTES)):
            raise CommError(f"something else than rank {peer} answers at {place[0]}:{place[1]}", peer=peer)
        channel = greeting.channel()
        line.sendall(greeting.proof() + channel.seal(_RANK.pack(rank)))
    except OSError as error:
        line.close()
        raise CommError(f"rank {peer} hung up while this rank connected to it: {error}", peer=peer) from error
    except BaseException:
        line.close()
        raise
    return line, channel


def _await(
    listener: socket.socket, secret: bytes, missing: set[int], group: Group, control: Control, deadline: float
) -> dict[int, Link]:
    """Let the others in. Strangers are heard each in a thread of its own, so that none holds up a rank."""
    found: dict[int, Link] = {}
    known: queue.SimpleQueue[tuple[int, Link]] = queue.SimpleQueue()
    crew, strangers = Crew("unisono mail"), threading.Semaphore(_MOST_STRANGERS)
    listener.settimeout(_ACCEPT_SLICE_S)
    while missing - found.keys():
        with contextlib.suppress(TimeoutError):
            line, _ = listener.accept()
            if strangers.acquire(blocking=False):
                # Mypy cannot type a lambda's default.
                crew.run(lambda line=line: _hear(line, secret, known, strangers))  # type: ignore[misc]
            else:
                line.close()
        while True:
            with contextlib.suppress(queue.Empty):
                peer, link = known.get(block=len(missing - found.keys()) > 0, timeout=0.001)
                if peer in missing and peer not in found:
                    found[peer] = link
                else:
                    link[0].close()
                continue
            break
        cause = control.cause(group)
        if time.monotonic() > deadline or cause is not None:
            for line, _ in found.values():
                line.close()
            if cause is not None:
                raise error_of(cause, group)
            first = min(missing - found.keys())
            raise CommTimeoutError(f"rank {first} has not connected to the mailbox of rank {group.rank}", peer=first)
    return found


def _hear(
    line: socket.socket, secret: bytes, known: queue.SimpleQueue[tuple[int, Link]], strangers: threading.Semaphore
) -> None:
    """Whoever it is has a few seconds to prove that it is a rank."""
    try:
        line.settimeout(_HELLO_WITHIN_S)
        tune(line)
        greeting = Greeting(secret, client=False)
        if not greeting.meet(recv_exactly(line, HELLO_BYTES)):
            raise ConnectionError("it speaks of something else")
        line.sendall(greeting.hello + greeting.proof())
        if not greeting.accepts(recv_exactly(line, PROOF_BYTES)):
            raise ConnectionError("it does not know the secret")
        channel = greeting.channel()
        (content,) = channel.open(recv_exactly(line, len(Channel(secret, secret).seal(_RANK.pack(0)))))
        known.put((_RANK.unpack(content)[0], (line, channel)))
    except (OSError, ValueError):
        line.close()
    finally:
        strangers.release()
