"""Identity of this host, and the address by which other hosts reach it."""

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

from unisono.host.native import native

__all__ = [
    "INTERFACE",
    "address_for_others",
    "address_of",
    "address_outward",
    "address_towards",
    "host_identity",
    "interface_of",
    "is_loopback",
    "requested_interface",
    "why_no_shm",
]

INTERFACE = "UNISONO_INTERFACE"
"""The variable that names the network interface by which other hosts reach this one."""

_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1", "2001:db8::1"
"""Addresses reserved for documentation, which no host has: the route to them is the default route."""


def why_no_shm() -> str | None:
    """Return the reason why shared memory between processes is unsafe here, with the fix; None if it is safe."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "backend 'shm' needs Linux (memfd_create); use backend='gloo'"
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64", "aarch64"):
        return f"backend 'shm' needs x86-64 or aarch64, and this processor is {machine}; use backend='gloo'"
    if machine == "aarch64" and native() is None:
        # Of two plain stores in Python, data and then a flag, others may see the second one first.
        return (
            f"backend 'shm' needs unisono's native core on {machine}, which reorders the stores of Python; install a "
            "wheel, or build unisono with a C++ compiler, or use backend='gloo'"
        )
    try:
        os.close(os.memfd_create("unisono"))
    except OSError as error:
        return f"backend 'shm' needs memfd_create, which this system refuses ({error}); use backend='gloo'"
    return None


@cache
def host_identity() -> str:
    """Return the kernel's boot id and the network namespace, or the host's name where these do not exist."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def address_towards(host: str, port: int = 9) -> str:
    """Return the address of this host on the route to another host, which can reach it there. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connecting a datagram socket only queries the routing table.
        probe.connect(address)
        return str(probe.getsockname()[0])


def address_for_others(host: str, port: int = 9) -> str:
    """Return the address of this host for a peer with rendezvous address `host`, which may be this host itself.

    An interface named by an environment variable has priority. Otherwise use the route to `host`, or, if that name
    resolves to the loopback (as a host's name does on many systems), the default route.
    """
    requested = requested_interface()
    if requested is not None:
        return address_of(*requested)
    address = address_towards(host, port)
    if not is_loopback(address) or host == "localhost" or _is_literal(host):
        return address
    return address_outward() or address


def address_outward() -> str | None:
    """Return the address of this host on the default route; None if it has only the loopback."""
    for far in _ELSEWHERE:
        with contextlib.suppress(OSError):
            address = address_towards(far)
            if not is_loopback(address):
                return address
    return None


def requested_interface(
    named: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, str] | None:
    """Return the requested network interface, and the setting that requests it; None if there is no request.

    Args:
        named: Interface passed by the program. It precedes UNISONO_INTERFACE, GLOO_SOCKET_IFNAME and
            NCCL_SOCKET_IFNAME; of a list, the first interface that exists here is used, and for NCCL's variable its
            signs for "exactly" (=) and "not" (^), and prefixes.

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
    """Return whether NCCL would select the interface by this pattern."""
    words = pattern.lstrip("^=").split(",")
    if pattern.startswith("^"):
        excluded = name == "lo" or any(name.startswith(word) for word in words)
        return not excluded and _ipv4_of(name) is not None
    return name in words if pattern.startswith("=") else any(name.startswith(word) for word in words)


def address_of(interface: str, setting: str | None = None) -> str:
    """Return the first IPv4 address of a network interface, else its first global IPv6 address.

    Args:
        interface: Its name.
        setting: The variable or argument that names it, for errors.

    Raises:
        ValueError: There is no such interface (the message lists the existing ones), or it has no address.
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
    """Return the network interface of this host that has this address; None if there is none."""
    for _, name in socket.if_nameindex():
        if address in (_ipv4_of(name), _ipv6_of(name)):
            return name
    return None


def is_loopback(address: str) -> bool:
    """Return whether no other host can reach the address.

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
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in ("00", "10"):
            return str(ip_address(bytes.fromhex(digits)))
    return None
