"""A transport made of two others meets every law that those meet, whatever ranks share a host."""

from __future__ import annotations

import pytest

from unisono.core.transport import Transport
from unisono.testing import Faulty, TransportLaws
from unisono.testing.conformance import LAWS, Law, World


class TestThreadsOnTwoHosts(TransportLaws):
    """Ranks of a host that are no neighbours in number, and no transport that compares or reduces by itself."""

    backend = "thread+thread"
    hosts = ((0, 2), (1, 3))


@pytest.mark.soak
class TestThreadsOnUnevenHosts(TransportLaws):
    backend = "thread+thread"
    hosts = ((1, 2, 3), (0,))


# What `init("auto")` takes on several hosts, one of which has two ranks that are no neighbours in number.
THREE_HOSTS = World("shm+gloo", hosts=((0, 2), (1,), (3,)))
SAMPLE = (
    "abort_ends_every_wait",
    "a_failed_rank_is_named_to_the_others",
    "a_future_completes_unaided",
    "all_gather_equals_the_reference",
    "all_reduce_equals_the_reference",
    "different_calls_are_refused_on_every_rank",
    "parts_work_at_the_same_time",
    "peers_do_not_mix",
    "results_are_the_same_bits_everywhere_and_every_time",
)


@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=() if law.__name__ in SAMPLE else pytest.mark.soak) for law in LAWS]
)
def test_shm_and_gloo(law: Law) -> None:
    law(THREE_HOSTS)


@pytest.mark.soak
class TestSharedMemoryAndGlooOnTwoHosts(TransportLaws):
    backend = "shm+gloo"
    hosts = ((0, 1), (2, 3))


@pytest.mark.soak
class TestDelaysOverTwoHosts(TransportLaws):
    """A wrapper hides what the pair does itself; then all goes by messages, each on its way."""

    backend = "thread+thread"
    hosts = ((0, 2), (1, 3))

    @staticmethod
    def wrap(inner: Transport) -> Transport:
        return Faulty(inner, seed=0, delay=0.1, delay_s=0.002)
