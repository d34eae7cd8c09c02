"""Check that this host's name resolves to an address at which other hosts can reach this host."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from unisono.host.network import address_outward, is_loopback, means_here
from unisono.tools.doctor.checks.launcher import launched
from unisono.tools.doctor.examination import Finding, Target, ok, optional, problem
from unisono.tools.doctor.network import addresses, own_addresses

__all__ = ["ORDER", "check"]

ORDER = 50
_WHY = (
    "torchrun gives that address to the ranks of other hosts, which cannot reach this host there (ranks on this "
    "host only are not affected)"
)


def check(target: Target) -> Iterator[Finding]:
    """Resolve the host name."""
    name = socket.gethostname()
    found = addresses(name)
    own = address_outward() or next((address for address in own_addresses() if not is_loopback(address)), None)
    if not found:
        yield problem(f"the host name {name} has no address; mpirun and torchrun look it up", _entry(name, own))
    elif all(map(is_loopback, found)):
        text = f"the host name {name} resolves to the loopback, {', '.join(found)}: {_WHY}"
        yield optional(text, _entry(name, own), required=bool(target.hosts) or launched().on_several_hosts)
    elif not means_here(name):
        yield problem(
            f"the host name {name} resolves to {', '.join(found)}, which is not an address of this host",
            _entry(name, own),
        )
    else:
        yield ok(f"{name} is {', '.join(found)}")


def _entry(name: str, own: str | None) -> str:
    if own is None:
        return f"echo 'ADDRESS {name}' >> /etc/hosts   # as root, when this host has a network, with its address there"
    # Overwrite the file in place, because /etc/hosts in a container is a mount point, which cannot be replaced.
    entries = f'"127.0.0.1 localhost" "{own} {name}"'
    return (
        f'hosts=$(grep -vw {name} /etc/hosts); printf "%s\\n" "$hosts" {entries} > /etc/hosts'
        f"   # as root; or leave the file, and run: torchrun --local-addr {own} ..."
    )
