"""Prediction of the time of each algorithm that could serve a call, by simulation of its own file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.collectives.algorithms import Algorithm, find
from unisono.collectives.simulator import simulate
from unisono.collectives.simulator.rotation import Rotation
from unisono.collectives.simulator.simulation import Call, byte_offsets
from unisono.collectives.tuning.cost_table import CostTable
from unisono.core.notebook import html_table

__all__ = ["Choice", "Machine", "compare", "predicted", "size_class"]

_SEGMENTS = (1, 2, 4, 8, 16, 32)
_TIE = 1 - 1e-6
"""Factor by which a prediction must be less than the best one: engines of the simulator agree within 1e-9."""


_SLACK = 0.75
"""Part of an estimate by declared cost that no simulation falls below: latencies of ranks that wait in turn overlap."""
_MESSAGES = 1 << 18
"""Messages of all ranks that are simulated one by one, at most: about half a second."""
_IN_ROUNDS = 1 << 22
"""Messages that are simulated in rounds, at most: about half a second, too, if a rank sends several in a round."""


class Machine(NamedTuple):
    """Constants and hosts, on which a choice depends beside the call.

    Attributes:
        table: Constants, equal on all ranks.
        per_host: Ranks of each host, if all hosts have equally many consecutive ranks; 0 otherwise.
    """

    table: CostTable
    per_host: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Algorithm chosen for a call, and what it was chosen from.

    Attributes:
        collective: The collective.
        size: Number of ranks.
        nbytes: Bytes of the message, rounded up to a power of two.
        algorithm: Name of the chosen algorithm, with its options.
        options: The options by name.
        predicted_s: Predicted seconds.
        others: Predicted seconds of other algorithms, by name.
        excluded: Estimates, by declared cost, of algorithms that were not simulated because they are slower, or have
            too many messages.
        why: Reason, in a sentence.
    """

    collective: str
    size: int
    nbytes: int
    algorithm: str
    options: Mapping[str, Any]
    predicted_s: float
    others: Mapping[str, float] = field(default_factory=dict)
    excluded: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def rows(self) -> dict[str, str]:
        """Return the predicted time of each algorithm as text, the chosen one first."""
        others = [(seconds, name, "") for name, seconds in self.others.items()]
        others += [(seconds, name, "about ") for name, seconds in self.excluded.items()]
        named = {name: f"{less}{seconds * 1e6:.1f} us" for seconds, name, less in sorted(others)}
        return {self.algorithm: f"{self.predicted_s * 1e6:.1f} us", **named}

    def __repr__(self) -> str:
        lines = (f"  {name:<32} {text:>18}" for name, text in self.rows().items())
        return "\n".join((f"{self.collective}: {self.algorithm}, {self.why}", *lines))

    def _repr_html_(self) -> str:
        return html_table(f"{self.collective}: {self.algorithm}, {self.why}", self.rows())


def size_class(nbytes: int) -> int:
    """Return the least power of two that is no less than a number of bytes; all calls of a class choose alike.

    Args:
        nbytes: Bytes of the message.

    Example:
        >>> size_class(0), size_class(1024), size_class(1025)
        (1, 1024, 2048)
    """
    return 1 << max(0, nbytes - 1).bit_length()


def predicted(algorithm: Algorithm, size: int, nbytes: int, machine: Machine) -> float:
    """Return the predicted seconds of a collective.

    The network is simulated; a rank's processor also spends the overhead on each of its messages. Ranks that share
    fewer cores take at least all their work divided by the cores (Brent, 1974): inside a host, latency is the work of
    waking a rank that waits, and copies are work, too.

    Args:
        algorithm: The algorithm.
        size: Number of ranks.
        nbytes: Bytes of the message.
        machine: Constants and hosts.
    """
    table = machine.table
    network = table.network(size, machine.per_host)
    simulated = simulate(algorithm.collective, algorithm, size, nbytes, network=network).makespan
    seconds = simulated + algorithm.cost(size, nbytes).messages * table.overhead
    if not 0 < table.cores < machine.per_host:
        return seconds
    work, (alpha, beta) = _work(algorithm, size, nbytes, machine.per_host), table.inside
    spent = work.waits * alpha + work.messages * table.overhead + work.sent * beta + work.reduced * table.gamma
    return max(seconds, spent / table.cores)


class _Work(NamedTuple):
    """Peers that a rank waits for, messages, and bytes, of all ranks of a host and all steps."""

    waits: int
    messages: int
    sent: int
    reduced: int


