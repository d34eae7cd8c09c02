"""The simulator at the scale that it is for: 100,000 ranks and more, and hosts that share their links."""

from __future__ import annotations

import resource
import time
from collections import Counter
from typing import Any

import pytest

from unisono.algorithms import Level, Network, find, simulate

A, B = 10e-6, 1e-9
PLAIN = Network(alpha=A, bandwidth=1 / B)
HOST = 8
CLUSTER = Network(alpha=10e-6, bandwidth=10e9, levels=(Level("host", HOST, alpha=1e-6, bandwidth=10e9, uplink=1e9),))


def check_hierarchy(size: int, nbytes: int) -> None:
    hierarchical = find("all_reduce", "hierarchical", levels=(HOST, size // HOST))
    found = simulate("all_reduce", hierarchical, size, nbytes, network=CLUSTER, record=True)
    sent = Counter[int]()
    for message in found.record:
        sent[message.sender // HOST] += message.nbytes * (message.sender // HOST != message.receiver // HOST)
    hosts = size // HOST
    assert set(sent.values()) == {2 * (hosts - 1) * nbytes // hosts}
    ring, doubling = (
        simulate("all_reduce", name, size, nbytes, network=CLUSTER).makespan for name in ("ring", "recursive_doubling")
    )
    if nbytes <= 1 << 20:
        assert ring >= 5 * found.makespan
    if nbytes >= 1 << 20:
        assert doubling >= 10 * found.makespan
    assert found.makespan <= 1.1 * ring


def test_hierarchy() -> None:
    check_hierarchy(32 * HOST, 1 << 18)


@pytest.mark.soak
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 30])
def test_hierarchy_of_128_hosts(nbytes: int) -> None:
    check_hierarchy(128 * HOST, nbytes)


def timed(name: str, size: int, nbytes: int) -> tuple[Any, float]:
    begin = time.process_time()
    found = simulate("all_reduce", name, size, nbytes, network=PLAIN)
    return found, time.process_time() - begin


def test_many_ranks() -> None:
    found, _ = timed("recursive_doubling", 1 << 12, 1024)
    assert found.makespan == pytest.approx(12 * (A + 1024 * B), rel=1e-9)
    found, _ = timed("ring", 1000, 1 << 20)
    longest = -(-(1 << 20) // 1000)
    assert found.makespan == pytest.approx(2 * 999 * (A + longest * B), rel=1e-4)


@pytest.mark.soak
def test_100_000_ranks() -> None:
    """What a message costs to simulate does not grow with the ranks; both sizes are timed at the same load."""
    found, seconds = timed("recursive_doubling", 100_000, 1024)
    assert found.makespan == pytest.approx(18 * (A + 1024 * B), rel=1e-9)
    assert seconds / (100_000 * 17) < 3 * timed("recursive_doubling", 10_000, 1024)[1] / (10_000 * 14)
    found, seconds = timed("binomial", 100_000, 1024)
    # The root's last subtree is the smaller one: its message has left before the root is ready, which hides one alpha.
    assert found.makespan == pytest.approx(33 * A + 34 * 1024 * B, rel=1e-9)
    assert seconds < 3 * 10 * timed("binomial", 10_000, 1024)[1]


@pytest.mark.soak
def test_ring_of_100_000_ranks() -> None:
    found, _ = timed("ring", 100_000, 10**8)
    assert found.engine == "rounds"  # event by event, 2e10 messages would take hours
    assert found.makespan == pytest.approx(2 * 99_999 * (A + 1000 * B), rel=1e-9)


@pytest.mark.soak
def test_tree_of_1_000_000_ranks() -> None:
    found, _ = timed("binomial", 1_000_000, 1024)
    assert found.makespan == pytest.approx(39 * A + 40 * 1024 * B, rel=1e-9)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 1024**2
