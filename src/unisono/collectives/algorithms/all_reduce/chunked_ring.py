"""Chunked ring all-reduce: a ring all-reduce whose chunks are cut into segments, all in flight at the same time.

Reducing one segment overlaps with receiving the next. Cost: 2(p-1) rounds of `segments` messages each; each rank sends
2(p-1)/p of the message, which is the minimum. Source: Gibiansky, "Bringing HPC techniques to deep learning", Baidu
Research, 2017; for the ring, Patarasu and Yuan, JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.all_reduce import ring
from unisono.collectives.algorithms.step import Cost, Move, Step, elements

__all__ = ["OPTIONS", "chunks", "cost", "steps", "unsupported"]

OPTIONS = {"segments": 2}


def unsupported(size: int, segments: int = 2) -> str:
    return "" if segments > 0 else f"needs at least 1 segment, not {segments}"


def chunks(size: int, segments: int = 2) -> int:
    return size * segments


def steps(rank: int, size: int, segments: int = 2) -> Iterator[Step]:
    def cut(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        pieces = [(move.peer, move.start * segments + piece) for move in moves for piece in range(segments)]
        return tuple(Move(peer, piece, piece + 1) for peer, piece in pieces)

    for step in ring.steps(rank, size):
        yield Step(cut(step.send), cut(step.recv), step.reduce)


def cost(size: int, numel: int, segments: int = 2) -> Cost:
    # In each of the two laps around the ring, a rank skips one chunk. The rank that sends the most skips the last two
    # chunks, which are the shortest.
    kept = elements(numel, size * segments, (size - 2) * segments, size * segments)
    return Cost(2 * (size - 1), 2 * (size - 1) * segments, 2 * numel - kept)
