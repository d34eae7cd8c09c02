"""Check that hosts can reach each other, before a backend connects their ranks."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.control.mesh import Mesh
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.errors import CommError

__all__ = ["check_reachability"]

_REACH_WITHIN_S = 10.0


def check_reachability(
    group: Group, control: ControlPlane, hosts: Sequence[Sequence[int]], address: str, timeout: float
) -> None:
    """Check that the first ranks of all hosts can connect to each other, then close the connections. Collective.

    For each pair of hosts, the host with the lower number listens at its own address, and the other host connects. The
    connecting host must prove that it knows a secret that the first rank has published through the control plane.

    Args:
        group: The ranks. This function joins the group in the control plane.
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
        return
    links = Mesh(group, control, f"{group.name}/hosts", firsts, address).connect(timeout, within_s, conclude)
    for connection, _ in links.values():
        connection.close()
