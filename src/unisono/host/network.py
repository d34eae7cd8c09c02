"""This host's identity, and the addresses at which other hosts reach this host."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import sys
from collections.abc import Mapping
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from unisono.host.native import NO_EXTENSIONS, native

__all__ = [
    "INTERFACE",
    "address_for_others",
    "address_of",
    "address_outward",
    "address_towards",
    "host_identity",
    "host_in",
    "in_zone_of",
    "interface_of",
    "is_link_local",
    "is_loopback",
    "is_name",
    "means_here",
    "requested_interface",
    "why_no_shm",
]

INTERFACE = "UNISONO_INTERFACE"
"""Environment variable that names the network interface through which other hosts reach this host."""

_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1", "2001:db8::1"
"""Addresses reserved for documentation. No host has them, so the route to them is the default route."""


def why_no_shm() -> str | None:
    """Return why shared memory between processes is unsafe on this host, and how to fix that; None if it is safe."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "backend 'shm' needs Linux (memfd_create); use backend='gloo'"
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64", "aarch64"):
        return f"backend 'shm' needs x86-64 or aarch64, and this processor is {machine}; use backend='gloo'"
    core = native()
    if core is None:
        fix = (
            f"unset {NO_EXTENSIONS}"
            if os.environ.get(NO_EXTENSIONS)
            else "install a wheel, or build unisono with a C++ compiler"
        )
        return f"backend 'shm' needs unisono's native core: {fix}; or use backend='gloo'"
    if not hasattr(core, "Core"):
        return "backend 'shm' needs futexes, which this native core was built without; use backend='tcp'"
    try:
        os.close(os.memfd_create("unisono"))
    except OSError as error:
        return f"backend 'shm' needs memfd_create, which this system refuses ({error}); use backend='gloo'"
    return None


@cache
def host_identity() -> str:
    """Return the kernel's boot ID and the network namespace, or the host name if the system has neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def address_towards(host: str, port: int = 9) -> str:
    """Return this host's address on the route to another host. No packet is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connecting a datagram socket sends nothing: it only queries the routing table.
        probe.connect(address)
        return host_in(probe.getsockname())


def address_for_others(host: str, port: int = 9) -> str:
    """Return the address at which peers reach this host, given a rendezvous host, which may be this host itself.

    If an environment variable names an interface, the result is that interface's address. Otherwise, the result is
    `host` itself if that is a name of this host, or else this host's address on the route to `host`.
    """
    requested = requested_interface()
    if requested is not None:
        return address_of(*requested)
    # Return the name itself: peers can resolve it, but on this host it often resolves to the loopback address.
    if is_name(host) and means_here(host):
        return host
    return address_towards(host, port)


def is_name(host: str) -> bool:
    """Return whether `host` is a name that hosts may resolve to different addresses; "localhost" does not count.

    Example:
        >>> is_name("node1"), is_name("localhost"), is_name("fe80::1%eth0")
        (True, False, False)
    """
    return host != "localhost" and not _is_literal(host)


def means_here(host: str) -> bool:
    """Return whether a name or address refers to this host, that is, whether a socket can be bound to it.

    Example:
        >>> means_here("127.0.0.1"), means_here("192.0.2.1")
        (True, False)
    """
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def host_in(address: Any) -> str:
    """Return the host part of a socket address, including the zone of a link-local address.

    Args:
        address: Address as returned by `getsockname` or `getpeername`.

    Example:
        >>> host_in(("10.1.1.20", 29500)), host_in(("::ffff:10.1.1.20", 29500, 0, 0)), host_in(("fe80::1", 29500, 0, 1))
        ('10.1.1.20', '10.1.1.20', 'fe80::1%lo')
    """
    host, _, *rest = address
    # A dual-stack socket reports IPv4 peers as "::ffff:a.b.c.d".
    return f"{host}%{socket.if_indextoname(rest[1])}" if rest and rest[1] else host.removeprefix("::ffff:")


