"""A transport made of two others meets every law that those meet, whatever ranks share a host."""

from __future__ import annotations

import pytest

from unisono.testing import TransportLaws


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
