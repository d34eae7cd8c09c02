"""Declared costs equal the formulas of the papers, written here a second time; the prover counts them a third time."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

import pytest

from unisono.collectives.algorithms import find

Formula = Callable[[int, int], tuple[int, int, int]]

# Rounds; messages of the busiest rank; elements that it sends, of a message of n = k p elements among p ranks.
FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "direct"): lambda p, n: (1, p - 1, (p - 1) * n),
    ("all_reduce", "ring"): lambda p, n: (2 * (p - 1), 2 * (p - 1), 2 * (p - 1) * n // p),
    ("all_reduce", "two_shot"): lambda p, n: (2, 2 * (p - 1), 2 * (p - 1) * n // p),
    ("all_gather", "direct"): lambda p, n: (1, p - 1, (p - 1) * n // p),
    ("all_gather", "ring"): lambda p, n: (p - 1, p - 1, (p - 1) * n // p),
    ("reduce_scatter", "direct"): lambda p, n: (1, p - 1, (p - 1) * n // p),
    ("reduce_scatter", "ring"): lambda p, n: (p - 1, p - 1, (p - 1) * n // p),
    ("broadcast", "binomial"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), ceil(log2(p)) * n),
    ("reduce", "binomial"): lambda p, n: (ceil(log2(p)), 1, n),
    ("scatter", "binomial"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), (p - 1) * n // p),
    ("all_to_all", "direct"): lambda p, n: (1, p - 1, (p - 1) * n // p),
    ("all_to_all", "pairwise"): lambda p, n: (p - 1, p - 1, (p - 1) * n // p),
    ("barrier", "dissemination"): lambda p, n: (ceil(log2(p)), ceil(log2(p)), ceil(log2(p)) * n),
}


@pytest.mark.parametrize("key", FORMULAS, ids="/".join)
def test_formula(key: tuple[str, str]) -> None:
    algorithm = find(*key)
    for size in range(2, 65):
        for numel in (size, 12 * size):
            assert algorithm.cost(size, numel) == FORMULAS[key](size, numel), size
