"""Chunked ring all-reduce: a ring whose chunks are cut into segments that are in flight at the same time.

Cost: 2(p-1) rounds of `segments` messages each, 2(p-1)/p of the message, the least possible. Reducing one segment
overlaps with receiving the next. Source: Gibiansky, "Bringing HPC techniques to deep learning", Baidu Research, 2017;
the ring is that of Patarasu and Yuan, JPDC 69(2), 2009.
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
    # The rank that sends most skips the last chunk in one lap and the second-to-last in the other.
    kept = elements(numel, size * segments, (size - 2) * segments, size * segments)
    return Cost(2 * (size - 1), 2 * (size - 1) * segments, 2 * numel - kept)
