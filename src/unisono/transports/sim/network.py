"""Duration of simulated messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Link", "Network"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks. A message of n bytes takes latency_s + n * second_per_byte.

    The bytes of one message follow those of the last one, so a busy link transfers
    1 / second_per_byte bytes per second; latencies overlap. This is the postal (alpha-beta) model of Hockney.

    Attributes:
        latency_s: From the first byte sent to the first byte received, in seconds.
        second_per_byte: The inverse of its bandwidth.
    """

    latency_s: float = 20e-6
    second_per_byte: float = 1e-10

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.second_per_byte >= 0):
            raise ValueError(f"latency_s and second_per_byte must not be negative, as in {self}")


@dataclass(frozen=True, slots=True)
class Network:
    """Links between all ranks.

    Attributes:
        link: Link of all pairs not in `links`.
        links: By (source, destination), ranks of the whole simulation.
        jitter: Each message's latency is longer by up to this fraction of it, depending on the seed.
        request_s: Response time of the control plane.
        notice_s: Delay until the other ranks are notified of a rank's death.

    Example:
        >>> slow = Network(links={(0, 1): Link(latency_s=0.01)})
        >>> slow.of(0, 1).latency_s, slow.of(1, 0).latency_s
        (0.01, 2e-05)
    """

    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    jitter: float = 0.0
    request_s: float = 50e-6
    notice_s: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("jitter", "request_s", "notice_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")

        for ends, link in self.links.items():
            if not (isinstance(ends, tuple) and len(ends) == 2 and all(isinstance(rank, int) for rank in ends)):
                raise TypeError(f"links must be named by (source, destination), such as (0, 1), not {ends!r}")
            if not isinstance(link, Link):
                raise TypeError(f"the link of {ends} must be a Link, not {link!r}")

    def check_ranks(self, size: int) -> None:
        """Check that all links are between existing ranks.

        Args:
            size: Number of ranks.

        Raises:
            ValueError: A link begins or ends at another rank.
        """
        for ends in self.links:
            if not all(0 <= rank < size for rank in ends):
                raise ValueError(f"a link is between ranks {ends[0]} and {ends[1]}, but the ranks are 0 to {size - 1}")

    def of(self, source: int, target: int) -> Link:
        """Return the link from one rank to another."""
        return self.links.get((source, target), self.link)
