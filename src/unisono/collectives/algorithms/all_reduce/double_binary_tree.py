"""Double binary tree all-reduce: each half of the message is reduced up its own tree, then broadcast down it.

An inner node of one tree is a leaf of the other, so that all ranks send about the same amount. Each half is cut into k
`segments`, which follow each other up and down the trees. Cost: 2(log2(p) + k - 1) rounds, with log2(p) rounded down;
each rank sends at most 4k segments, which together are twice as long as the message. Source: Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009, sections 2 and
3.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from unisono.collectives.algorithms.binary_tree import children, path
from unisono.collectives.algorithms.step import Cost, Move, Step, elements, there_and_back

__all__ = ["OPTIONS", "chunks", "cost", "steps", "unsupported"]

OPTIONS = {"segments": 4}


def unsupported(size: int, segments: int = 4) -> str:
    return "" if segments > 0 else f"needs at least 1 segment, not {segments}"


def chunks(size: int, segments: int = 4) -> int:
    return 2 * segments


def steps(rank: int, size: int, segments: int = 4) -> Iterator[Step]:
    depth = size.bit_length() - 1
    rounds: list[tuple[list[Move], list[Move]]] = [([], []) for _ in range(depth + segments - 1)]
    for tree in range(2):
        place = (rank + tree) % size + 1
        way = path(place, size)
        for receives, others in enumerate((way[-2:-1], children(place, size))):
            # In a tree of depth D, the first segment moves up from depth d to depth d - 1 in round D - d.
            start = depth - len(way) + 1 - receives
            for other, segment in product(others, range(segments)):
                chunk = tree * segments + segment
                move = Move((other - 1 - tree) % size, chunk, chunk + 1)
                rounds[start + segment][receives].append(move)
    reducing = [Step(tuple(send), tuple(recv), reduce=True) for send, recv in rounds if send or recv]
    yield from there_and_back(reducing)


def cost(size: int, numel: int, segments: int = 4) -> Cost:
    # The busiest rank is the node at position 2 of the first tree, with two children and, with 4 or more ranks, a
    # parent.
    half = elements(numel, 2 * segments, 0, segments)
    more = min(size - 2, 2)
    return Cost(2 * (size.bit_length() + segments - 2), (more + 2) * segments, numel + more * half)
