"""Conformance checks for every transport: plain functions that take a `World`, grouped into families."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from unisono.core.transport import Transport
from unisono.testing.cases import CALLS
from unisono.testing.conformance import agreement, any_source, bad_input, collectives, failures, groups, messages, works
from unisono.testing.conformance.world import Check, World

__all__ = ["CHECKS", "Check", "TransportConformance", "World"]

_FAMILIES = (messages, any_source, works, groups, collectives, bad_input, agreement, failures)

CHECKS: tuple[Check, ...] = (
    *(getattr(family, name) for family in _FAMILIES for name in family.__all__ if name != "equals_reference"),
    *(collectives.equals_reference(call) for call in CALLS),
)
"""All checks. The name of a check is a sentence, and the docstring has the details."""


class TransportConformance:
    """Base class for a transport's tests: pytest collects one test for each check.

    The checks use up to four ranks and take about ten seconds. If a transport cannot pass a check, override the check's
    method, preferably with a method that states the reason.

    Attributes:
        backend: The name of the transport.
        wrap: Static method applied to each rank's transport, to run the checks on a wrapper.
        hosts: Grouping of the four ranks into hosts, as for `launch`, for transports that connect hosts.
        device: Device of the tensors, as for `launch`: "cuda" to run the checks on GPUs.

    Example:
        >>> class TestMine(TransportConformance):
        ...     backend = "thread"
        >>> TestMine().test_ranks_are_numbered()
    """

    backend: ClassVar[str]
    wrap: ClassVar[Callable[[Transport], Transport] | None] = None
    hosts: ClassVar[tuple[tuple[int, ...], ...] | None] = None
    device: ClassVar[str | None] = None

    @property
    def world(self) -> World:
        """The ranks that the checks run on."""
        return World(self.backend, type(self).wrap, hosts=self.hosts, device=self.device)


def _test(check: Check) -> Callable[[TransportConformance], None]:
    def test(self: TransportConformance) -> None:
        check(self.world)

    test.__name__ = f"test_{check.__name__}"
    test.__doc__ = check.__doc__
    return test


# Each check gets a method, because a subclass cannot override a single case of a parametrised test.
for _method in map(_test, CHECKS):
    setattr(TransportConformance, _method.__name__, _method)
