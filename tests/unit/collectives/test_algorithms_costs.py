"""Declared costs equal the formulas of the papers, written here a second time; the prover counts them a third time."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, isqrt, log2

import pytest

from unisono.collectives.algorithms import find

Formula = Callable[[int, int], tuple[int, int, int]]


def hierarchical_all_to_all(p: int, n: int) -> tuple[int, int, int]:
    inside = max(q for q in range(1, isqrt(p) + 1) if p % q == 0)
    groups = p // inside
    # In the first round a part for each group to each neighbour, in the second a part of each neighbour to each group.
    parts = (inside - 1) * groups + (groups - 1) * inside
    return 1 if inside == 1 else 2, inside + groups - 2, parts * n // p


# Rounds; messages of the busiest rank; elements that it sends, of a message of n = k p elements among p ranks.
FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_gather", "direct"): lambda p, n: (1, p - 1, (p - 1) * n // p),
    ("all_gather", "ring"): lambda p, n: (p - 1, p - 1, (p - 1) * n // p),
    ("all_gather", "bruck"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), (p - 1) * n // p),
    ("all_gather", "pat"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), (p - 1) * n // p),
    ("all_gather", "recursive_doubling"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), (p - 1) * n // p),
    ("broadcast", "chain"): lambda p, n: (p - 2 + 8, 8, n),
    ("broadcast", "double_binary_tree"): lambda p, n: (
        4 + floor(log2(p - 1)),
        8,
        n if p < 4 else max(n, 2 * (n // 8 * 4 + min(n % 8, 4))),
    ),
    ("broadcast", "scatter_allgather"): lambda p, n: (
        ceil(log2(p)) + p - 1,
        ceil(log2(p)) + p - 1,
        2 * (p - 1) * n // p,
    ),
    ("gather", "linear"): lambda p, n: (1, 1, n // p),
    ("scatter", "linear"): lambda p, n: (1, p - 1, (p - 1) * n // p),
    ("all_to_all", "bruck"): lambda p, n: (
        ceil(log2(p)),
        ceil(log2(p)),
        sum(way.bit_count() for way in range(p)) * n // p,
    ),
    ("all_to_all", "hierarchical"): hierarchical_all_to_all,
    ("barrier", "tree"): lambda p, n: (2 * ceil(log2(p)), ceil(log2(p)), ceil(log2(p)) * n),
    ("broadcast", "binomial"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), ceil(log2(p)) * n),
    ("scatter", "binomial"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), (p - 1) * n // p),
    ("all_to_all", "direct"): lambda p, n: (1, p - 1, (p - 1) * n // p),
    ("all_to_all", "pairwise"): lambda p, n: (p - 1, p - 1, (p - 1) * n // p),
    ("barrier", "dissemination"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), ceil(log2(p)) * n),
}


@pytest.mark.parametrize("key", FORMULAS, ids="/".join)
def test_formula(key: tuple[str, str]) -> None:
    algorithm = find(*key)
    for size in (size for size in range(2, 65) if not algorithm.unsupported(size)):
        for numel in (size, 24 * size):
            assert algorithm.cost(size, numel) == FORMULAS[key](size, numel), size
