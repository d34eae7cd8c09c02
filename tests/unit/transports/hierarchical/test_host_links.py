"""Packets between hosts: all hear all, differences are seen by all, and no wait is without end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unisono.errors import CommTimeoutError, PeerLostError
from unisono.transports.hierarchical.host_links import HostLinks, Packet

SAME = b"what all hosts do"[:16]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[HostLinks]]:
    """As many hosts, each with a socket to each other one; their first ranks are 0, 10, 20, ..."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for low in range(count):
        for high in range(low + 1, count):
            ends[low][high], ends[high][low] = socket.socketpair()
    ranks, where = [10 * host for host in range(count)], [f"10.0.0.{host}:1" for host in range(count)]
    made = [HostLinks(its, ranks, where) for its in ends]
    try:
        yield made
    finally:
        for lanes in made:
            lanes.close()


def at_once(*things: Callable[[], Any]) -> list[Any]:
    """Run each in a thread; return the results or exceptions."""
    found: list[Any] = [None] * len(things)
    start = threading.Barrier(len(things))

    def run(index: int) -> None:
        start.wait(20)
        try:
            found[index] = things[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(things))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


def swap(lanes: HostLinks, host: int, count: int, content: bytes, digest: bytes = SAME, within_s: float = 10.0) -> Any:
    """Return whether all are equal, and the values of the others."""
    rooms = {other: bytearray(len(content)) for other in range(count) if other != host}
    packet = Packet(digest, memoryview(bytearray(content)))
    views = {other: memoryview(room) for other, room in rooms.items()}
    same = lanes.swap(packet, views, time.monotonic() + within_s)
    return same, {other: bytes(room) for other, room in rooms.items()}


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 3 << 20])
def test_all_hosts_exchange(nbytes: int) -> None:
    said = [os.urandom(nbytes) for _ in range(3)]
    with hosts(3) as made:
        for _ in range(3):
            found = at_once(*(lambda host=host: swap(made[host], host, 3, said[host]) for host in range(3)))
            for host in range(3):
                assert found[host] == (True, {other: said[other] for other in range(3) if other != host})


@pytest.mark.parametrize("nbytes", [0, 3 << 20])
def test_mismatch_is_seen_by_all(nbytes: int) -> None:
    digests = [SAME, SAME, SAME[::-1]]
    with hosts(3) as made:
        found = at_once(
            *(lambda host=host: swap(made[host], host, 3, bytes(nbytes), digests[host]) for host in range(3))
        )
    assert [same for same, _ in found] == [False] * 3


def test_different_lengths_are_a_mismatch() -> None:
    with hosts(2) as made:
        found = at_once(lambda: swap(made[0], 0, 2, bytes(10)), lambda: swap(made[1], 1, 2, bytes(3 << 20)))
    assert [same for same, _ in found[:2]] == [False, False]


def test_silent_host_is_named() -> None:
    with hosts(3) as made:
        found = at_once(*(lambda host=host: swap(made[host], host, 3, b"", within_s=0.5) for host in range(2)))
        for error in found:
            assert isinstance(error, CommTimeoutError)
            assert error.peer == 20
            assert "rank 20 at 10.0.0.2:1" in str(error)
            assert "rank 10" not in str(error)


def test_leaving_host_is_named() -> None:
    with hosts(2) as made:
        made[1].close()
        (error,) = at_once(lambda: swap(made[0], 0, 2, b""))
    assert isinstance(error, PeerLostError)
    assert "rank 10 at 10.0.0.1:1 was lost" in str(error)


def test_abort_ends_a_wait_with_its_cause() -> None:
    with hosts(2) as made:
        waits = threading.Event()

        def abort() -> None:
            waits.wait(60.0)
            made[0].abort(ValueError("enough"))

        def wait() -> Any:
            waits.set()
            return swap(made[0], 0, 2, b"", within_s=60)

        started = time.monotonic()
        error, _ = at_once(wait, abort)
    assert isinstance(error, ValueError)
    assert time.monotonic() - started < 40
