"""Several hosts on one machine: network namespaces, each with an address of its own, joined by a switch.

Needs Linux, root, and the commands `ip` and `tc` (package iproute2); `obstacle` returns what is missing. A namespace
counts as a separate host everywhere in unisono: its processes reach the others' only through the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Network", "enter", "obstacle"]

_numbers = itertools.count()
_INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000


class Network:
    """Hosts 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ... (fd77::1, ...), and no other network.

    A context manager; on exit, it kills all processes on these hosts and removes the hosts.

    Args:
        hosts: Number of hosts.
        rate: Maximum send rate of each host, in the notation of `tc`; None is unlimited.
        burst: Maximum burst, in the notation of `tc`.
        ipv6: Whether the hosts have IPv6 addresses only.

    Example:
        with Network(2, rate="1gbit") as network:
            subprocess.run(network.command(1, "ping", "-c1", network.addresses[0]), check=True)
    """

    def __init__(self, hosts: int = 2, rate: str | None = "1gbit", burst: str = "128kb", *, ipv6: bool = False) -> None:
        self._stem = f"uni{os.getpid():x}-{next(_numbers)}"
        self._rate, self._burst = rate, burst
        stem, self._rest = ("fd77::", ["/64", "nodad"]) if ipv6 else ("10.77.0.", ["/24"])
        self.addresses = [f"{stem}{number + 1}" for number in range(hosts)]
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        switch = self._namespace("switch")
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, address in enumerate(self.addresses):
            host = self._namespace(str(number))
            _run(
                *("ip", "-n", host, "link", "add", _INTERFACE, "type", "veth"),
                *("peer", "name", _port(number), "netns", switch),
            )
            _run("ip", "-n", switch, "link", "set", _port(number), "master", "bridge0", "up")
            mask, *flags = self._rest
            _run("ip", "-n", host, "address", "add", f"{address}{mask}", "dev", _INTERFACE, *flags)
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
            if self._rate is not None:
                limit = ("rate", self._rate, "burst", self._burst, "latency", "50ms")
                _run("tc", "-n", host, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit)

    def _namespace(self, name: str) -> str:
        full = f"{self._stem}-{name}"
        _run("ip", "netns", "add", full)
        self._made.append(full)
        return full

    def name(self, host: int) -> str:
        """The name of a host's namespace."""
        return f"{self._stem}-{host}"

    def command(self, host: int, *words: str) -> list[str]:
        """Return the command line that runs these words on a host."""
        return ["ip", "netns", "exec", self.name(host), *words]

    def enter(self, host: int) -> None:
        """Move the calling thread, and all that it starts from now on, to a host. Irreversible."""
        enter(self.name(host))

    def start(self, host: int, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Run a command on a host; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen(self.command(host, *words), text=True, **options)

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent to the others so far, counted at its interface."""
        told = _run(*self.command(host, "cat", f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes"))
        return int(told)

    def cut(self, host: int) -> None:
        """Disconnect a host: all packets are dropped silently."""
        _run("ip", "-n", f"{self._stem}-switch", "link", "set", _port(host), "down")

    def heal(self, host: int) -> None:
        """Reconnect a host."""
        _run("ip", "-n", f"{self._stem}-switch", "link", "set", _port(host), "up")

    def close(self) -> None:
        """Kill all processes on the hosts, and remove the hosts. Idempotent."""
        while self._made:
            name = self._made.pop()
            for process in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "delete", name)


def enter(name: str) -> None:
    """Move the calling thread to the network namespace of this name, as returned by `Network.name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _port(host: int) -> str:
    return f"port{host}"


@cache
def obstacle() -> str | None:
    """Return the reason why this machine cannot have such hosts; None if it can.

    Example:
        >>> reason = obstacle()
        >>> reason is None or "needs" in reason or "refuses" in reason
        True
    """
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"hosts of network namespaces need {' and '.join(missing)}: install iproute2"
    if os.geteuid() != 0:
        return "hosts of network namespaces need root"
    try:
        with Network(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"this kernel refuses network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"


def _run(*words: str) -> str:
    command: Sequence[str] = words
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
