"""Predicts the time of each algorithm for a call from the algorithm's declared cost and its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from unisono.collectives.algorithms import Algorithm, Step, find
from unisono.collectives.tuning.cost_table import CostTable

__all__ = ["Choice", "Machine", "compare", "predicted", "size_class"]

_SEGMENTS = (1, 2, 4, 8, 16, 32)


class Machine(NamedTuple):
    """Inputs to the choice of an algorithm, besides the call: cost constants, and number of ranks per host.

    Attributes:
        table: Cost constants, equal on all ranks.
        per_host: Ranks per host, if all hosts have the same number of consecutive ranks; 0 otherwise.
    """

    table: CostTable
    per_host: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Algorithm chosen for a call, and the alternatives.

    Attributes:
        collective: The collective.
        size: Number of ranks.
        nbytes: Size of the message in bytes, rounded up to a power of two.
        algorithm: Name of the chosen algorithm, with its options.
        options: Options of the chosen algorithm by name.
        predicted_s: Predicted time in seconds.
        others: Predicted times of the other algorithms in seconds, by name.
        why: Reason, as a sentence.
    """

    collective: str
    size: int
    nbytes: int
    algorithm: str
    options: Mapping[str, Any]
    predicted_s: float
    others: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def rows(self) -> dict[str, str]:
        """Return the predicted time of each algorithm as text, with the chosen algorithm first."""
        others = sorted((seconds, name) for name, seconds in self.others.items())
        named = {name: f"{seconds * 1e6:.1f} us" for seconds, name in others}
        return {self.algorithm: f"{self.predicted_s * 1e6:.1f} us", **named}

    def __repr__(self) -> str:
        lines = (f"  {name:<32} {text:>18}" for name, text in self.rows().items())
        return "\n".join((f"{self.collective}: {self.algorithm}, {self.why}", *lines))

    def _repr_html_(self) -> str:
        from unisono.core.notebook import html_table

        return html_table(f"{self.collective}: {self.algorithm}, {self.why}", self.rows())


def size_class(nbytes: int) -> int:
    """Return the number of bytes rounded up to a power of two. All calls in a size class use the same algorithm.

    Args:
        nbytes: Size of the message in bytes.

    Example:
        >>> size_class(0), size_class(1024), size_class(1025)
        (1, 1024, 2048)
    """
    return 1 << max(0, nbytes - 1).bit_length()


class _StepTraffic(NamedTuple):
    """One rank's messages and bytes in a step."""

    peers: int = 0
    messages: int = 0
    sent: int = 0
    received: int = 0
    sent_away: int = 0
    received_away: int = 0
    reduced: int = 0


def predicted(algorithm: Algorithm, size: int, nbytes: int, machine: Machine) -> float:
    """Return the predicted time of a collective in seconds.

    Each round costs one latency, and each message costs one overhead. A step's bytes move at link speed; between hosts,
    a host's ranks share one link. Received data is reduced while further messages of the round arrive. Only the steps
    of rank 0 are examined or, if there are several hosts, the steps of all ranks on the first host. If the algorithm
    has more rounds than the examined ranks have steps, each round is assumed to move at least as much as the smallest
    of these steps. If a host has fewer cores than ranks, the time is at least the ranks' total work divided by the
    number of cores (Brent, 1974). The ranks' work includes copies and the latency of waking a waiting rank.

    Args:
        algorithm: The algorithm.
        size: Number of ranks.
        nbytes: Size of the message in bytes.
        machine: Cost constants and ranks per host.
    """
    table = machine.table
    per_host = machine.per_host
    several = 1 < per_host < size
    ranks = per_host if several else 1
    near = table.inside if per_host >= size or several else table.between
    offsets = algorithm.offsets(size, nbytes)
    moving = crossing = reduced = 0.0
    steps = 0
    least = nbytes
    for number in zip_longest(*(_traffic(algorithm, rank, size, offsets, per_host) for rank in range(ranks))):
        done = [traffic or _StepTraffic() for traffic in number]
        inside = max(max(one.sent - one.sent_away, one.received - one.received_away) for one in done)
        away = max(sum(one.sent_away for one in done), sum(one.received_away for one in done))
        if inside or away:
            steps += 1
            crossing += away > 0
            least = min(least, inside or away)
        moving += max(inside * near.beta, away * table.between.beta)
        reduced += max(one.reduced for one in done)
    cost = algorithm.cost(size, nbytes)
    far = cost.rounds * crossing / max(1, steps)
    seconds = far * table.between.alpha + (cost.rounds - far) * near.alpha
    moving = max(moving, cost.rounds * least * near.beta)
    reducing = reduced * table.gamma
    # Reducing a message overlaps with receiving the round's next messages, except for one message per round.
    beside = min(moving, reducing) * cost.rounds / max(1, cost.rounds, cost.messages)
    seconds += max(moving, reducing) + beside + cost.messages * table.overhead
    if not 0 < table.cores < per_host:
        return seconds
    work = [traffic for rank in range(per_host) for traffic in _traffic(algorithm, rank, size, offsets, 0)]
    spent = sum(one.peers for one in work) * table.inside.alpha + sum(one.messages for one in work) * table.overhead
    spent += sum(one.sent for one in work) * table.inside.beta + sum(one.reduced for one in work) * table.gamma
    return max(seconds, spent / table.cores)


