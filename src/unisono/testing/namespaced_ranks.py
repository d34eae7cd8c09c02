"""Ranks on the hosts of a `Network`: processes of `launch`'s forkserver that first enter their host's namespace."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from unisono.launcher.api import init, launch

__all__ = ["TIMEOUT_S", "HostRanks", "Network", "enter", "live", "obstacle", "run_ranks", "send_signal"]

_ports = itertools.count(29600)
_TIMEOUT_S = 10.0


class HostRanks:
    """Ranks that each run `program(comm, *args)` on a communicator that `init` made from their environment.

    Args:
        network: The hosts.
        per_host: Number of ranks of each host, such as (2, 2).
        program: The program of every rank; importable.
        args: Passed to the program.
        backend: Backend for `init`.
        options: Returns further options of `init` for a rank number; `timeout` defaults to 10 s.

    Example:
        with Network(2) as network, HostRanks(network, (2, 2), program) as ranks:
            print(ranks.results())
    """

    def __init__(
        self,
        network: Network,
        per_host: Sequence[int],
        program: Callable[..., Any],
        *args: Any,
        backend: str = "auto",
        options: Callable[[int], dict[str, Any]] = lambda rank: {},
    ) -> None:
        hosts = [host for host, count in enumerate(per_host) for _ in range(count)]
        place = {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(next(_ports)),
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["unisono.launcher.preload", *(["pytest"] if "pytest" in sys.modules else [])])
        self.processes: list[BaseProcess] = []
        self._readers: list[Connection] = []
        for rank, host in enumerate(hosts):
            reader, writer = context.Pipe(duplex=False)
            given = {"timeout": _TIMEOUT_S, **options(rank)}
            environment = {**place, "RANK": str(rank)}
            orders = (network.name(host), environment, backend, given, program, args, writer)
            process = context.Process(target=live, args=orders, name=f"unisono rank {rank}")
            process.start()
            writer.close()
            self.processes.append(process)
            self._readers.append(reader)

    def results(self, within_s: float = 60.0, ranks: Iterable[int] | None = None) -> list[Any]:
        """Return the result of each of these ranks (all if None), or its error; None for a killed rank."""
        found: list[Any] = []
        for rank in range(len(self._readers)) if ranks is None else ranks:
            reader = self._readers[rank]
            assert reader.poll(within_s), f"rank {rank} has not ended within {within_s} s"
            try:
                found.append(pickle.loads(reader.recv_bytes()))
            except EOFError:
                found.append(None)
        return found

    def wait_for_word(self, within_s: float = 60.0) -> None:
        """Wait until every rank has called `send_signal`."""
        for rank, reader in enumerate(self._readers):
            assert reader.poll(within_s), f"rank {rank} sent no signal within {within_s} s"
            assert reader.recv_bytes() == b"word", f"rank {rank} has ended early"

    def kill(self, *ranks: int) -> None:
        """Kill these ranks by SIGKILL."""
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()


_writers: list[Connection] = []


def send_signal() -> None:
    """Notify the test that this rank has reached this point."""
    _writers[0].send_bytes(b"word")


def live(
    namespace: str,
    place: dict[str, str],
    backend: str,
    options: dict[str, Any],
    program: Callable[..., Any],
    args: tuple[Any, ...],
    writer: Connection,
) -> None:
    """Run one rank."""
    enter(namespace)
    os.environ.update(place)
    torch.set_num_threads(1)
    _writers.append(writer)
    try:
        with init(backend, **options) as comm:
            result = program(comm, *args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        result = error
    writer.send_bytes(pickle.dumps(result))


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


TIMEOUT_S = 10.0
"""Seconds that one operation of a test may take: a hanging test should fail soon."""


def run_ranks(fn: Callable[..., Any], size: int, backend: str = "thread", *args: Any, **options: Any) -> list[Any]:
    """Return each rank's `fn(comm, *args)`, on `size` ranks that live as long as the call.

    Args:
        fn: The program of every rank.
        size: Number of ranks.
        backend: A transport's name; "thread" needs no processes.
        args: Passed to the program.
        options: Options of `unisono.launch`; `timeout` defaults to 10 s.

    Raises:
        Exception: The error of the first failing rank; a note names the rank.

    Example:
        >>> run_ranks(lambda comm, x: comm.rank + x, 3, "thread", 10)
        [10, 11, 12]
    """
    return launch(fn, size, backend, args, **{"timeout": TIMEOUT_S, **options})
