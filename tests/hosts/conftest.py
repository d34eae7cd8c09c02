"""Two hosts for all tests of this folder, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono.testing.namespaced_ranks import Network, obstacle


@pytest.fixture(scope="session")
def shared_network() -> Iterator[Network]:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    with Network(2, rate="1gbit") as made:
        yield made


@pytest.fixture
def network(shared_network: Network) -> Iterator[Network]:
    """The two hosts, with the line between them whole again afterwards."""
    yield shared_network
    for host in range(2):
        shared_network.heal(host)
