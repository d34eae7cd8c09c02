"""Ranks on the hosts of a `Network`: processes from `launch`'s forkserver that first enter their host's namespace."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from unisono.core.closing import Closing
from unisono.launcher.api import init, launch
from unisono.launcher.job import run_reported
from unisono.launcher.linked_ranks import LINK, own_link, received
from unisono.launcher.processes import start_process
from unisono.testing.network_relay import enter

__all__ = [
    "TIMEOUT_S",
    "HostRanks",
    "LinkReport",
    "Network",
    "enter",
    "has_netem",
    "live",
    "obstacle",
    "run_ranks",
    "send_signal",
]

_ports = itertools.count(29600)
"""Rendezvous ports. Each job gets a new port, because the previous job's port may not be free yet."""
TIMEOUT_S = 10.0
"""Timeout of one operation in a test: a hanging test should fail soon."""


class HostRanks(Closing):
    """Ranks that each run `program(comm, *args)` on a communicator that `init` creates from environment variables.

    Args:
        network: The hosts.
        per_host: Number of ranks on each host, such as (2, 2).
        program: The program of every rank; must be importable.
        args: Passed to the program.
        backend: Backend for `init`.
        options: Function that takes a rank and returns more options for `init`; `timeout` defaults to 10 s.
        variables: Further variables of the ranks' environment.

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
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        hosts = [host for host, count in enumerate(per_host) for _ in range(count)]
        place = {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(next(_ports)),
            **variables,
        }
        self.processes: list[BaseProcess] = []
        self._links: list[Connection] = []
        for rank, host in enumerate(hosts):
            given = {"timeout": TIMEOUT_S, **options(rank)}
            environment = {**place, "RANK": str(rank)}
            process, link = start_process(rank, live, network.name(host), environment, backend, given, program, args)
            self.processes.append(process)
            self._links.append(link)

    def results(self, within_s: float = 60.0, ranks: Iterable[int] | None = None) -> list[Any]:
        """Return the result or error of each rank in `ranks` (default: all ranks), with None for each killed rank."""
        found: list[Any] = []
        for rank in range(len(self._links)) if ranks is None else ranks:
            assert self._links[rank].poll(within_s), f"rank {rank} has not ended within {within_s} s"
            outcome = received(rank, self._links[rank])
            found.append(outcome and (outcome.error or outcome.result))
        return found

    def wait_for_word(self, within_s: float = 60.0) -> None:
        """Wait until every rank has called `send_signal`."""
        for rank, link in enumerate(self._links):
            assert link.poll(within_s), f"rank {rank} sent no signal within {within_s} s"
            assert link.recv_bytes() == b"word", f"rank {rank} has ended early"

    def kill(self, *ranks: int) -> None:
        """Kill the given ranks with SIGKILL."""
        for rank in ranks:
            self.processes[rank].kill()

    def close(self) -> None:
        """Kill the ranks that are still running."""
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for link in self._links:
            link.close()


def send_signal() -> None:
    """Notify the test that this rank has reached this point."""
    own_link().send_bytes(b"word")


def live(
    namespace: str,
    place: dict[str, str],
    backend: str,
    options: dict[str, Any],
    program: Callable[..., Any],
    args: tuple[Any, ...],
    link: Connection,
) -> None:
    """Run one rank."""
    enter(namespace)
    os.environ.update(place)
    torch.set_num_threads(1)
    LINK.set(link)

    def run() -> Any:
        with init(backend, **options) as comm:
            return program(comm, *args)

    link.send_bytes(run_reported(int(place["RANK"]), run))


_numbers = itertools.count()
"""Numbers of this process's networks, used to make the names of namespaces unique on the machine."""
_INTERFACE = "eth0"
# Shell script that waits for a line or the end of standard input, and then removes the hosts named in its arguments.
# Standard input also ends if the caller is killed.
_REMOVE = """read _
for name; do
    for process in $(ip netns pids "$name"); do kill -9 "$process"; done
    ip netns delete "$name"
done"""
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(s|ms|us)")
_PROBES = 21


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Measurements of a link.

    Attributes:
        processor: Fraction of one core that the relay has used since the previous report; 0 without a relay.
        rate: Bits per second that TCP delivered from host 0 to host 1, without headers.
        round_trip: Median round-trip time, in seconds, of several UDP datagrams from host 0 to host 1 and back.
    """

    processor: float
    rate: float
    round_trip: float

    def __str__(self) -> str:
        line = f"{self.rate / 1e6:.1f} Mbit/s, round trip {self.round_trip * 1e3:.2f} ms"
        return f"{line}, relay {self.processor:.0%} of a core"


class Network(Closing):
    """Hosts 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ... (or fd77::1, ...), isolated from other networks.

    Each host is a network namespace with one interface, eth0. Use the network as a context manager: on exit, even after
    an error or if the caller is killed, all processes on the hosts are killed and the hosts are removed. `tc` limits
    the rate with tbf, and delays and drops packets with netem. If the kernel has no netem, a Python process, the relay,
    moves packets between TUN devices instead.

    Args:
        hosts: Number of hosts.
        rate: Maximum send rate of each host, in the notation of `tc`, such as "100mbit"; None is unlimited.
        burst: Maximum burst, in the notation of `tc`: the amount that is sent after a pause regardless of the rate.
        ipv6: Whether the hosts have only IPv6 addresses.
        delay: One-way delay of each packet: seconds, or a string with a unit, such as "2ms" or "50us".
        loss: Probability that a packet is lost, from 0 to 1.
        seed: Seed that determines which packets the relay drops, counted in the order in which the relay reads them.

    Cost: 0.1 s for two hosts. A relay runs at a real-time priority, uses about 20 us of CPU time for each packet of up
    to 1,500 bytes, and adds about 0.1 ms to the delay; `report()` measures this CPU time and the delay.

    Raises:
        ValueError: The delay or the loss is invalid.
        subprocess.CalledProcessError: Raised on entry if the machine does not support a `Network`, which needs Linux,
            root and iproute2, or `tc` rejects the rate. To check for this support beforehand, call
            `unisono.testing.namespaced_ranks.obstacle()`.

    Example:
        >>> from unisono.testing.namespaced_ranks import obstacle
        >>> if obstacle(slow=True) is None:
        ...     with Network(2, rate="100mbit", delay="2ms", loss=0.001) as network:
        ...         shown = subprocess.run(network.command(1, "ip", "address"), capture_output=True, text=True).stdout
        ...         assert "10.77.0.2/24" in shown
        ...         assert network.report().round_trip > 0.004 and network.sent(0) > 100_000
        ...         network.cut(1)
        ...         network.heal(1)
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | None = "1gbit",
        burst: str = "128kb",
        *,
        ipv6: bool = False,
        delay: float | str = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not 0 <= loss <= 1:
            raise ValueError(f"loss must be a probability from 0 to 1, not {loss}")
        self._stem = f"uni{os.getpid():x}-{next(_numbers)}"
        self._rate = rate
        self._burst = burst
        self._delay = _seconds(delay)
        self._loss = loss
        self._seed = seed
        self._ipv6 = ipv6
        self.addresses: list[str] = [f"{'fd77::' if ipv6 else '10.77.0.'}{number + 1}" for number in range(hosts)]
        self._guard: subprocess.Popen[str] | None = None
        self._relay: subprocess.Popen[bytes] | None = None
        # The relay's CPU seconds at the previous report, and the time of that report.
        self._reported = 0.0, 0.0

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def _make(self) -> None:
        hosts = range(len(self.addresses))
        switch = f"{self._stem}-switch"
        slow = self._delay > 0 or self._loss > 0
        names = [*map(self.name, hosts), switch]
        guard = ["sh", "-c", _REMOVE, "sh", *names]
        # Run the script in its own session, so that it survives Ctrl-C and a kill of the caller's process group.
        self._guard = subprocess.Popen(
            guard,
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in names:
            _run("ip", "netns", "add", name)
        if slow and not has_netem():
            self._start_relay()
        else:
            _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, address in enumerate(self.addresses):
            host = self.name(number)
            if self._relay is None:
                self._plug_in(number, switch, slow=slow)
            mask, *flags = ("/64", "nodad") if self._ipv6 else ("/24",)
            _run("ip", "-n", host, "address", "add", f"{address}{mask}", "dev", _INTERFACE, *flags)
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
            if self._rate is not None:
                limit = ("rate", self._rate, "burst", self._burst, "latency", "50ms")
                _run("tc", "-n", host, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit)

    def _plug_in(self, number: int, switch: str, *, slow: bool) -> None:
        host = self.name(number)
        port = _port(number)
        peer = ("peer", "name", port, "netns", switch)
        _run("ip", "-n", host, "link", "add", _INTERFACE, "type", "veth", *peer)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
        if slow:
            # Do not let the kernel merge TCP packets, because netem would delay or drop the merged packets together.
            _run("ip", "-n", host, "link", "set", _INTERFACE, "gso_max_segs", "1")
            way = ("delay", f"{self._delay * 1e6:.0f}us", "loss", f"{self._loss:.6%}", "limit", "10000")
            _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", "netem", *way)

    def _start_relay(self) -> None:
        program = str(Path(__file__).with_name("network_relay.py"))
        hosts = [f"{self.name(number)}={address}" for number, address in enumerate(self.addresses)]
        words = [sys.executable, "-I", "-S", program, repr(self._delay), repr(self._loss), str(self._seed), *hosts]
        self._relay = subprocess.Popen(
            words,
            start_new_session=True,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._await_relay()

    def _await_relay(self) -> None:
        """Wait until the relay is ready, or has executed a command."""
        relay = self._relay
        assert relay is not None
        assert relay.stdout is not None
        assert relay.stderr is not None
        if not relay.stdout.read(1):
            raise subprocess.CalledProcessError(relay.wait(), ["network_relay.py"], stderr=relay.stderr.read().decode())

    def name(self, host: int) -> str:
        """Return the name of a host's namespace, for `ip netns exec`.

        Args:
            host: Index of the host.
        """
        return f"{self._stem}-{host}"

    def command(self, host: int, *words: str) -> list[str]:
        """Return the command line that runs a program on a host.

        Args:
            host: Index of the host.
            words: A program and its arguments.
        """
        return ["ip", "netns", "exec", self.name(host), *words]

    def enter(self, host: int) -> None:
        """Move the calling thread, and all threads and processes that it starts later, to a host. Irreversible.

        Args:
            host: Index of the host.

        Example:
            >>> if obstacle() is None:
            ...     with Network(1) as network, ThreadPoolExecutor(1) as thread:
            ...         thread.submit(network.enter, 0).result()
            ...         assert "eth0" in thread.submit(Path("/proc/thread-self/net/dev").read_text).result()
        """
        enter(self.name(host))

    def start(self, host: int, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Run a command on a host.

        Args:
            host: Index of the host.
            words: A program and its arguments.
            options: Options of `subprocess.Popen`.

        Returns:
            The process, with text streams.
        """
        return subprocess.Popen(self.command(host, *words), text=True, **options)

    def sent(self, host: int) -> int:
        """Return the number of bytes that a host has sent to other hosts so far, counted at its interface.

        Args:
            host: Index of the host.
        """
        reply = _run(*self.command(host, "cat", f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes"))
        return int(reply)

    def cut(self, host: int) -> None:
        """Disconnect a host: all packets are dropped silently.

        Args:
            host: Index of the host.
        """
        self._connect(host, on=False)

    def heal(self, host: int) -> None:
        """Reconnect a host.

        Args:
            host: Index of the host.
        """
        self._connect(host, on=True)

    def _connect(self, host: int, *, on: bool) -> None:
        if self._relay is None:
            _run("ip", "-n", f"{self._stem}-switch", "link", "set", _port(host), "up" if on else "down")
            return
        assert self._relay.stdin is not None
        self._relay.stdin.write(bytes([host, on]))
        self._await_relay()

    def report(self, seconds: float = 0.3) -> LinkReport:
        """Measure the link from host 0 to host 1, which should be idle.

        Args:
            seconds: Duration of the rate measurement, and of the warm-up before it, which uses up the burst.

        Returns:
            Rate, round trip, and the fraction of a core that the relay used from the end of the previous report to the
            start of this report.

        Raises:
            TimeoutError: No reply arrives, because a host is disconnected or all packets are lost.
        """
        used = self._relay_seconds()
        now = time.monotonic()
        before, then = self._reported
        processor = (used - before) / (now - then) if then else 0.0
        round_trip = self._measured_round_trip()
        found = LinkReport(processor, self._measured_rate(seconds), round_trip)
        self._reported = self._relay_seconds(), time.monotonic()
        return found

    def _relay_seconds(self) -> float:
        if self._relay is None:
            return 0.0
        fields = Path(f"/proc/{self._relay.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _socket(self, host: int, kind: socket.SocketKind) -> socket.socket:
        """Return a socket on a host, bound to the host's address. Any thread may use the socket."""

        def made() -> socket.socket:
            self.enter(host)
            one = socket.socket(socket.AF_INET6 if self._ipv6 else socket.AF_INET, kind)
            one.settimeout(5.0 if kind is socket.SOCK_STREAM else 4 * self._delay + 0.1)
            one.bind((self.addresses[host], 0))
            return one

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(made).result()

    def _measured_rate(self, seconds: float) -> float:
        def send() -> None:
            # Send until the receiver closes the connection.
            with contextlib.suppress(ConnectionError):
                while True:
                    sender.sendall(bytes(1 << 16))

        def receive() -> tuple[int, float]:
            received = 0
            began = time.perf_counter()
            while time.perf_counter() < began + seconds:
                received += len(receiver.recv(1 << 20))
            return received, time.perf_counter() - began

        with self._socket(1, socket.SOCK_STREAM) as listener, self._socket(0, socket.SOCK_STREAM) as sender:
            listener.listen(1)
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with ThreadPoolExecutor(1) as thread:
                with receiver:
                    sending = thread.submit(send)
                    receive()
                    received, passed = receive()
                sending.result()
        return received * 8 / passed

    def _measured_round_trip(self) -> float:
        times = []
        with self._socket(0, socket.SOCK_DGRAM) as near, self._socket(1, socket.SOCK_DGRAM) as far:
            for number in range(_PROBES):
                with contextlib.suppress(TimeoutError):
                    began = time.perf_counter()
                    near.sendto(bytes([number]), far.getsockname())
                    # Skip packets that belong to an earlier probe, so that they are not counted for this one.
                    while (reply := far.recvfrom(1))[0] != bytes([number]):
                        pass
                    far.sendto(*reply)
                    while near.recv(1) != bytes([number]):
                        pass
                    times.append(time.perf_counter() - began)
        if not times:
            raise TimeoutError("no packet came back from host 1 to host 0")
        return statistics.median(times)

    def close(self) -> None:
        """Kill all processes on the hosts, and remove the hosts. Idempotent."""
        if self._guard is not None:
            self._guard.communicate("\n")
            self._guard = None
        if self._relay is not None:
            # Exiting the context closes the pipes, and waits for the process.
            with self._relay:
                self._relay.kill()
            self._relay = None


def _port(host: int) -> str:
    return f"port{host}"


def _seconds(delay: float | str) -> float:
    if isinstance(delay, str):
        found = _DELAY.fullmatch(delay)
        if found is None:
            raise ValueError(f"{delay!r} is not a delay; pass seconds, or a string such as '2ms' or '50us'")
        return float(found[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[2]]
    if not 0 <= delay < math.inf:
        raise ValueError(f"delay must be a number of seconds, not {delay}")
    return float(delay)


@cache
def has_netem() -> bool:
    """Return whether this kernel can delay and drop packets of a network namespace."""
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@cache
def obstacle(*, slow: bool = False) -> str | None:
    """Return the reason why this machine does not support hosts of a `Network`; None if it does.

    Args:
        slow: Whether the network will have a delay or lose packets.

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
        with Network(1, delay=1e-3 if slow else 0.0):
            return None
    except subprocess.CalledProcessError as error:
        what = "a network with a delay (netem, or TUN devices)" if slow else "network namespaces"
        return f"this kernel refuses {what}: {' '.join(error.cmd)}: {error.stderr.strip()}"


def _run(*words: str) -> str:
    command: Sequence[str] = words
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_ranks(fn: Callable[..., Any], size: int, backend: str = "thread", *args: Any, **options: Any) -> list[Any]:
    """Return the result of `fn(comm, *args)` on each of `size` ranks that exist only for this call.

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