def in_zone_of(address: str, mine: str) -> str:
    """Return the address at which this host can reach another host that has published `address`.

    The zone of a link-local address names an interface of the publishing host, so it is replaced with the zone of
    `mine`.

    Args:
        address: Address of the other host.
        mine: Address of this host on the same link.

    Example:
        >>> in_zone_of("fe80::2%eth0", "fe80::1%ib1"), in_zone_of("10.1.1.20", "fe80::1%ib1")
        ('fe80::2%ib1', '10.1.1.20')
    """
    bare = address.partition("%")[0]
    zone = mine.partition("%")[2]
    return f"{bare}%{zone}" if zone and is_link_local(bare) else address


def is_link_local(address: str) -> bool:
    """Return whether `address` is an IPv6 address that is valid only in combination with an interface.

    Example:
        >>> is_link_local("fe80::1"), is_link_local("fe80::1%eth0"), is_link_local("169.254.0.1")
        (True, True, False)
    """
    return ":" in address and _is_literal(address) and ip_address(address).is_link_local


def address_outward() -> str | None:
    """Return this host's address on the default route; None if the host has only the loopback interface."""
    for far in _ELSEWHERE:
        with contextlib.suppress(OSError):
            address = address_towards(far)
            if not is_loopback(address):
                return address
    return None


def requested_interface(
    named: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, str] | None:
    """Return the requested network interface and the setting that requests it; None if no interface is requested.

    Args:
        named: Interface passed by the program, which takes precedence over the environment variables UNISONO_INTERFACE,
            GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. If the environment variable lists several interfaces, the first
            interface that exists is used. NCCL_SOCKET_IFNAME may also contain prefixes and the signs for "exactly" (=)
            and "not" (^).

    Example:
        >>> requested_interface("lo", {})
        ('lo', 'interface=')
        >>> requested_interface(None, {"NCCL_SOCKET_IFNAME": "l"})
        ('lo', 'NCCL_SOCKET_IFNAME')
    """
    if named is not None:
        return named, "interface="
    here = [name for _, name in socket.if_nameindex()]
    for variable in (INTERFACE, "GLOO_SOCKET_IFNAME"):
        names = [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]
        if names:
            return next((name for name in names if name in here), names[0]), variable
    pattern = environment.get("NCCL_SOCKET_IFNAME", "")
    name = next((name for name in here if pattern and _fits(name, pattern)), None)
    return None if name is None else (name, "NCCL_SOCKET_IFNAME")


def _fits(name: str, pattern: str) -> bool:
    """Return whether NCCL would select the interface `name` if NCCL_SOCKET_IFNAME were `pattern`."""
    words = pattern.lstrip("^=").split(",")
    if pattern.startswith("^"):
        excluded = name == "lo" or any(name.startswith(word) for word in words)
        return not excluded and _ipv4_of(name) is not None
    return name in words if pattern.startswith("=") else any(name.startswith(word) for word in words)


def address_of(interface: str, setting: str | None = None) -> str:
    """Return a network interface's first IPv4 address, else its first IPv6 address, preferably not link-local.

    Args:
        interface: Name of the interface.
        setting: Variable or argument that names the interface, for error messages.

    Raises:
        ValueError: The interface does not exist (the message lists the existing interfaces), or has no address.
    """
    here = [name for _, name in socket.if_nameindex()]
    named = f"{interface!r}, which {setting} names" if setting else f"{interface!r}"
    if interface not in here:
        raise ValueError(f"this host has no network interface {named}; it has {', '.join(here)}")
    address = _ipv4_of(interface) or _ipv6_of(interface)
    if address is None:
        raise ValueError(
            f"there is no address of the network interface {named}; give it one, or choose another interface"
        )
    return address


def interface_of(address: str) -> str | None:
    """Return this host's network interface that has the address; None if there is no such interface."""
    here = (name for _, name in socket.if_nameindex() if address in (_ipv4_of(name), _ipv6_of(name)))
    return address.partition("%")[2] or next(here, None)


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address, which no other host can reach.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("a.name")
        (True, False, False)
    """
    return _is_literal(address) and ip_address(address).is_loopback


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _ipv4_of(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    request = struct.pack("16s24x", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    found: dict[str, str] = {}
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface:
            found.setdefault(scope, str(ip_address(bytes.fromhex(digits))))
    # Prefer global ("00") over loopback ("10") and link-local ("20") addresses.
    return found.get("00") or found.get("10") or ("20" in found and f"{found['20']}%{interface}") or None
