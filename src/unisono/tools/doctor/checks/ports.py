"""Check that the rendezvous port is free, and that the range of ports on which ranks listen has free ports."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from unisono.bootstrap.slurm import port_of, step
from unisono.control.sockets import PORT_RANGE, listen, port_range
from unisono.errors import CommError
from unisono.host.launched import number
from unisono.tools.doctor.checks.launcher import launched
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem
from unisono.tools.doctor.network import ANYWHERE, free_port, port_owner

__all__ = ["ORDER", "check"]

ORDER = 52
_USUAL = 29500


def check(_target: Target) -> Iterator[Finding]:
    """Listen briefly on each port."""
    yield from _rendezvous()
    yield from _range()


def _range() -> Iterator[Finding]:
    text = os.environ.get(PORT_RANGE)
    fix = f"export {PORT_RANGE}=20000-20099   # ports that the firewall lets through"
    try:
        ports = port_range()
    except CommError as error:
        yield problem(error.message, fix)
        return
    if ports is None:
        return
    free = sum(_obstacle(ANYWHERE, port) is None for port in ports)
    if free:
        yield ok(f"{free} of the {len(ports)} ports of {PORT_RANGE} {text} are free")
    else:
        yield problem(f"no port of {PORT_RANGE} {text} is free, so no rank can listen", fix)


def _rendezvous() -> Iterator[Finding]:
    port, why, fix = _meeting()
    host = os.environ.get("MASTER_ADDR", "")
    if not 0 < port < 65536:
        yield problem(f"{why} is not a port; a port is a number from 1 to 65535", f"export MASTER_PORT={_USUAL}")
        return
    taken = _obstacle(ANYWHERE, port)
    if taken is None and host:
        taken = _obstacle(host, port)
    if taken is None:
        yield ok(f"{why} is free")
    elif taken == errno.EADDRNOTAVAIL:
        yield info(f"{why} belongs to {host}, which is another host")
    elif taken == errno.EACCES:
        yield problem(f"{why} is reserved for root", fix.format(free_port(_USUAL)))
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield ok(f"{why} is held by {port_owner(port)}, as it should be under torchrun")
    else:
        yield problem(
            f"{why} is taken by {port_owner(port)}: rank 0 cannot listen there, and the other ranks would reach "
            "another program",
            fix.format(free_port(port + 1 if port < 65535 else 0)),
        )


def _meeting() -> tuple[int, str, str]:
    """Return the rendezvous port, its description, and a command that chooses another port."""
    fix = "export MASTER_PORT={}   # the same on every rank"
    if os.environ.get("MASTER_PORT"):
        port = number("MASTER_PORT")
        return (0 if port is None else port), f"MASTER_PORT {os.environ['MASTER_PORT']}", fix
    if launched().by == "Slurm":
        task = step()
        if task is not None and task.size > 1:
            port = port_of(task.job, task.number)
            return port, f"port {port}, the rendezvous of Slurm's step {task.job}.{task.number},", fix
    return _USUAL, f"port {_USUAL}, torchrun's default,", "torchrun --master-port {} ... train.py"


def _obstacle(host: str, port: int) -> int | None:
    """Return why a rank cannot listen on this port, as an `errno` number; None if it can."""
    try:
        listen(host, port).close()
    except UnicodeError:
        return errno.EADDRNOTAVAIL
    except CommError as error:
        cause = error.__cause__
        return cause.errno if isinstance(cause, OSError) and cause.errno in errno.errorcode else errno.EADDRNOTAVAIL
    return None
