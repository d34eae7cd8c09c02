"""Authenticated connections between all ranks of a group."""

from __future__ import annotations

from unisono.control.mesh import Link, Mesh
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.errors import CommError

__all__ = ["Link", "meet"]


def meet(group: Group, control: ControlPlane, address: str, timeout: float) -> dict[int, Link]:
    """Connect to every other rank. Collective; the group is joined.

    Raises:
        CommTimeoutError: Not all ranks have joined.
        CommError: Another process answers instead of a rank, or the group has failed.
    """

    def conclude(problems: list[CommError]) -> None:
        if problems:
            raise problems[0]
        control.exchange(group, "mail", None, timeout)

    return Mesh(group, control, f"{group.name}/mail", range(group.size), address).connect(timeout, timeout, conclude)
