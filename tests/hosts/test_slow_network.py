"""`Network` with delay and loss, by netem where the kernel has it, and by the relay: figures, cuts and the end."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from unisono.testing import Network, namespaced_ranks
from unisono.testing.namespaced_ranks import obstacle

WAYS = ("netem", "relay")


def hold(link: Connection) -> None:
    """Hold a network, and tell of it."""
    os.setsid()
    with Network(2, delay="1ms") as network:
        network.start(1, "sleep", "600")
        link.send(network.name(0).rpartition("-")[0])
        link.recv()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    reason = obstacle(slow=True)
    if reason is not None:
        pytest.skip(reason)
    way: str = request.param
    if way == "netem" and not namespaced_ranks.has_netem():
        pytest.skip("this kernel has no netem")
    if way == "relay":
        monkeypatch.setattr(namespaced_ranks, "has_netem", lambda: False)
    return way


@contextlib.contextmanager
def receiver(network: Network, host: int) -> Iterator[socket.socket]:
    with bound(network, host) as made:
        # As root, beyond the system's limit, so that only the network loses anything.
        made.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)
        yield made


def bound(network: Network, host: int) -> socket.socket:
    def made() -> socket.socket:
        network.enter(host)
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.settimeout(0.1)
        one.bind((network.addresses[host], 0))
        return one

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def arrived(near: socket.socket, far: socket.socket, count: int) -> list[int]:
    """Send datagrams, not so many in one go that a queue would be full, and return the numbers of those that arrive."""
    for number in range(count):
        near.sendto(number.to_bytes(2, "big"), far.getsockname())
        if number % 20 == 19:
            # Datagrams have no flow control.
            time.sleep(0.001)
    found: list[int] = []
    with contextlib.suppress(TimeoutError):
        while True:
            found.append(int.from_bytes(far.recv(2), "big"))
    return found


@pytest.mark.parametrize("ipv6", [False, True])
def test_rate_and_round_trip_are_those_asked_for(way: str, ipv6: bool) -> None:
    with Network(2, "100mbit", ipv6=ipv6, delay="2ms") as network:
        # Other programs can make packets late, but none early.
        reports = [network.report(0.1) for _ in range(3)]
    assert min(report.round_trip for report in reports) < 5.2e-3, reports
    assert all(report.round_trip >= 4e-3 for report in reports), reports
    assert any(85e6 < report.rate < 115e6 for report in reports), reports
    assert min(report.processor for report in reports) < 0.5, reports


def test_packets_are_lost_at_random(way: str) -> None:
    count, loss = 3000, 0.1
    with Network(2, None, delay=1e-3, loss=loss) as network, receiver(network, 1) as far, bound(network, 0) as near:
        lost = count - len(arrived(near, far, count))
    assert abs(lost - count * loss) < 5 * math.sqrt(count * loss * (1 - loss))


def test_relay_loses_the_same_packets_again(way: str) -> None:
    if way != "relay":
        pytest.skip("netem draws other losses each time, since it has no seed")
    found: list[list[int]] = []
    for seed in (1, 1, 2):
        with (
            Network(2, None, loss=0.5, seed=seed) as network,
            receiver(network, 1) as far,
            bound(network, 0) as near,
        ):
            found.append(arrived(near, far, 100))
    assert found[0] == found[1] != found[2]


def test_cut_host_receives_nothing_until_it_is_healed(way: str) -> None:
    with Network(3, delay="1ms") as network:
        with receiver(network, 1) as far, receiver(network, 2) as third, bound(network, 0) as near:
            everything = list(range(20))
            assert arrived(near, far, 20) == everything
            assert network.sent(0) >= 20 * 30
            network.cut(1)
            assert arrived(near, far, 20) == arrived(far, near, 20) == []
            assert arrived(near, third, 20) == everything
            with pytest.raises(TimeoutError):
                network.report()
            network.heal(1)
            assert arrived(near, far, 20) == everything
        assert network.report(0.1).round_trip >= 2e-3


def inodes(stem: str) -> dict[int, str]:
    return {path.stat().st_ino: path.name for path in Path("/run/netns").glob(f"{stem}-*")}


def inside(spaces: dict[int, str]) -> list[str]:
    """Commands of the processes in these namespaces. A process that has ended is in none."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/net").stat().st_ino in spaces:
                found.append((process / "cmdline").read_text())
    return found


def test_nothing_is_left_behind_after_an_error(way: str) -> None:
    spaces: dict[int, str] = {}
    with contextlib.suppress(ZeroDivisionError), Network(2, delay="1ms") as network:
        stem = network.name(0).rpartition("-")[0]
        spaces = inodes(stem)
        assert len(spaces) == 3
        sleeper = network.start(1, "sleep", "600")
        raise ZeroDivisionError
    assert sleeper.wait(60.0) == -signal.SIGKILL
    assert (inodes(stem), inside(spaces), namespaces_with_devices()) == ({}, [], [])
    network.close()


def namespaces_with_devices() -> list[str]:
    """TUN devices of the test's own namespace."""
    return [path.name for path in Path("/sys/class/net").iterdir() if (path / "tun_flags").exists()]


def test_nothing_is_left_behind_by_a_killed_program(way: str) -> None:
    # With the preloads of ranks, so that whoever comes first starts the server for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "unisono.launcher.preload"])
    near, far = context.Pipe()
    program = context.Process(target=hold, args=(far,))
    program.start()
    far.close()
    assert program.pid is not None
    stem = near.recv()
    spaces = inodes(stem)
    assert len(spaces) == 3
    assert inside(spaces)
    os.killpg(program.pid, signal.SIGKILL)
    program.join()
    until = time.monotonic() + 10
    while inodes(stem) or inside(spaces):
        assert time.monotonic() < until, (inodes(stem), inside(spaces))
        time.sleep(0.02)


@pytest.mark.parametrize("wrong", ["2", "2 ms", "ms", "-1ms", -1.0, math.inf, math.nan])
def test_wrong_delay_is_refused(wrong: float | str) -> None:
    with pytest.raises(ValueError, match="delay"):
        Network(2, delay=wrong)


def test_wrong_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        Network(2, loss=1.5)


def test_wrong_rate_is_refused_with_the_words_of_tc(way: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused, Network(2, "fast", delay="1ms"):
        pass
    assert "fast" in refused.value.stderr
