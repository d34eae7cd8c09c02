"""A transport made of two others meets every check that those meet, whatever ranks share a host."""

from __future__ import annotations

import pytest

from unisono.core.transport import Transport
from unisono.testing import Faulty, TransportConformance
from unisono.testing.conformance import CHECKS, Check, World


@pytest.mark.soak
class TestThreadsOnTwoHosts(TransportConformance):
    """Ranks of a host that are no neighbours in number, and no transport that compares or reduces by itself."""

    backend = "thread+thread"
    hosts = ((0, 2), (1, 3))


@pytest.mark.soak
class TestThreadsOnUnevenHosts(TransportConformance):
    backend = "thread+thread"
    hosts = ((1, 2, 3), (0,))


# What `init("auto")` takes on several hosts, one of which has two ranks that are no neighbours in number.
THREE_HOSTS = World("shm+tcp", hosts=((0, 2), (1,), (3,)))
SAMPLE = (
    "abort_ends_every_wait",
    "barrier_waits_for_all_ranks",
    "failed_rank_is_reported_to_the_others",
    "future_completes_without_polling",
    "all_reduce_equals_reference",
    "different_calls_are_rejected_on_every_rank",
    "subgroups_run_concurrently",
    "peers_are_separate",
)


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=() if check.__name__ in SAMPLE else pytest.mark.soak) for check in CHECKS]
)
def test_shm_and_tcp(check: Check) -> None:
    check(THREE_HOSTS)


@pytest.mark.soak
class TestSharedMemoryAndTcpOnTwoHosts(TransportConformance):
    backend = "shm+tcp"
    hosts = ((0, 1), (2, 3))


@pytest.mark.soak
class TestDelaysOverTwoHosts(TransportConformance):
    """A wrapper hides what the pair does itself; then all goes by messages, each on its way."""

    backend = "thread+thread"
    hosts = ((0, 2), (1, 3))

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Faulty(inner, seed=0, delay=0.1, delay_s=0.002)
