"""Connections between hosts: each first rank of a host reaches every other one, or all ranks get the failures."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.control.mesh import Mesh
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.errors import CommError
from unisono.transports.hierarchical.host_links.exchange import HostLinks

__all__ = ["check_reachability", "meet"]

_REACH_WITHIN_S = 10.0


def meet(
    group: Group, control: ControlPlane, hosts: Sequence[Sequence[int]], address: str, timeout: float
) -> HostLinks | None:
    """Return the links from this host to the others, on its first rank; None on its other ranks. Collective.

    The host with the lower number listens at its own address; the others connect, and prove that they know a secret
    that the first rank has published over the control plane.

    Args:
        group: The ranks that meet; joined here.
        control: This rank's handle.
        hosts: For each host, its ranks in the group.
        address: The address of this host, for the others.
        timeout: Seconds for the others to join. An address that does not answer is given up after 10 s.

    Raises:
        CommError: On every rank: which rank could not reach which other, at which address, and what to set.
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
    """Check that all hosts connect. Raises as `meet`, and keeps no connection."""
    links = meet(group, control, hosts, address, timeout)
    if links is not None:
        links.close()
