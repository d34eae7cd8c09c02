"""Model of a network: message costs, shared links, and slow ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Level", "Network", "Path", "exponential", "exponentials"]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a network: equally sized units of consecutive ranks, such as hosts or racks, each with an uplink.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        name: Name of a unit, such as "host".
        ranks: Number of ranks in a unit; the last unit may have fewer.
        alpha: Latency of a message within a unit, in seconds.
        bandwidth: Bytes per second that a rank sends and receives within a unit.
        uplink: Bandwidth of the unit's link to other units, in bytes per second in each direction; all ranks of the
            unit share the link. None if the link is never the bottleneck.

    Example:
        >>> host = un.algorithms.Level("host", ranks=8, alpha=1e-6, bandwidth=10e9, uplink=1e9)
    """

    name: str
    ranks: int
    alpha: float
    bandwidth: float
    uplink: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a {self.name} must have at least 1 rank, not {self.ranks}")
        _check_times(self, "alpha")
        _check_positive(self, "bandwidth", *(() if self.uplink is None else ("uplink",)))


class Path(NamedTuple):
    """Path of a message between two ranks.

    Attributes:
        alpha: Latency, in seconds.
        beta: Seconds per byte at each of the two ranks' ports.
        out: Shared uplinks that the message passes on the sender's side, as (link number, seconds per byte).
        into: Shared uplinks that the message passes on the receiver's side, as (link number, seconds per byte).
    """

    alpha: float
    beta: float
    out: tuple[tuple[int, float], ...] = ()
    into: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """Network model for simulations: alpha-beta-gamma, or LogGP if `overhead` is given.

    Provisional: it may change in any minor version, without a deprecation.

    **Alpha, beta, gamma** (Hockney). A step begins when the rank's previous step has ended. A step's messages leave the
    rank's port one after another, each taking n / bandwidth seconds for n bytes, and arrive alpha later; latencies
    overlap. The receiver's port accepts messages in order of arrival, once the receiver has begun the step. So if both
    ranks are waiting, a message takes alpha + n / bandwidth, and both ports are busy for n / bandwidth. Reducing each
    received byte takes a further time gamma, during which later messages can arrive. A step ends when all its messages
    are delivered and reduced.

    **LogGP** (Alexandrov et al., 1995): alpha is L, 1 / bandwidth is G, and `overhead` is o. A rank's processor is busy
    for o with each message that it sends or receives. The rank can begin its next message `gap` + (n - 1) G after it
    began the previous one. A message is delivered o + L + (n - 1) G + o after its start, and the sender does not wait
    for the delivery.

    **Levels**: a message between ranks of the same unit uses the alpha and bandwidth of the innermost level at which
    they share a unit. Messages between ranks that share no unit use the network's alpha and bandwidth. A message also
    passes the uplink of every unit that it leaves or enters. Links are full duplex, serve messages in time order, and
    forward a message before it is complete (cut-through).

    Args:
        alpha: Latency in seconds.
        bandwidth: Bytes per second that a rank can send, and at the same time receive.
        gamma: Seconds to reduce one received byte.
        overhead: Processor time per message in LogGP, in seconds; None for alpha-beta-gamma.
        gap: Minimum time between the starts of two messages of a rank in LogGP, in seconds.
        levels: Levels of the network, from the innermost outwards.
        stragglers: Slowdown factor of each slow rank; the key is the rank.
        jitter: Mean of an exponential delay added to each message's latency, in seconds.
        seed: Seed for the jitter.

    Raises:
        ValueError: A time is negative or not a number, a bandwidth is not positive, or units do not nest.

    Example:
        >>> network = un.algorithms.Network(alpha=10e-6, bandwidth=1e9)
        >>> round(un.algorithms.simulate("all_reduce", "ring", size=4, nbytes=4000, network=network).makespan, 9)
        6.6e-05
    """

    alpha: float = 10e-6
    bandwidth: float = 1e9
    gamma: float = 0.0
    overhead: float | None = None
    gap: float = 0.0
    levels: tuple[Level, ...] = ()
    stragglers: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_times(self, "alpha", "gamma", "gap", "jitter", *(() if self.overhead is None else ("overhead",)))
        _check_positive(self, "bandwidth")
        if self.gap and self.overhead is None:
            raise ValueError("a gap belongs to LogGP; pass an overhead as well")
        for rank, factor in self.stragglers.items():
            if not 0 < factor < math.inf:
                raise ValueError(f"the factor of straggler {rank} must be positive, not {factor}")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.ranks % inner.ranks or outer.ranks == inner.ranks:
                raise ValueError(
                    f"a {outer.name} of {outer.ranks} ranks must consist of several whole units of {inner.ranks} "
                    f"ranks ({inner.name}); list levels from the innermost out"
                )

    @property
    def shared(self) -> bool:
        """Whether any level has an uplink that ranks share."""
        return any(level.uplink is not None for level in self.levels)

    def path(self, sender: int, receiver: int) -> Path:
        """Return the path of a message.

        Args:
            sender, receiver: Two ranks.

        Example:
            >>> un.algorithms.Network(alpha=2e-6, bandwidth=1e9).path(0, 1)
            Path(alpha=2e-06, beta=1e-09, out=(), into=())
        """
        out: list[tuple[int, float]] = []
        into: list[tuple[int, float]] = []
        for number, level in enumerate(self.levels):
            source = sender // level.ranks
            target = receiver // level.ranks
            if source == target:
                return Path(level.alpha, 1 / level.bandwidth, tuple(out), tuple(reversed(into)))
            if level.uplink is not None:
                # Number the links so that each unit of a level (a host, for example) has an even number for its
                # outgoing link and an odd number for its incoming link.
                out.append((2 * (source * len(self.levels) + number), 1 / level.uplink))
                into.append((2 * (target * len(self.levels) + number) + 1, 1 / level.uplink))
        return Path(self.alpha, 1 / self.bandwidth, tuple(out), tuple(reversed(into)))


def _check_times(owner: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(owner, name) < math.inf:
            raise ValueError(f"{name} must be a time of at least 0 s, not {getattr(owner, name)}")


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{name} must be positive, in bytes per second, not {getattr(owner, name)}")


_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def exponential(seed: int, sender: int, number: int) -> float:
    """Return an exponentially distributed number with mean 1, from the hash splitmix64 (Steele et al., OOPSLA 2014).

    Example:
        >>> exponential(0, 1, 2) == exponential(0, 1, 2) != exponential(0, 1, 3)
        True
    """
    word = _mixed(_mixed(_mixed(seed) ^ sender) ^ number)
    return -math.log1p(-(word >> 11) * 2.0**-53)


def exponentials(seed: int, size: int, number: int) -> Any:
    """Return the values of `exponential` for all senders, as an array.

    Example:
        >>> round(float(exponentials(0, 4, 2)[1] - exponential(0, 1, 2)), 12)
        0.0
    """
    import numpy as np

    words = _mixed(_mixed(np.arange(size, dtype=np.uint64) ^ np.uint64(_mixed(seed))) ^ np.uint64(number))
    return -np.log1p(-(words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(word: Any) -> Any:
    """Return the hash of an int of up to 64 bits, or of each element of an array of dtype uint64.

    The masks keep an int within 64 bits. They change nothing in an array, whose elements wrap around.
    """
    word = (word + _STEP) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)