def _work(algorithm: Algorithm, size: int, nbytes: int, per_host: int) -> _Work:
    """Return the work of the first host's ranks; messages of no bytes are not sent."""
    offsets = byte_offsets(Call(algorithm, nbytes), size, 1)
    waits = messages = sent = reduced = 0
    for step in (step for rank in range(per_host) for step in algorithm.steps(rank, size)):
        sends, receives = (
            [sum(offsets[stop] - offsets[start] for start, stop in move.runs) for move in moves]
            for moves in (step.send, step.recv)
        )
        waits += len({move.peer for move, received in zip(step.recv, receives, strict=True) if received})
        messages += sum(map(bool, sends))
        sent += sum(sends)
        reduced += step.reduce * sum(receives)
    return _Work(waits, messages, sent, reduced)


def _estimate(algorithm: Algorithm, size: int, nbytes: int, table: CostTable) -> float:
    """Return about the least seconds that can be predicted, from the declared cost."""
    cost, links = algorithm.cost(size, nbytes), (table.inside, table.between)
    alpha, beta = min(link.alpha for link in links), min(link.beta for link in links)
    return max(cost.rounds * alpha, bool(cost.rounds) * alpha + cost.sent * beta) + cost.messages * table.overhead


def _families(algorithm: Algorithm, size: int, per_host: int) -> list[list[Algorithm]]:
    """Return an algorithm with each of the options to choose from; a family differs in the number of segments."""
    if algorithm.options:
        return [[algorithm]]
    known = getattr(algorithm.file, "OPTIONS", {})
    if "segments" in known:
        return [[algorithm.with_options(segments=segments) for segments in _SEGMENTS]]
    hosts = {"levels": (per_host, size // max(1, per_host)), "group": per_host} if 1 < per_host < size else {}
    return [[algorithm], *([algorithm.with_options(**{name: hosts[name]})] for name in known if name in hosts)]


def _long(algorithm: Algorithm, size: int, nbytes: int, hosts: bool) -> bool:
    """Return whether an algorithm has too many messages to simulate, and no rounds in which all ranks do alike."""
    messages = algorithm.cost(size, nbytes).messages * size
    if not _MESSAGES < messages <= _IN_ROUNDS:
        return messages > _IN_ROUNDS
    rank: Any = Rotation(size)
    try:
        return any(hosts and len(step.send) > 1 for step in algorithm.steps(rank, size))
    except TypeError:
        return True


def compare(
    collective: str, names: Sequence[str], size: int, nbytes: int, machine: Machine, *, why: str = ""
) -> Choice:
    """Return the choice of the fastest of some algorithms.

    Those with the least estimate by declared cost are simulated first; an algorithm whose estimate exceeds the best
    time clearly is not simulated. The number of segments is doubled as long as that helps.

    Args:
        collective: The collective.
        names: Names of algorithms, at least one; options in a name are kept.
        size: Number of ranks.
        nbytes: Bytes of the message.
        machine: Constants and hosts.
        why: Reason of the choice; by default that it is the fastest.

    Example:
        >>> machine = Machine(CostTable.builtin(latency_s=10e-6, second_per_byte=1e-9), per_host=64)
        >>> compare("all_reduce", ["ring", "recursive_doubling"], 64, 1024, machine).algorithm
        'recursive_doubling'
    """
    found, excluded = dict[str, float](), dict[str, float]()
    best, chosen = math.inf, find(collective, names[0])
    families = [family for name in names for family in _families(find(collective, name), size, machine.per_host)]
    bounded = [[(_estimate(one, size, nbytes, machine.table), one) for one in family] for family in families]
    for family in sorted(bounded, key=lambda family: (min(bound for bound, _ in family), family[0][1].name)):
        latest = math.inf
        for bound, algorithm in family:
            if bound * _SLACK >= best or _long(algorithm, size, nbytes, 1 < machine.per_host < size):
                if latest == math.inf:
                    excluded[algorithm.label] = bound
                break
            seconds = found[algorithm.label] = predicted(algorithm, size, nbytes, machine)
            if seconds < best * _TIE:
                best, chosen = seconds, algorithm
            if seconds >= latest:
                break
            latest = seconds
    seconds = found.pop(chosen.label)
    table = f"{'measured' if machine.table.measured else 'built-in'} constants {machine.table.hash}"
    why = why or f"the fastest of {len(names)} algorithms for {nbytes} bytes on {size} ranks by {table}"
    return Choice(collective, size, nbytes, chosen.label, dict(chosen.options), seconds, found, excluded, why)
