"""Simulates collectives on a network model, using the steps in the algorithms' files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal

from unisono.collectives.algorithms import Algorithm, AlgorithmFile, Step, algorithm_of
from unisono.core.garbage import no_collection
from unisono.lab.simulator.event_queue import EventQueue, Message
from unisono.lab.simulator.network import Network

__all__ = ["SimulatedCall", "Simulation", "run_calls", "simulate"]

_Engine = Literal["rounds", "events"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulation; all times are simulated, in seconds.

    Provisional: it may change in any minor version, without a deprecation.

    Attributes:
        ends: For each rank, the time at which it finishes.
        messages: Number of messages.
        engine: "rounds" (numpy) or "events".
        record: All messages, ordered by end time, if they were recorded.

    Example:
        >>> result = un.algorithms.simulate("broadcast", "binomial", size=4, nbytes=1000, record=True)
        >>> round(result.makespan, 9), result.messages, result.record[0].receiver
        (2.2e-05, 3, 2)
    """

    ends: Sequence[float]
    messages: int
    engine: _Engine
    record: tuple[Message, ...] = field(default=(), repr=False)

    @property
    def makespan(self) -> float:
        """Time at which the last rank finishes."""
        return float(max(self.ends))

    @property
    def events(self) -> int:
        """Number of messages sent plus number of messages received."""
        return 2 * self.messages


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One collective of a simulated program.

    Attributes:
        algorithm: The collective's algorithm.
        nbytes: Message size in bytes.
        ready: Earliest time at which a rank may begin the collective, in seconds.
    """

    algorithm: Algorithm
    nbytes: int
    ready: float = 0.0


def simulate(
    collective: str,
    algorithm: str | AlgorithmFile | Algorithm,
    size: int,
    nbytes: int,
    *,
    network: Network | None = None,
    start: Sequence[float] | None = None,
    itemsize: int = 1,
    record: bool = False,
    engine: _Engine | None = None,
) -> Simulation:
    """Simulate a collective on a network. The ranks run the steps in the algorithm's file, but have no data.

    Provisional: it may change in any minor version, without a deprecation.

    Args:
        collective: Name of the collective, such as "all_reduce"; its root, if any, is rank 0.
        algorithm: A name, an `AlgorithmFile` from `algorithms/<collective>/`, or an `Algorithm` with its options.
        size: Number of ranks.
        nbytes: Message size in bytes: the size of one rank's input or output, whichever is larger.
        network: Model of the network; `Network()` by default.
        start: Time at which each rank calls the collective, in seconds; 0 by default.
        itemsize: Element size in bytes; chunks contain whole elements.
        record: Whether to keep all messages, with their times.
        engine: "rounds" simulates a round on all ranks at once; the ranks' steps must be rotations of each other.
            "events" supports everything. "rounds" and "events" give the same results. The default is "rounds" if it
            supports the algorithm and the network.

    Returns:
        The ranks' end times, and the messages if they are recorded.

    Raises:
        ValueError: The collective or algorithm does not exist, an argument is out of range, the engine does not support
        the call, or the algorithm deadlocks.

    Cost: about 2 to 7 us per message; 1 to 5 ns with engine "rounds".

    Example:
        >>> round(un.algorithms.simulate("all_reduce", "ring", size=1000, nbytes=1 << 20).makespan, 6)
        0.022076
    """
    algorithm = algorithm_of(collective, algorithm)
    if nbytes < 0 or itemsize < 1 or nbytes % itemsize:
        raise ValueError(f"a message must have whole elements of at least 1 byte; {nbytes} bytes of {itemsize} do not")
    return run_calls([SimulatedCall(algorithm, nbytes)], size, network or Network(), start, itemsize, record, engine)


def run_calls(
    calls: Sequence[SimulatedCall],
    size: int,
    network: Network,
    start: Sequence[float] | None = None,
    itemsize: int = 1,
    record: bool = False,
    engine: _Engine | None = None,
) -> Simulation:
    """Simulate several collectives, one after another on each rank; see `simulate`."""
    times = [0.0] * size if start is None else [float(time) for time in start]
    if size < 1 or len(times) != size:
        raise ValueError(f"a group must have at least 1 rank, each with a start: {size} ranks, {len(times)} starts")
    for call in calls:
        if reason := call.algorithm.unsupported(size):
            raise ValueError(reason)
    engines = _engines(network, record)
    if engine is not None and engine not in engines:
        raise ValueError(
            f"engine {engine!r} cannot serve this network or recording; those that can: {', '.join(engines)}"
        )
    if "rounds" in engines and engine != "events":
        try:
            return _in_rounds(calls, size, network, times, itemsize)
        except TypeError as error:
            # Either this engine does not support the algorithm, or the algorithm's file has a bug, for which the other
            # engine raises the same error.
            if engine is not None:
                raise ValueError(f"engine 'rounds' cannot serve {calls[0].algorithm.name!r}: {error}") from error
    # Pause the garbage collector: it would scan all ranks' state again and again, but the queue creates no cycles.
    with no_collection():
        return _by_events(calls, size, network, times, itemsize, record)


def _engines(network: Network, record: bool) -> list[_Engine]:
    in_rounds = network.overhead is None and not record and find_spec("numpy")
    return ["rounds", "events"] if in_rounds else ["events"]


def _in_rounds(
    calls: Iterable[SimulatedCall], size: int, network: Network, times: Sequence[float], itemsize: int
) -> Simulation:
    # Import `rounds` here, because it needs numpy, and the other engine does not.
    from unisono.lab.simulator.rounds import Rotation, Rounds

    messages = 0
    # `steps` expects an int, but also works with a symbolic rank.
    rank: Any = Rotation(size)
    for call in calls:
        times = [max(time, call.ready) for time in times]
        rounds = Rounds(call.algorithm.offsets(size, call.nbytes, itemsize), network, times, messages)
        rounds.run(call.algorithm.steps(rank, size))
        times = rounds.end.tolist()
        messages = rounds.messages
    return Simulation(times, messages, "rounds")


def _by_events(
    calls: Sequence[SimulatedCall], size: int, network: Network, times: Sequence[float], itemsize: int, record: bool
) -> Simulation:
    tables = [call.algorithm.offsets(size, call.nbytes, itemsize) for call in calls]
    firsts = [0, *accumulate(len(table) for table in tables)]
    bases = [0, *accumulate(table[-1] for table in tables)]
    offsets = [base + offset for base, table in zip(bases, tables, strict=False) for offset in table]
    programs = [_program(calls, firsts, rank, size) for rank in range(size)]
    queue = EventQueue(programs, offsets, network, times, record)
    queue.run()
    if waiting := sum(not rank.done for rank in queue.ranks):
        algorithm = calls[0].algorithm
        raise ValueError(
            f"{waiting} ranks never end: the {algorithm.collective} algorithm {algorithm.name!r} deadlocks; "
            "check it with un.algorithms.verify"
        )
    found = tuple(sorted(queue.record, key=lambda message: (message.end_s, message.sender, message.start_s)))
    return Simulation([rank.ends for rank in queue.ranks], sum(rank.sent for rank in queue.ranks), "events", found)


def _program(calls: Sequence[SimulatedCall], firsts: Sequence[int], rank: int, size: int) -> Iterator[Step | float]:
    """Yield, for each call, its `ready` time (if not 0) and its steps. Chunk numbers continue from call to call."""
    for call, first in zip(calls, firsts, strict=False):
        if call.ready:
            yield call.ready
        for step in call.algorithm.steps(rank, size):
            yield step if not first else step.renumbered(int, first)
