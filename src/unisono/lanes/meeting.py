"""Hosts find each other: every first rank of a host reaches every other one, or all ranks learn who cannot."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from unisono import wire
from unisono.control import Control
from unisono.control.sockets import listen, tune
from unisono.errors import CommError
from unisono.group import Group
from unisono.hosts import INTERFACE, interface_of, is_loopback
from unisono.lanes.strangers import TOKEN_BYTES, Strangers, introduction
from unisono.lanes.swapping import Lanes

__all__ = ["check_ways", "meet"]

_REACH_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.25


def meet(group: Group, control: Control, hosts: Sequence[Sequence[int]], address: str, timeout: float) -> Lanes | None:
    """The lines from this host to the others, on its first rank; None on its other ranks. Collective.

    The host of a lower number listens, at its own address; the others come, and show the word that it has told
    over the control plane.

    Args:
        group: Who meets; joined here.
        control: This rank's handle.
        hosts: For each host, its ranks in the group.
        address: Of this host, for others.
        timeout: Seconds for the others to come. An address that does not answer is given up after 10 s.

    Raises:
        CommError: On every rank: who could not reach whom, at which address, and what to set.
    """
    control.join(group)
    firsts = [ranks[0] for ranks in hosts]
    if group.rank not in firsts:
        _conclude(group, control, "", timeout)
        return None
    meeting = _Meeting(group, control, firsts, address, timeout)
    try:
        problem = meeting.gather()
        _conclude(group, control, problem, timeout)
    except BaseException:
        meeting.give_up()
        raise
    return Lanes(meeting.peers, firsts, meeting.where)


def check_ways(group: Group, control: Control, hosts: Sequence[Sequence[int]], address: str, timeout: float) -> None:
    """Raise as `meet` does, and keep no connection."""
    lanes = meet(group, control, hosts, address, timeout)
    if lanes is not None:
        lanes.close()


def _conclude(group: Group, control: Control, problem: str, timeout: float) -> None:
    """Everybody learns what went wrong anywhere."""
    problems = control.exchange(group, "ways between hosts", problem, timeout + _REACH_WITHIN_S)
    said = [text for text in problems if text]
    if said:
        raise CommError(". ".join(said), rank=group.rank, size=group.size)


class _Meeting:
    """One host's part."""

    def __init__(self, group: Group, control: Control, firsts: list[int], address: str, timeout: float) -> None:
        self._group, self._control, self._firsts = group, control, firsts
        self._address, self._deadline = address, time.monotonic() + min(timeout, _REACH_WITHIN_S)
        self._timeout = timeout
        self._here = firsts.index(group.rank)
        self.peers: dict[int, socket.socket] = {}
        self.where = [""] * len(firsts)

    def gather(self) -> str:
        """Reach the hosts of lower numbers, and be reached by those of higher ones; what went wrong, or nothing."""
        token = os.urandom(TOKEN_BYTES)
        try:
            listener = listen(self._address, 0)
        except CommError as error:
            self._tell("", 0, token)
            return f"rank {self._group.rank} {error.message}"
        with listener:
            host, port = listener.getsockname()[:2]
            self._tell(host, port, token)
            found = [problem for other in range(self._here) if (problem := self._reach(other))]
            missing = self._receive(listener, token)
        if missing and not found and not any(self._control.check([self._gave_up(other)]) for other in missing):
            # Who gave up says why; this is of those who have not been heard of.
            ranks = ", ".join(str(self._firsts[other]) for other in missing)
            return f"rank {self._group.rank} waited at {host}:{port} for rank {ranks}, which has not come"
        return ". ".join(found)

    def _key(self, host: int) -> str:
        return f"{self._group.name}/way to host {host}"

    def _gave_up(self, host: int) -> str:
        return f"{self._group.name}/no way from host {host}"

    def _tell(self, host: str, port: int, token: bytes) -> None:
        self._control.set(self._key(self._here), wire.encode((host, port, token)))

    def _reach(self, other: int) -> str:
        """Connect to a host; what went wrong, if something did."""
        host, port, token = wire.decode(self._control.get(self._key(other), self._timeout, self._group))
        self.where[other] = f"{host}:{port}"
        if not host:
            return ""
        try:
            left_s = max(0.1, self._deadline - time.monotonic())
            peer = socket.create_connection((host, port), left_s)
            self.peers[other] = peer
            tune(peer)
            peer.sendall(introduction(token, self._here))
        except OSError as error:
            self._control.set(self._gave_up(self._here), b"")
            return _unreachable(self._group.rank, self._address, self._firsts[other], host, port, error)
        return ""

    def _receive(self, listener: socket.socket, token: bytes) -> set[int]:
        """Wait for the hosts of higher numbers; who has not come."""
        expected = set(range(self._here + 1, len(self._firsts)))
        with Strangers(listener, token) as strangers:
            while expected and (left_s := self._deadline - time.monotonic()) > 0:
                came = strangers.introduced(min(left_s, _LOOK_EVERY_S))
                for other, peer, where in came:
                    if other in expected:
                        expected.remove(other)
                        self.peers[other], self.where[other] = peer, where
                    else:
                        peer.close()
                if not came and any(self._control.check([self._gave_up(other)]) for other in expected):
                    break
        return expected

    def give_up(self) -> None:
        """Nothing comes of it."""
        for peer in self.peers.values():
            peer.close()


def _unreachable(rank: int, own: str, other: int, host: str, port: int, error: OSError) -> str:
    interface = interface_of(own)
    mine = f"{own} on {interface}" if interface else own
    why = error.strerror or str(error) or type(error).__name__
    text = f"rank {rank} (at {mine}) cannot reach rank {other} at {host}:{port} ({why})"
    if is_loopback(host):
        text += f". That is the loopback of the host of rank {other}, which no other host can reach"
    return (
        f"{text}. On the host of rank {other}, set {INTERFACE} to the network interface by which the others reach it "
        "(or pass interface= to init; `ip -brief address` lists them), and see that no firewall is between"
    )
