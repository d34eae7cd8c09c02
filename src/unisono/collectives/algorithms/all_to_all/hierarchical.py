"""Hierarchical all-to-all: first inside groups of consecutive ranks, then between the groups.

In the first round, each rank collects its group's data for all ranks that have the same position in their groups as it
has. In the second round, ranks at the same position in different groups exchange the collected data, with one message
per group instead of one per rank. Cost for groups of q ranks: 2 rounds; each rank sends q - 1 + p/q - 1 messages, in
total up to twice its input. Only for parts of equal length. Source: Träff and Rougier, "MPI collectives and datatypes
for hierarchical all-to-all communication", EuroMPI 2014.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Step, in_order

__all__ = ["OPTIONS", "UNIFORM", "chunks", "cost", "steps", "unsupported"]

OPTIONS = {"group": 0}
UNIFORM = True


def unsupported(size: int, group: int = 0) -> str:
    return f"has groups of {group} ranks, which do not divide {size} ranks" if group and size % group else ""


def chunks(size: int, group: int = 0) -> int:
    return 3 * size


def steps(rank: int, size: int, group: int = 0) -> Iterator[Step]:
    group = group or _group(size)
    mine, place = divmod(rank, group)
    neighbours = [other for other in range(group) if other != place]
    groups = [other for other in range(size // group) if other != mine]
    if neighbours:
        yield Step(
            tuple(in_order(mine * group + to, range(to, size, group)) for to in neighbours),
            tuple(
                in_order(
                    mine * group + source, (_kept(rank, source, other, size, group) for other in range(size // group))
                )
                for source in neighbours
            ),
        )
    if groups:
        yield Step(
            tuple(
                in_order(other * group + place, (_kept(rank, source, other, size, group) for source in range(group)))
                for other in groups
            ),
            tuple(
                in_order(other * group + place, range(size + other * group, size + (other + 1) * group))
                for other in groups
            ),
        )


def _group(size: int) -> int:
    """Return the largest divisor of `size` up to its square root, which minimizes the number of messages per rank."""
    return max(divisor for divisor in range(1, size + 1) if size % divisor == 0 and divisor * divisor <= size)


def _kept(rank: int, source: int, other: int, size: int, group: int) -> int:
    """Return the chunk in which a rank keeps a collected part between the two rounds.

    The part comes from position `source` in the rank's group, and goes to group `other`.
    """
    mine, place = divmod(rank, group)
    if other == mine:
        return size + mine * group + source
    return other * group + place if source == place else 2 * size + other * group + source


def cost(size: int, numel: int, group: int = 0) -> Cost:
    group = group or _group(size)
    groups = size // group
    part = numel // size
    sent = ((group - 1) * groups + (groups - 1) * group) * part
    return Cost((group > 1) + (groups > 1), group - 1 + groups - 1, sent)
