"""Topology of the ranks: their hosts, GPUs and addresses; and the backend that suits."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.bootstrap import Rendezvous
from unisono.core.group import Group
from unisono.host.network import address_of, host_identity, interface_of, requested_interface, why_no_shm
from unisono.transports import TRANSPORTS
from unisono.transports.hierarchical.host_links import check_reachability

__all__ = ["Hosts", "Topology", "choose_backend", "discover", "validate_hosts"]

_log = logging.getLogger("unisono")

Hosts = tuple[tuple[int, ...], ...]
"""For each host, its ranks."""

_BY_ADDRESS = ("gloo", "nccl", "ucc", "xccl")


@dataclass(frozen=True, slots=True)
class Topology:
    """Facts that all ranks know of each other.

    Attributes:
        hosts: Ranks of each host: those that share a kernel and a network.
        sharing: Ranks of each shareable memory: those that proved to each other that they share it.
        gpus: Whether each rank has a GPU to itself.
        address: Address of this host, for the others.
        interface: The network interface of that address, and why it was chosen, for the log.
    """

    hosts: Hosts
    sharing: Hosts
    gpus: bool
    address: str
    interface: str

    def number_here(self, rank: int) -> int:
        """Return the rank's number on its host, from 0.

        Example:
            >>> Topology(((0, 2), (1, 3)), ((0, 2), (1, 3)), gpus=True, address="", interface="").number_here(3)
            1
        """
        return next(ranks.index(rank) for ranks in self.hosts if rank in ranks)

    def prepare(self, backend: str, place: Rendezvous, timeout: float) -> None:
        """Prepare a backend between hosts: check that hosts reach each other, and set the libraries' interface.

        Raises:
            CommError: On every rank: names the hosts that cannot connect, the address, and what to set.
        """
        _, _, outer = backend.rpartition("+")
        if len(self.hosts) == 1 or outer not in _BY_ADDRESS:
            return
        name = interface_of(self.address)
        if outer == "nccl" and name is not None:
            # NCCL chooses for itself otherwise, and has no other setting for it.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        if backend == outer:
            check_reachability(
                Group.world(place.rank, place.size, place.name), place.control, self.hosts, self.address, timeout
            )


def discover(place: Rendezvous, interface: str | None, timeout: float) -> Topology:
    """Find out together with the other ranks, over the control plane.

    Args:
        place: This rank's.
        interface: The network interface to be reached by; else a variable names it, else it is the one by which
            this rank reached the first one.
        timeout: Seconds for the others to answer.

    Raises:
        ValueError: There is no such interface here, or it has no address.
    """
    wanted = requested_interface(interface)
    address = place.address if wanted is None else address_of(*wanted)
    told = interface_of(address) if wanted is None else wanted[0]
    why = "by the route to the first rank" if wanted is None else f"by {wanted[1]}"
    if place.size == 1:
        return Topology(((0,),), ((0,),), torch.cuda.device_count() > 0, address, f"{told} {why}")
    group = Group.world(place.rank, place.size, place.name)
    cards = place.control.exchange(
        group, "surroundings", (host_identity(), torch.cuda.device_count(), why_no_shm()), timeout
    )
    names = [name for name, _, _ in cards]
    hosts = tuple(tuple(r for r, name in enumerate(names) if name == host) for host in dict.fromkeys(names))
    obstacle = next((obstacle for _, _, obstacle in cards if obstacle), None)
    if obstacle is not None:
        _log.info("unisono: no shared memory between these ranks: %s", obstacle)
    sharing = TRANSPORTS["shm"].shm_peers(group, place.control, timeout)
    gpus = all(count >= names.count(name) for name, count, _ in cards)
    return Topology(hosts, sharing, gpus, address, f"{told} {why}")


def choose_backend(hosts: Hosts, *, gpus: bool, network: str = "gloo") -> str:
    """The backend for ranks that share memory in these parts.

    Nccl where each rank has a GPU; else threads for a world of one, shared memory if that is all, the network if no
    ranks share any, and shared memory with the network between where some do.

    Example:
        >>> [choose_backend(hosts, gpus=False) for hosts in (((0, 1),), ((0, 1), (2,)), ((0,), (1,)))]
        ['shm', 'shm+gloo', 'gloo']
    """
    size = sum(len(ranks) for ranks in hosts)
    if gpus and torch.cuda.is_available() and torch.distributed.is_nccl_available():
        return "nccl"
    if size == 1:
        return "thread"
    if len(hosts) == 1:
        return "shm"
    return network if len(hosts) == size else f"shm+{network}"


def validate_hosts(hosts: Sequence[Sequence[int]] | None, size: int) -> Hosts | None:
    """The hosts that a caller has named, if they make sense.

    Raises:
        ValueError: They name a rank twice, or one that is none, or leave one out.
    """
    if hosts is None:
        return None
    given = tuple(tuple(ranks) for ranks in hosts)
    if sorted(rank for ranks in given for rank in ranks) != list(range(size)) or not all(given):
        raise ValueError(f"hosts must name each of the ranks 0 to {size - 1} once, not {[list(r) for r in given]}")
    return given
