"""PAT (parallel aggregated trees): each chunk travels along its own binomial tree, with the longest hops first.

All trees advance in the same rounds. Long hops carry few chunks: half of all hops are to the next rank. Cost: log2(p)
rounds, rounded up, for any number of ranks p; each rank sends about (p-1)/p of the message. Source: Jeaugey, "PAT: a
new algorithm for all-gather and reduce-scatter operations at scale", 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.collectives.algorithms.step import Cost, Step, move_of

__all__ = ["cost", "steps"]


def steps(rank: int, size: int) -> Iterator[Step]:
    for distance in (1 << bit for bit in reversed(range((size - 1).bit_length()))):
        to = (rank + distance) % size
        source = (rank - distance) % size
        passed = range(0, size - distance, 2 * distance)  # how far each chunk that is sent now has travelled
        yield Step(
            (move_of(to, ((rank - way) % size for way in passed)),),
            (move_of(source, ((source - way) % size for way in passed)),),
        )


def cost(size: int, numel: int) -> Cost:
    rounds = (size - 1).bit_length()
    sent = [0] * size  # sent[d]: how often a rank at distance d from a chunk's owner sends that chunk
    for distance in (1 << bit for bit in range(rounds)):
        for way in range(0, size - distance, 2 * distance):
            sent[way] += 1
    least, longer = divmod(numel, size)
    # The first chunks, `longer` in number, have one more element than the others. A rank's distance from the owner of
    # chunk c is rank - c.
    extra = sum(sent[-chunk] for chunk in range(longer))
    most = extra
    for rank in range(size):
        extra += sent[(rank + 1) % size] - sent[(rank + 1 - longer) % size]
        most = max(most, extra)
    return Cost(rounds, rounds, (size - 1) * least + most)
