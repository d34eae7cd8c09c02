"""Links between hosts: plain sockets between the first ranks of all hosts, for short packets.

Hosts compare their calls and reduce short tensors over these links. Unlike a library for bulk data, this module reads
the sockets in the waiting thread, sends each packet's length in the packet, and ends a wait immediately when the group
fails.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Sequence

from unisono.control.mesh import Mesh
from unisono.core import clock
from unisono.core.control import ControlPlane
from unisono.core.forks import invalidate_after_fork
from unisono.core.group import Group
from unisono.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["HostLinks", "Packet", "check_reachability", "meet"]

_HEAD = struct.Struct("<QQ16s")


class Packet:
    """A message from one host to the others: 16 bytes that all hosts compare, and content of any length."""

    __slots__ = ("content", "digest")

    def __init__(self, digest: bytes, content: memoryview | None = None) -> None:
        self.digest: bytes = digest
        self.content: memoryview = memoryview(b"") if content is None else content


class HostLinks:
    """This host's links: one socket to each other host.

    Args:
        peers: Connected sockets, by host number.
        ranks: For each host, the rank at the other end, for error messages.
        where: For each host, its address, for error messages.
    """

    def __init__(self, peers: dict[int, socket.socket], ranks: Sequence[int], where: Sequence[str]) -> None:
        self.peers = peers
        self._ranks = ranks
        self._where = where
        self._broken: BaseException | None = None
        self._round = 0
        self._closing = threading.Lock()
        for peer in peers.values():
            peer.setblocking(False)
        invalidate_after_fork(self)

    def swap(self, mine: Packet, theirs: dict[int, memoryview], deadline: float) -> bool:
        """Send a packet to every other host and receive one from each. Return whether all digests are the same.

        If a host's digest differs, its content is not received, and these links cannot be used any more.

        Args:
            mine: The packet to send to every other host.
            theirs: Buffers for the other hosts' content, by host number, each as long as the content of `mine`.
            deadline: Deadline on the library's clock.

        Raises:
            CommTimeoutError: A host has not sent its packet in time; the message names that host's first rank.
            PeerLostError: A connection has ended.
        """
        self._round += 1
        head = _HEAD.pack(len(mine.content), self._round, mine.digest)
        pending = [_Exchange(host, peer, head, mine.content, theirs[host]) for host, peer in self.peers.items()]
        started = clock.now()
        while pending := [swap for swap in pending if not self._moved(swap, head)]:
            alike = [swap for swap in pending if not swap.differs]
            # Two hosts whose digests differ stop reading from each other, so complete only the exchanges with the other
            # hosts.
            if not alike:
                return False
            watch = select.poll()
            for swap in alike:
                watch.register(swap.peer, select.POLLIN | (select.POLLOUT if swap.rest else 0))
            left_s = deadline - clock.now()
            if left_s <= 0 or not (watch.poll(left_s * 1000 + 1) or clock.now() < deadline):
                self._give_up(alike, clock.now() - started)
        return True

    def _moved(self, swap: _Exchange, head: bytes) -> bool:
        """Send and receive without blocking; return whether this exchange is complete."""
        try:
            return swap.move(head)
        except OSError as error:
            if self._broken is not None:
                raise self._broken from error
            host = swap.host
            raise PeerLostError(
                f"the connection to rank {self._ranks[host]} at {self._where[host]} was lost"
            ) from error

    def _give_up(self, pending: Sequence[_Exchange], waited_s: float) -> None:
        if self._broken is not None:
            raise self._broken
        late = [self._ranks[swap.host] for swap in pending]
        named = ", ".join(f"rank {self._ranks[swap.host]} at {self._where[swap.host]}" for swap in pending)
        raise CommTimeoutError(
            f"waited {waited_s:.1f} s for a message from {named}. Is it alive and reachable, or did it skip a call?",
            peer=late[0],
            waited_s=waited_s,
        )

    def abort(self, cause: BaseException) -> None:
        """End any wait in progress with this error. May be called from any thread."""
        with self._closing:
            if self._broken is None:
                self._broken = cause
                for peer in self.peers.values():
                    try:
                        peer.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        with self._closing:
            for peer in self.peers.values():
                peer.close()

    def invalidate_after_fork(self) -> None:
        """Close the sockets in a forked child."""
        for peer in self.peers.values():
            peer.close()


class _Exchange:
    """The exchange of a packet with one other host."""

    def __init__(self, host: int, peer: socket.socket, head: bytes, content: memoryview, into: memoryview) -> None:
        self.host = host
        self.peer = peer
        self.rest: list[memoryview] = [memoryview(head), content] if content else [memoryview(head)]
        self.differs = False
        self._head = bytearray(_HEAD.size)
        self._head_received = 0
        self._into = into
        self._received = 0

    def move(self, head: bytes) -> bool:
        """Send and receive without blocking; return whether both are done. Raises OSError if the connection ended."""
        if self.rest:
            self._send()
        return self._receive(head) and not self.rest

    def _send(self) -> None:
        try:
            sent = self.peer.sendmsg(self.rest)
        except BlockingIOError:
            return
        while self.rest and sent >= len(self.rest[0]):
            sent -= len(self.rest.pop(0))
        if self.rest:
            self.rest[0] = self.rest[0][sent:]

    def _receive(self, head: bytes) -> bool:
        """Read what has arrived; return whether the packet is complete."""
        while not self.differs:
            if self._head_received < _HEAD.size:
                head_rest = memoryview(self._head)[self._head_received :]
                buffers = [head_rest, self._into] if self._into else [head_rest]
            elif self._received < len(self._into):
                head_rest = memoryview(b"")
                buffers = [self._into[self._received :]]
            else:
                return True
            try:
                count = self.peer.recvmsg_into(buffers)[0]
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionError("the connection has ended")
            self._head_received += min(count, len(head_rest))
            self._received += max(0, count - len(head_rest))
            self.differs = self._head_received == _HEAD.size and self._head != head
        return False


_REACH_WITHIN_S = 10.0


def meet(
    group: Group, control: ControlPlane, hosts: Sequence[Sequence[int]], address: str, timeout: float
) -> HostLinks | None:
    """Return links to the other hosts on a host's first rank, and None on other ranks. Collective.

    For each pair of hosts, the host with the lower number listens at its own address, and the other host connects. The
    connecting host must prove that it knows a secret that the first rank has published through the control plane.

    Args:
        group: The ranks to connect. This function joins the group in the control plane.
        control: This rank's handle to the control plane.
        hosts: For each host, its ranks in the group.
        address: Address at which other hosts reach this host.
        timeout: Time limit for all hosts to join, in seconds. If an address does not respond, this function gives up
            after 10 s.

    Raises:
        CommError: A rank could not reach another rank. Raised on every rank; the message gives both ranks, the address,
            and the option or variable to set.
    """
    control.join(group)
    firsts = [ranks[0] for ranks in hosts]

    def conclude(problems: list[CommError]) -> None:
        """Raise an error on every rank if any rank reports problems."""
        text = ". ".join(problem.message for problem in problems)
        found = [text for text in control.exchange(group, "connections between hosts", text, patience_s) if text]
        if found:
            raise CommError(". ".join(found), rank=group.rank, size=group.size)

    within_s = min(timeout, _REACH_WITHIN_S)
    patience_s = timeout + _REACH_WITHIN_S
    if group.rank not in firsts:
        conclude([])
        return None
    links = Mesh(group, control, f"{group.name}/lanes", firsts, address).connect(timeout, within_s, conclude)
    where = {rank: "{}:{}".format(*peer.getpeername()[:2]) for rank, (peer, _) in links.items()}
    peers = {firsts.index(rank): peer for rank, (peer, _) in links.items()}
    return HostLinks(peers, firsts, [where.get(rank, "") for rank in firsts])


def check_reachability(
    group: Group, control: ControlPlane, hosts: Sequence[Sequence[int]], address: str, timeout: float
) -> None:
    """Check that all hosts can connect to each other, then close the connections. Raises the same errors as `meet`."""
    links = meet(group, control, hosts, address, timeout)
    if links is not None:
        links.close()
