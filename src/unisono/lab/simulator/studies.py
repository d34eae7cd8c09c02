"""Simulator studies: how algorithms scale, and how much communication overlaps with a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.collectives.algorithms import Algorithm, AlgorithmFile, algorithm_of
from unisono.host.distribution import required
from unisono.lab.simulator.network import Network
from unisono.lab.simulator.simulation import SimulatedCall, run_calls, simulate

__all__ = ["Overlap", "ScalingPoint", "plot_scaling", "scaling", "simulate_backward"]


class ScalingPoint(NamedTuple):
    """Simulated time of an algorithm for one number of ranks and one message size.

    Provisional: it may change in any minor version, without a deprecation.

    Attributes:
        algorithm: The algorithm's name.
        size: Number of ranks.
        nbytes: Message size in bytes.
        seconds: Time until the last rank finishes; None if the algorithm does not support `size` ranks.

    Example:
        >>> un.algorithms.scaling("barrier", ["dissemination"], sizes=[2], nbytes=[0])
        [ScalingPoint(algorithm='dissemination', size=2, nbytes=0, seconds=1e-05)]
    """

    algorithm: str
    size: int
    nbytes: int
    seconds: float | None


def scaling(
    collective: str,
    algorithms: Iterable[str | Algorithm],
    sizes: Iterable[int],
    nbytes: Iterable[int],
    network: Network | None = None,
) -> list[ScalingPoint]:
    """Simulate algorithms for several numbers of ranks and message sizes.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        collective: "all_reduce", ...
        algorithms: Algorithm names, or `Algorithm` objects with their options.
        sizes: Numbers of ranks.
        nbytes: Message size in bytes.
        network: Model of the network; `Network()` by default.

    Returns:
        A point for each message size, number of ranks and algorithm, sorted in this order.

    Raises:
        ValueError: The collective or an algorithm does not exist, or an argument is out of range.

    Example:
        >>> ring, doubling = un.algorithms.scaling("all_reduce", ["ring", "recursive_doubling"], [64], [1024])
        >>> ring.seconds > 10 * doubling.seconds
        True
    """
    found = [algorithm_of(collective, each) for each in algorithms]
    sizes = list(sizes)
    return [
        ScalingPoint(
            algorithm.name,
            size,
            length,
            None
            if algorithm.unsupported(size)
            else simulate(collective, algorithm, size, length, network=network).makespan,
        )
        for length in nbytes
        for size in sizes
        for algorithm in found
    ]


def plot_scaling(points: Sequence[ScalingPoint], path: str | Path) -> None:
    """Plot simulated time against the number of ranks, with one plot per message size, and write the figure to a file.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        points: Result of `scaling`.
        path: The file; its suffix determines the format: .png, .svg, .pdf.

    Raises:
        UnavailableError: matplotlib is not installed.
        ValueError: matplotlib does not support the format.
        OSError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> points = un.algorithms.scaling("all_reduce", ["ring", "binomial"], [2, 4, 8], [1024])
        >>> un.algorithms.plot_scaling(points, f"{tempfile.mkdtemp()}/curves.svg")
    """
    matplotlib = required("matplotlib.figure", "a plot needs matplotlib", "plot")
    lengths = list(dict.fromkeys(point.nbytes for point in points))
    figure = matplotlib.Figure(figsize=(4.5 * len(lengths), 4), layout="constrained")
    for axes, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        for name in dict.fromkeys(point.algorithm for point in points):
            curve = [
                (point.size, point.seconds)
                for point in points
                if (point.algorithm, point.nbytes) == (name, length) and point.seconds
            ]
            axes.plot([size for size, _ in curve], [seconds for _, seconds in curve], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="simulated seconds", title=f"{length} bytes")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of a simulated backward pass; all times in seconds.

    Provisional: it may change in any minor version, without a deprecation.

    Attributes:
        end: Time from the beginning of the backward pass until the last rank has all its reduced buckets.
        exposed: Communication time that does not overlap with computation: `end` minus the time at which the last
            bucket is ready.
        serial: Time that the communication would take if all buckets were ready at the beginning.

    Example:
        >>> overlap = un.algorithms.simulate_backward("ring", size=4, buckets=[(0.1, 1000), (0.2, 1000)])
        >>> overlap.exposed < overlap.serial
        True
    """

    end: float
    exposed: float
    serial: float


def simulate_backward(
    algorithm: str | AlgorithmFile | Algorithm,
    size: int,
    buckets: Sequence[tuple[float, int]],
    network: Network | None = None,
) -> Overlap:
    """Simulate a backward pass that reduces its buckets in order, on one communicator, while it computes.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        algorithm: The all_reduce algorithm: a name, an `AlgorithmFile`, or an `Algorithm` with its options.
        size: Number of ranks.
        buckets: For each bucket, the time in seconds at which its gradients are ready, and its size in bytes.
        network: Model of the network; `Network()` by default.

    Returns:
        The end time, and how much communication is exposed.

    Raises:
        ValueError: There are no buckets, the algorithm does not exist, or the algorithm does not support `size` ranks.

    Example:
        >>> un.algorithms.simulate_backward("ring", size=4, buckets=[(0.01, 10**6), (0.02, 10**6)]).exposed < 0.0016
        True
    """
    if not buckets:
        raise ValueError("a backward pass must have at least one bucket")
    algorithm = algorithm_of("all_reduce", algorithm)
    network = network or Network()
    end = run_calls([SimulatedCall(algorithm, nbytes, ready) for ready, nbytes in buckets], size, network).makespan
    serial = run_calls([SimulatedCall(algorithm, nbytes) for _, nbytes in buckets], size, network).makespan
    return Overlap(end, end - max(ready for ready, _ in buckets), serial)
