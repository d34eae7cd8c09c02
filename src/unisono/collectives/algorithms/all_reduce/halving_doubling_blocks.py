"""Halving and doubling in binary blocks: block sizes are different powers of two, largest first.

Each block performs the halvings separately. The smallest block then sends its ranks' chunks to the next larger block,
which adds them and sends the sums to the block after it, and so on. To distribute the results, all steps run in
reverse, with sends and receives swapped. Cost: 2 log2(q) rounds, where q is the size of the largest block, and 2 more
if there are several blocks. Unlike in `halving_doubling`, no rank ever sends its whole message to another rank. Source:
Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, section 4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from unisono.collectives.algorithms.butterfly import doubling, halvings, halvings_cost, owners, places
from unisono.collectives.algorithms.fold import nodes_of
from unisono.collectives.algorithms.step import Cost, Move, Step, elements, there_and_back

__all__ = ["chunks", "cost", "steps"]


def chunks(size: int) -> int:
    return nodes_of(size)


def _blocks(size: int) -> list[int]:
    return [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]


def steps(rank: int, size: int) -> Iterator[Step]:
    blocks = _blocks(size)
    first = list(accumulate(blocks, initial=0))
    number = bisect_right(first, rank) - 1
    node = rank - first[number]
    block = blocks[number]
    width = blocks[0] // block
    start = places(doubling, block)[node] * width

    def owned_by(other: int) -> tuple[Move, ...]:
        """Return messages between this rank and the owners of its chunks in another block."""
        ranks = owners(doubling, blocks[other])
        wide = blocks[0] // blocks[other]
        run = min(width, wide)
        return tuple(
            Move(first[other] + ranks[chunk // wide], chunk, chunk + run) for chunk in range(start, start + width, run)
        )

    reducing = list(
        halvings(node, block, doubling, lambda peer, low, high: Move(first[number] + peer, low * width, high * width))
    )
    if number + 1 < len(blocks):
        reducing.append(Step(recv=owned_by(number + 1), reduce=True))
    if number > 0:
        reducing.append(Step(send=owned_by(number - 1)))
    yield from there_and_back(reducing)


def cost(size: int, numel: int) -> Cost:
    blocks = _blocks(size)
    messages = []
    sent = []
    for number, block in enumerate(blocks):
        halves = block.bit_length() - 1
        larger = number > 0
        smaller = number + 1 < len(blocks)
        messages.append(2 * halves + larger * blocks[number - 1] // block + smaller)
        own = blocks[0] // block
        runs = [blocks[0] >> half for half in range(1, halves + 1)]
        sent.append(
            halvings_cost(numel, blocks[0], runs, own) + (larger + smaller) * elements(numel, blocks[0], 0, own)
        )
    return Cost(2 * (size.bit_length() - 1) + 2 * (len(blocks) > 1), max(messages), max(sent))
