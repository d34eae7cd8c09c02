"""Costs of the reductions from their papers, for messages that divide by the chunks and for others."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log2

import pytest

from unisono.collectives.algorithms import ALGORITHMS, find

Formula = Callable[[int, int], tuple[int, int, int]]


def lengths(n: int, chunks: int) -> list[int]:
    """Elements of each chunk: the first chunks are the longer ones."""
    return [n // chunks + (chunk < n % chunks) for chunk in range(chunks)]


def halves(count: int) -> list[int]:
    """Half of a power of two, a quarter, ..., 1."""
    return [count >> half for half in range(1, count.bit_length())]


def ring(p: int, n: int, segments: int = 1) -> tuple[int, int, int]:
    """In 2(p-1) rounds a rank sends every chunk twice, but its own and its successor's only once."""
    long = lengths(n, p * segments)
    parts = [sum(long[segments * rank : segments * (rank + 1)]) for rank in range(p)]
    kept = min(parts[rank] + parts[(rank + 1) % p] for rank in range(p))
    return 2 * (p - 1), 2 * (p - 1) * segments, 2 * n - kept


def bidirectional_ring(p: int, n: int) -> tuple[int, int, int]:
    long = lengths(n, 2 * p)
    ahead, back = long[:p], long[p:][::-1]
    kept = min(ahead[rank] + ahead[(rank + 1) % p] + back[rank] + back[rank - 1] for rank in range(p))
    return 2 * (p - 1), 4 * (p - 1), 2 * n - kept


def halving_doubling(p: int, n: int) -> tuple[int, int, int]:
    """Rank 0 sends the last half, quarter, ...; then its first chunk, the first two, ...; the fold adds one message."""
    q, extra = 2 ** floor(log2(p)), not log2(p).is_integer()
    long = lengths(n, q)
    sent = sum(sum(long[half : 2 * half]) + sum(long[:half]) for half in halves(q))
    return 2 * floor(log2(p)) + 2 * extra, 2 * floor(log2(p)) + extra, sent + extra * n


def halving_doubling_blocks(p: int, n: int) -> tuple[int, int, int]:
    blocks = [2**bit for bit in reversed(range(7)) if p & 2**bit]
    long, messages, sent = lengths(n, blocks[0]), [], []
    for number, block in enumerate(blocks):
        own = blocks[0] // block
        up, down = number > 0, block != blocks[-1]
        inside = sum(sum(long[half * own : 2 * half * own]) + sum(long[: half * own]) for half in halves(block))
        messages.append(2 * int(log2(block)) + up * blocks[number - 1] // block + down)
        sent.append(inside + (up + down) * sum(long[:own]))
    return 2 * floor(log2(p)) + 2 * (len(blocks) > 1), max(messages), max(sent)


def bruck(p: int, n: int) -> tuple[int, int, int]:
    """Rank 0 sends all chunks but its own; then the first ones, of which it has 1, 2, 4, ..., up to p - 1."""
    long, rounds = lengths(n, p), ceil(log2(p))
    back = sum(sum(long[: min(2**bit, p - 2**bit)]) for bit in range(rounds))
    return 2 * rounds, 2 * rounds, n - long[0] + back


def swing(p: int, n: int) -> tuple[int, int, int]:
    """The NSDI paper's recursion: what rank r sends in step s are the chunks that its peer still reaches after it."""
    long, rounds = lengths(n, p), int(log2(p))

    def reached(rank: int, step: int) -> list[int]:
        return [rank] + [chunk for later in range(step, rounds) for chunk in reached(peer(rank, later), later + 1)]

    def peer(rank: int, step: int) -> int:
        rho = sum((-2) ** i for i in range(step + 1))
        return (rank + rho if rank % 2 == 0 else rank - rho) % p

    sent = [
        sum(long[c] for step in range(rounds) for c in reached(peer(rank, step), step + 1) + reached(rank, step + 1))
        for rank in range(p)
    ]
    return 2 * rounds, 2 * rounds, max(sent)


def double_binary_tree(p: int, n: int, k: int = 4) -> tuple[int, int, int]:
    """Up and down, each half in k segments: 3 messages a segment inside a tree, and 1 as a leaf of the other."""
    first, second = sum(lengths(n, 2 * k)[:k]), sum(lengths(n, 2 * k)[k:])
    inside = min(p - 1, 3)
    return 2 * (floor(log2(p)) + k - 1), (inside + 1) * k, inside * first + second


def hierarchical(p: int, n: int) -> tuple[int, int, int]:
    """The default, two levels: direct messages among q, and Bruck's runs, which may be halves, among p/q groups."""
    q = max(q for q in range(1, 9) if p % q == 0 and q * q <= p)
    groups, long = p // q, lengths(n, p)
    rounds = ceil(log2(groups))
    back = sum(sum(long[: min(2**bit, groups - 2**bit)]) for bit in range(rounds)) + (q - 1) * sum(long[:groups])
    return 2 * rounds + 2 * (q > 1), 2 * rounds + 2 * (q - 1), n - long[0] + back


def two_shot(p: int, n: int) -> tuple[int, int, int]:
    return 2, 2 * (p - 1), max(n - own + (p - 1) * own for own in lengths(n, p))


def recursive_doubling(p: int, n: int) -> tuple[int, int, int]:
    extra = not log2(p).is_integer()
    return floor(log2(p)) + 2 * extra, floor(log2(p)) + extra, (floor(log2(p)) + extra) * n


def scattering(rounds: Callable[[int], int]) -> Formula:
    """In a reduce_scatter each rank sends every chunk but its own once."""
    return lambda p, n: (rounds(p), rounds(p), n - min(lengths(n, p)))


def folded_halving(p: int, n: int) -> tuple[int, int, int]:
    extra = not log2(p).is_integer()
    return floor(log2(p)) + 2 * extra, floor(log2(p)) + extra, n if extra else n - min(lengths(n, p))


FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "bidirectional_ring"): bidirectional_ring,
    ("all_reduce", "bine"): halving_doubling,
    ("all_reduce", "bine_latency"): recursive_doubling,
    ("all_reduce", "binomial"): lambda p, n: (2 * ceil(log2(p)), ceil(log2(p)), ceil(log2(p)) * n),
    ("all_reduce", "bruck"): bruck,
    ("all_reduce", "chunked_ring"): lambda p, n: ring(p, n, segments=2),
    ("all_reduce", "double_binary_tree"): double_binary_tree,
    ("all_reduce", "halving_doubling"): halving_doubling,
    ("all_reduce", "halving_doubling_blocks"): halving_doubling_blocks,
    ("all_reduce", "hierarchical"): hierarchical,
    ("all_reduce", "one_shot"): lambda p, n: (1, p - 1, (p - 1) * n),
    ("all_reduce", "recursive_doubling"): recursive_doubling,
    ("all_reduce", "ring"): ring,
    ("all_reduce", "swing"): swing,
    ("all_reduce", "swing_latency"): recursive_doubling,
    ("all_reduce", "two_shot"): two_shot,
    ("reduce", "binomial"): lambda p, n: (ceil(log2(p)), 1, n),
    ("reduce", "linear"): lambda p, n: (1, 1, n),
    ("reduce_scatter", "bruck"): scattering(lambda p: ceil(log2(p))),
    ("reduce_scatter", "direct"): lambda p, n: (1, p - 1, n - min(lengths(n, p))),
    ("reduce_scatter", "pat"): scattering(lambda p: ceil(log2(p))),
    ("reduce_scatter", "recursive_halving"): folded_halving,
    ("reduce_scatter", "ring"): scattering(lambda p: p - 1),
    ("reduce_scatter", "swing"): scattering(lambda p: int(log2(p))),
}

