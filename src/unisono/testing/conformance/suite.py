"""The laws as a test class, so that whoever writes a transport needs two lines to hold it to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from unisono.core.transport import Transport
from unisono.testing.conformance import LAWS, Law, World

__all__ = ["TransportLaws"]


class TransportLaws:
    """Derive from it in a test file; pytest then finds one test for each law.

    Takes four ranks and some ten seconds. A law that a transport cannot meet is a method that the
    class may override, best by one that says why.

    Attributes:
        backend: The name of the transport.
        wrap: Applied to the transport of each rank, to hold a wrapper to the same laws. A static method.
        hosts: Which of the four ranks are taken for one host each, as `launch` takes it, for transports of several.
        device: Where tensors live, as `launch` takes it: "cuda", if the laws are to be tried on GPUs.

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
        """Where the laws are tried."""
        return World(self.backend, type(self).wrap, hosts=self.hosts, device=self.device)


def _test(law: Law) -> Callable[[TransportLaws], None]:
    def test(self: TransportLaws) -> None:
        law(self.world)

    test.__name__, test.__doc__ = f"test_{law.__name__}", law.__doc__
    return test


# Methods, not one parametrised test: so that each can be overridden.
for _method in map(_test, LAWS):
    setattr(TransportLaws, _method.__name__, _method)
