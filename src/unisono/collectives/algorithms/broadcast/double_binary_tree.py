"""Double tree broadcast: each half of the message is pipelined down a binary tree of its own.

A rank that passes messages on in one tree is a leaf of the other, so that all ranks send about as much as they receive.
Cost: k segments of each half take k + log2(p) rounds or fewer, rounded up; a rank sends the message once. Best for
messages of medium length among many ranks. Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35(12), 2009, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        for first, parent, depth, children in trees:
            arriving, leaving = first + time - depth + 1, first + time - depth
            if rank and first <= arriving < first + segments:
                recv.append(Move(parent, arriving, arriving + 1))
            if first <= leaving < first + segments:
                send += [Move(child, leaving, leaving + 1) for child in children]
        if send or recv:
            yield Step(tuple(send), tuple(recv))


def _place(rank: int, size: int, tree: int) -> tuple[int, int, list[int]]:
    """Return a rank's parent, depth and children in a tree.

    Rank 0 stands above positions 1 to p-1, which are numbered from left to right: odd ones are leaves. The second tree
    exchanges odd and even positions.
    """
    last = size - 1

    def turned(number: int, step: int) -> int:
        if not tree:
            return number
        return last + 1 - number if last % 2 == 0 else (number - 1 + step) % last + 1

    def above(position: int) -> int:
        low = position & -position
        up = (position ^ low) | low << 1
        return up if up <= last else position ^ low

    if rank == 0:
        return 0, 0, [turned(1 << (last.bit_length() - 1), -1)]
    position = turned(rank, 1)
    depth, up = 1, above(position)
    while up:
        depth, up = depth + 1, above(up)
    half = (position & -position) // 2
    children = [position - half] if half else []
    while half and position + half > last:
        half //= 2
    children += [position + half] if half else []
    parent = above(position)
    return turned(parent, -1) if parent else 0, depth, [turned(child, -1) for child in children]


def cost(size: int, numel: int, segments: int = 4) -> Cost:
    half = elements(numel, 2 * segments, 0, segments)
    sent = max(numel, 2 * half) if size > 3 else numel
    return Cost(segments + (size - 1).bit_length() - 1, 2 * segments, sent)