LEAST = ("bidirectional_ring", "bine", "bruck", "chunked_ring", "hierarchical", "ring", "swing", "two_shot")
"""Algorithms that send 2(p-1)/p of the message, the least possible, for any number of ranks that they serve."""


@pytest.mark.parametrize("key", FORMULAS, ids="/".join)
def test_formula(key: tuple[str, str]) -> None:
    algorithm = find(*key)
    for size in range(2, 65):
        if not algorithm.unsupported(size):
            for numel in (0, 1, size - 1, size, 24 * size, 24 * size + 1, 24 * size + size // 2 + 1, 1000):
                assert algorithm.cost(size, numel) == FORMULAS[key](size, numel), (size, numel)


def test_every_reduction_has_a_formula() -> None:
    collectives = ("all_reduce", "reduce", "reduce_scatter")
    assert sorted(FORMULAS) == [(name, each) for name in collectives for each in sorted(ALGORITHMS[name].names())]


@pytest.mark.parametrize("name", LEAST)
def test_fewest_elements_are_sent(name: str) -> None:
    algorithm = find("all_reduce", name)
    for size in (2, 4, 6, 8, 12, 16, 63, 64):
        if not algorithm.unsupported(size):
            assert algorithm.cost(size, 4 * size).sent == 8 * (size - 1)


@pytest.mark.parametrize("segments", [1, 2, 3, 8])
def test_segments(segments: int) -> None:
    for size in range(2, 65):
        for numel in (16 * size, 1000, 1001):
            chunked = find("all_reduce", "chunked_ring", segments=segments).cost(size, numel)
            assert chunked == ring(size, numel, segments)
            tree = find("all_reduce", "double_binary_tree", segments=segments).cost(size, numel)
            assert tree == double_binary_tree(size, numel, segments)


def test_hierarchy_of_hosts() -> None:
    hosts = find("all_reduce", "hierarchical", levels=(8, 128))
    numel = 1024 * 24
    assert hosts.cost(1024, numel) == (2 + 2 * 7, 2 * 7 + 2 * 7, 2 * numel * 1023 // 1024)
    sent = dict.fromkeys(range(128), 0)
    for rank in range(1024):
        for step in hosts.steps(rank, 1024):
            for move in step.send:
                sent[rank // 8] += len(move.chunks) * 24 * (move.peer // 8 != rank // 8)
    assert set(sent.values()) == {2 * 127 * numel // 128}
