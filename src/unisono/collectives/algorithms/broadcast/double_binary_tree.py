"""Double binary tree broadcast: each half of the message is pipelined down its own binary tree.

A rank that forwards messages in one tree is a leaf of the other, so all ranks send about as much as they receive. Cost:
at most k + log2(p) rounds, rounded up, if each half is cut into k segments; each rank sends the whole message about
once. Best for messages of medium length among many ranks. Source: Sanders, Speck and Träff, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.binary_tree import children, path
from unisono.collectives.algorithms.step import Cost, Move, Step, elements

__all__ = ["OPTIONS", "chunks", "cost", "steps"]

OPTIONS = {"segments": 4}


def chunks(size: int, segments: int = 4) -> int:
    return 2 * segments


def steps(rank: int, size: int, segments: int = 4) -> Iterator[Step]:
    trees = [(tree * segments, *_place(rank, size, tree)) for tree in (0, 1)]
    for time in range(segments + max(depth for _, _, depth, _ in trees)):
        send: list[Move] = []
        recv: list[Move] = []
        for first, parent, depth, below in trees:
            arriving = first + time - depth + 1
            leaving = first + time - depth
            if rank and first <= arriving < first + segments:
                recv.append(Move(parent, arriving, arriving + 1))
            if first <= leaving < first + segments:
                send += [Move(child, leaving, leaving + 1) for child in below]
        if send or recv:
            yield Step(tuple(send), tuple(recv))


def _place(rank: int, size: int, tree: int) -> tuple[int, int, list[int]]:
    """Return a rank's parent, depth and children in a tree.

    A tree covers positions 1 to p-1, and rank 0 is the parent of its root. Positions are numbered from left to right,
    so that all leaves have odd positions. In the second tree, ranks at odd and even positions are swapped.
    """
    last = size - 1

    def turned(number: int, step: int) -> int:
        if not tree:
            return number
        return last + 1 - number if last % 2 == 0 else (number - 1 + step) % last + 1

    if rank == 0:
        return 0, 0, [turned(path(last, last)[0], -1)]
    position = turned(rank, 1)
    way = path(position, last)
    parent = turned(way[-2], -1) if len(way) > 1 else 0
    return parent, len(way), [turned(child, -1) for child in children(position, last)]


def cost(size: int, numel: int, segments: int = 4) -> Cost:
    half = elements(numel, 2 * segments, 0, segments)
    sent = max(numel, 2 * half) if size > 3 else numel
    return Cost(segments + (size - 1).bit_length() - 1, 2 * segments, sent)
