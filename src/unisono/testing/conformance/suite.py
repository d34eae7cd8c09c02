"""The laws as a test class: the author of a transport needs two lines to apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from unisono.core.transport import Transport
from unisono.testing.conformance import LAWS, Law, World

__all__ = ["TransportLaws"]


class TransportLaws:
    """Base class for a transport's tests: pytest collects one test for each law.

    Takes four ranks and some ten seconds. For a law that a transport cannot meet, override the method,
    preferably with one that states the reason.

    Attributes:
        backend: The name of the transport.
        wrap: Applied to the transport of each rank, to hold a wrapper to the same laws. A static method.
        hosts: Grouping of the four ranks into hosts, as for `launch`, for transports across hosts.
        device: Device of the tensors, as for `launch`: "cuda" to test the laws on GPUs.

    Example:
        >>> class TestMine(TransportLaws):
        ...     backend = "thread"
        >>> TestMine().test_ranks_are_numbered()
    """

    backend: ClassVar[str]
    wrap: ClassVar[Callable[[Transport], Transport] | None] = None
    hosts: ClassVar[tuple[tuple[int, ...], ...] | None] = None
    device: ClassVar[str | None] = None

    @property
    def world(self) -> World:
        """The ranks that the laws run on."""
        return World(self.backend, type(self).wrap, hosts=self.hosts, device=self.device)


def _test(law: Law) -> Callable[[TransportLaws], None]:
    def test(self: TransportLaws) -> None:
        law(self.world)

    test.__name__, test.__doc__ = f"test_{law.__name__}", law.__doc__
    return test


# Methods rather than one parametrised test, so that each can be overridden.
for _method in map(_test, LAWS):
    setattr(TransportLaws, _method.__name__, _method)