def _traffic(
    algorithm: Algorithm, rank: int, size: int, offsets: Sequence[int], per_host: int
) -> Iterator[_StepTraffic]:
    """Yield a rank's traffic in each step, without empty messages. If `per_host` is 0, all traffic counts as local."""
    host = rank // per_host if per_host else 0

    def side(step: Step, receives: bool) -> tuple[int, int, int, int]:
        peers = set[int]()
        messages = 0
        total = 0
        away = 0
        for move in step.recv if receives else step.send:
            length = sum(offsets[stop] - offsets[start] for start, stop in move.runs)
            if length:
                peers.add(move.peer)
                messages += 1
                total += length
                away += length if per_host and move.peer // per_host != host else 0
        return len(peers), messages, total, away

    for step in algorithm.steps(rank, size):
        _, messages, sent, sent_away = side(step, receives=False)
        peers, _, received, received_away = side(step, receives=True)
        yield _StepTraffic(peers, messages, sent, received, sent_away, received_away, received if step.reduce else 0)


def _variants(algorithm: Algorithm, size: int, per_host: int) -> list[Algorithm]:
    """Return variants of an algorithm with different options, or the algorithm itself if its options are set."""
    if algorithm.options:
        return [algorithm]
    known = getattr(algorithm.file, "OPTIONS", {})
    if "segments" in known:
        return [algorithm.with_options(segments=segments) for segments in _SEGMENTS]
    hosts = {"levels": (per_host, size // max(1, per_host)), "group": per_host} if 1 < per_host < size else {}
    return [algorithm, *(algorithm.with_options(**{name: hosts[name]}) for name in known if name in hosts)]


def compare(
    collective: str,
    names: Sequence[str],
    size: int,
    nbytes: int,
    machine: Machine,
    *,
    forced: str | None = None,
    why: str = "",
) -> Choice:
    """Return the algorithm with the lowest predicted time; among equally fast ones, the one with the fewest messages.

    Args:
        collective: The collective.
        names: Names of algorithms, at least one. If a name has options, only these options are considered.
        size: Number of ranks.
        nbytes: Size of the message in bytes.
        machine: Cost constants and ranks per host.
        forced: Name of the algorithm to choose instead of the fastest; may also be none of `names`.
        why: Reason for choosing `forced`; unused without it.

    Example:
        >>> machine = Machine(CostTable.builtin(latency_s=10e-6, second_per_byte=1e-9), per_host=64)
        >>> compare("all_reduce", ["ring", "recursive_doubling"], 64, 1024, machine).algorithm
        'recursive_doubling'
    """
    found = [one for name in names for one in _variants(find(collective, name), size, machine.per_host)]
    given = None if forced is None else find(collective, forced)
    if given is not None and given not in found:
        found.append(given)
    seconds = {one.label: predicted(one, size, nbytes, machine) for one in found}
    # Compare rounded times: equal times may differ in their last bits because they were summed in different orders.
    fewest = {one.label: one.cost(size, nbytes).messages for one in found}
    chosen = given or min(found, key=lambda one: (float(f"{seconds[one.label]:.6g}"), fewest[one.label], one.label))
    least = seconds.pop(chosen.label)
    if forced is None:
        table = f"{'measured' if machine.table.measured else 'built-in'} constants {machine.table.hash}"
        why = f"the fastest of {len(names)} algorithms for {nbytes} bytes on {size} ranks by {table}"
    return Choice(collective, size, nbytes, chosen.label, dict(chosen.options), least, seconds, why)
