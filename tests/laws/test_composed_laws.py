"""A transport made of two others meets every law that those meet, whatever ranks share a host."""

from __future__ import annotations

import pytest

from unisono.testing import Faulty, TransportLaws
from unisono.transport import Transport


class TestThreadsOnTwoHosts(TransportLaws):
    """Ranks of a host that are no neighbours in number, and no transport that compares or reduces by itself."""

    backend = "thread+thread"
    hosts = ((0, 2), (1, 3))


class TestThreadsOnUnevenHosts(TransportLaws):
    backend = "thread+thread"
    hosts = ((1, 2, 3), (0,))


class TestSharedMemoryAndGloo(TransportLaws):
    """What `init("auto")` takes on several hosts."""

    backend = "shm+gloo"
    hosts = ((0, 2), (1,), (3,))


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
