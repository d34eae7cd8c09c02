"""Which machine this is: equal for processes that share a host, different otherwise."""

from __future__ import annotations

import os
import platform
import socket
import sys
from functools import cache
from pathlib import Path

__all__ = ["address_towards", "host_identity", "shm_obstacle"]


def shm_obstacle() -> str | None:
    """Why shared memory between processes would not be right here, with what to do; None if it is."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "backend 'shm' needs Linux (memfd_create); use backend='gloo'"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Data, then a flag, by two plain stores: x86 keeps their order, other processors do not.
        return (
            f"backend 'shm' relies on the order of stores of x86-64, which {platform.machine()} does not keep; "
            "use backend='gloo'"
        )
    try:
        os.close(os.memfd_create("unisono"))
    except OSError as error:
        return f"backend 'shm' needs memfd_create, which this system refuses ({error}); use backend='gloo'"
    return None


@cache
def host_identity() -> str:
    """The kernel's boot id and the network namespace, or the host's name where there is no such thing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def address_towards(host: str, port: int = 9) -> str:
    """The address of this host on the way to another one, by which that can reach it. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connecting a datagram socket only asks the routing table.
        probe.connect(address)
        return str(probe.getsockname()[0])
