"""tcp://host:port: rank 0 serves the control plane at this address, and all ranks connect to it."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from unisono.bootstrap.rendezvous import InitRequest, RankClaim, Rendezvous, acquire, claim_rank, meet
from unisono.control.sockets import find_secret
from unisono.errors import CommError
from unisono.host.network import is_link_local, requested_interface

__all__ = ["address_of", "find", "find_at", "plain_host"]


def find(request: InitRequest) -> Rendezvous:
    """Return the rendezvous at the address in `init_method`."""
    url = request.init_method or ""
    host, port = address_of(url)
    rank, size = request.numbers()
    claim = RankClaim(rank, size, None, request.deadline, f"rank {rank} of {size}, rendezvous at {url}")
    return find_at(claim, host, port, request.secret)


def find_at(claim: RankClaim, host: str, port: int, secret: str | bytes | None) -> Rendezvous:
    """Return the rendezvous at this address, where rank 0 serves the control plane."""
    host = plain_host(host)
    known = find_secret(secret)
    try:
        hosted = (
            acquire(f"tcp://{host}:{port}", known, host, port, restarts=claim.restarts) if claim.rank == 0 else None
        )
    except CommError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            claim_rank(claim, (host, port), known)
        raise
    return meet(claim, (host, port) if hosted is None else hosted.server.address, known, hosted)


def plain_host(host: str) -> str:
    """Return the host without the brackets of an IPv6 address, and with 127.0.0.1 in place of "localhost".

    A link-local address gets a zone that is valid on this host: the given zone, or the interface from the environment.

    Raises:
        ValueError: The host is empty, a wildcard address (0.0.0.0 or ::), or a link-local address whose interface is
            unknown.
    """
    if host in ("0.0.0.0", "::", ""):
        raise ValueError(
            f"{host!r} is not an address that other hosts can reach; pass the address of the host of rank 0"
        )
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    # In a URL, the percent sign before the zone may be encoded as %25.
    bare, _, zone = host.replace("%25", "%").partition("%")
    if not is_link_local(bare):
        return host
    here = {name: name for _, name in socket.if_nameindex()} | {str(n): name for n, name in socket.if_nameindex()}
    known = next((here[name] for name in (zone, *(requested_interface() or ())) if name in here), None)
    if known is None:
        raise ValueError(
            f"{host!r} is an address of one link: name the network interface of this host that leads there, as in "
            f"{bare}%eth0; this host has {', '.join(dict.fromkeys(here.values()))}"
        )
    return f"{bare}%{known}"


def address_of(url: str) -> tuple[str, int]:
    """Return the host and port of tcp://host:port."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.path not in ("", "/") or parts.query:
        raise ValueError(
            f"{url!r} is not an address; pass tcp://host:port, with the host of rank 0 and a free port of it"
        )
    return parts.hostname, port
