"""Links between hosts: plain sockets between one rank on each host, for short packets.

They carry agreements between hosts and short data. Unlike in libraries for bulk data, the waiting thread reads packets
itself, packets carry their length, and a wait ends immediately when the group fails.
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
    """A host's message: 16 bytes that all hosts compare, and content of any length."""

    __slots__ = ("content", "digest")

    def __init__(self, digest: bytes, content: memoryview | None = None) -> None:
        self.digest: bytes = digest
        self.content: memoryview = memoryview(b"") if content is None else content


class HostLinks:
    """One socket to each other host.

    Args:
        peers: Connected sockets, by the number of the host.
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

        The content from a host with a different digest is not received; after that, no more packets can be swapped.

        Args:
            mine: The packet sent to all.
            theirs: For each host number, the buffer for its content, of the same length as the content of `mine`.
            deadline: On the library's clock.

        Raises:
            CommTimeoutError: A host has not sent its packet in time; the message names its rank.
            PeerLostError: A connection has ended.
        """
        self._round += 1
        head = _HEAD.pack(len(mine.content), self._round, mine.digest)
        pending = [_Exchange(host, peer, head, mine.content, theirs[host]) for host, peer in self.peers.items()]
        started = clock.now()
        while pending := [swap for swap in pending if not self._moved(swap, head)]:
            alike = [swap for swap in pending if not swap.differs]
            # Hosts that differ also stop reading; all others complete their exchange.
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
        """Move what can be moved; return whether everything is done."""
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
        """End a wait in progress with this cause, from any thread."""
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
        """Close the descriptors, as a forked child does."""
        for peer in self.peers.values():
            peer.close()


class _Exchange:
    """One packet out and one in, over one socket."""

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
        """Return whether both directions are complete. Raises `OSError` if the connection has ended."""
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
        """Return whether all bytes have arrived."""
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
    """On a host's first rank, return its links to the other hosts; on other ranks, None. Collective.

    The host with the lower number listens at its own address; the others connect, and prove that they know a secret
    that the first rank has published through the control plane.

    Args:
        group: The ranks that meet; joined here.
        control: This rank's handle.
        hosts: For each host, its ranks in the group.
        address: This host's address, for the others.
        timeout: Seconds for the others to join. An address that does not respond is abandoned after 10 s.

    Raises:
        CommError: On every rank; the message says which rank could not reach which other rank, at which address, and
            what to set.
    """
    control.join(group)
    firsts = [ranks[0] for ranks in hosts]

    def conclude(problems: list[CommError]) -> None:
        """Collect the errors of all ranks."""
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
    """Check that all hosts can connect. Raises the same errors as `meet`, and keeps no connections."""
    links = meet(group, control, hosts, address, timeout)
    if links is not None:
        links.close()
