"""Names, addresses, interfaces and ports of this host."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from unisono.control.sockets import listen
from unisono.errors import CommError
from unisono.host.network import address_of

__all__ = ["ANYWHERE", "addresses", "free_port", "own_addresses", "port_owner"]

ANYWHERE = "0.0.0.0"
"""Wildcard address: listen at every address of this host."""

_LISTENING = "0A"


def addresses(name: str) -> list[str]:
    """Return the addresses that a name resolves to; empty if the name is unknown."""
    try:
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        )
    except (OSError, UnicodeError):
        return []


def own_addresses() -> list[str]:
    """Return one address per network interface that has an address."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            found.append(address_of(name))
    return found


def free_port(wanted: int) -> int:
    """Return the requested port if it is free, otherwise another free port."""
    for port in (wanted, 0):
        with contextlib.suppress(CommError), listen(ANYWHERE, port) as placeholder:
            return int(placeholder.getsockname()[1])
    raise OSError("no port is free")


def port_owner(port: int) -> str:
    """Describe the process that listens on a port, as far as this user is allowed to see it."""
    sockets = _listening(port)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()) in sockets:
                        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        return f"process {process.name} ({words.strip()[:60]})"
    return "another program"


def _listening(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{words[9]}]")
    return found
