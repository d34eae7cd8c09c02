"""Hierarchical all-reduce of any depth, with little traffic on the slow links between hosts or racks.

`levels` are the group sizes, innermost first: (8, 128) is 128 hosts of 8 consecutive ranks. By default, `levels` has
two sizes, as equal as possible. At each inner level, every member of a group receives one part of the message from all
other members, and reduces it. At the next level outwards, ranks of different groups that own the same part of the
message form a group. The outermost level works like `halving_doubling`, or like `bruck` if its size is not a power of
two. To distribute the results, all steps run in reverse, with sends and receives swapped. Cost: 2 rounds for each inner
level, plus 2 log2(N) rounds for N groups at the outermost level, with log2(N) rounded up. In these rounds, each group
sends 2(N-1)/N of the message. Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
collective operation performance", IPDPS 2000, for several levels. Unlike in the paper by Karonis et al., each level
here consists of a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, prod

from unisono.collectives.algorithms.butterfly import doubling, halvings, halvings_cost, needs_power_of_two
from unisono.collectives.algorithms.reduce_scatter import bruck
from unisono.collectives.algorithms.step import Cost, Move, Step, elements, others, there_and_back

__all__ = ["OPTIONS", "cost", "steps", "unsupported"]

OPTIONS: dict[str, tuple[int, ...]] = {"levels": ()}


def unsupported(size: int, levels: tuple[int, ...] = ()) -> str:
    if not levels or (min(levels) > 0 and prod(levels) == size):
        return ""
    return f"needs levels whose product is the number of ranks, {size}, not {tuple(levels)}"


def _split(size: int, levels: tuple[int, ...]) -> tuple[list[int], int]:
    """Return the sizes of the inner levels with more than one member, and the size of the outermost level."""
    inner = max(count for count in range(1, isqrt(size) + 1) if size % count == 0)
    *inside, outermost = levels or (inner, size // inner)
    return [count for count in inside if count > 1], outermost


def steps(rank: int, size: int, levels: tuple[int, ...] = ()) -> Iterator[Step]:
    inside, outermost = _split(size, levels)
    reducing = []
    start = 0
    width = size
    stride = 1
    for count in inside:
        width //= count
        member = rank // stride % count
        to, sources = others(member, count)
        parts = [start + other * width for other in range(count)]
        first = rank - member * stride
        start = parts[member]
        send = tuple(Move(first + other * stride, parts[other], parts[other] + width) for other in to)
        recv = tuple(Move(first + other * stride, start, start + width) for other in sources)
        reducing.append(Step(send, recv, reduce=True))
        stride *= count
    group = rank // stride
    across = bruck.steps(group, outermost) if needs_power_of_two(outermost) else halvings(group, outermost, doubling)
    reducing += [step.renumbered(lambda peer: rank + (peer - group) * stride, start) for step in across]
    yield from there_and_back(reducing)


def cost(size: int, numel: int, levels: tuple[int, ...] = ()) -> Cost:
    inside, outermost = _split(size, levels)
    runs = [run for _, run in bruck.runs(outermost)]
    sent = halvings_cost(numel, size, runs)
    width = size
    for count in inside:
        width //= count
        sent += (count - 1) * elements(numel, size, 0, width)
    direct = sum(count - 1 for count in inside)
    return Cost(2 * (len(inside) + len(runs)), 2 * (direct + len(runs)), sent)
