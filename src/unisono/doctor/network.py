"""Names, addresses, interfaces and ports of this host."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from unisono.hosts import address_of, address_towards, is_loopback

__all__ = ["address_outward", "addresses", "free_port", "holder", "is_own", "own_addresses"]

# Addresses of documentation, which hardly any host has: the way to them is the way out.
_FAR = "198.51.100.1", "203.0.113.1", "2001:db8::1"
_LISTENING = "0A"


def addresses(name: str) -> list[str]:
    """What a name leads to; nothing if nobody knows it."""
    try:
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        )
    except (OSError, UnicodeError):
        return []


def is_own(address: str) -> bool:
    """Whether this host has it: nobody else may listen there."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


def address_outward() -> str | None:
    """The address by which other hosts reach this one; None if there is no way out."""
    for far in _FAR:
        with contextlib.suppress(OSError):
            address = address_towards(far)
            if not is_loopback(address):
                return address
    return None


def own_addresses() -> list[str]:
    """One of each network interface that has any."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            found.append(address_of(name))
    return found


def free_port(host: str = "", wanted: int = 0) -> int:
    """A port that can be had, the wanted one if possible."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.create_server((host, port)) as placeholder:
            return int(placeholder.getsockname()[1])
    raise OSError(f"no port can be had at {host or 'any address'}")


def holder(port: int) -> str:
    """Who listens at a port, as far as this user may know."""
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
