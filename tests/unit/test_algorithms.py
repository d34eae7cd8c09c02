"""Every schedule there is, is proved; costs are the closed forms; one more file is one more proof."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import ceil, floor, log2
from pathlib import Path

import pytest

from unisono.collectives.algorithms import ALGORITHMS, COLLECTIVES, Cost, Step, all_reduce, chunks_of
from unisono.collectives.algorithms.all_reduce import halving_doubling, ring, tree
from unisono.collectives.verify.prover import AlgorithmError, count, verify


def cases() -> list[tuple[str, str]]:
    return [(collective, name) for collective, registry in ALGORITHMS.items() for name in registry.names()]


SIZES = [*range(1, 18), 24, 31, 32, 33, 48, 63, 64]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("collective", "name"), cases())
def test_verified(collective: str, name: str, size: int) -> None:
    schedule = ALGORITHMS[collective][name]
    assert verify(collective, schedule, size) == schedule.cost(size)


@pytest.mark.soak
@pytest.mark.parametrize(("collective", "name"), cases())
def test_verified_for_all_sizes(collective: str, name: str) -> None:
    schedule = ALGORITHMS[collective][name]
    for size in range(1, 65):
        assert verify(collective, schedule, size) == schedule.cost(size)


@pytest.mark.parametrize(("collective", "name"), cases())
def test_single_rank_does_nothing(collective: str, name: str) -> None:
    schedule = ALGORITHMS[collective][name]
    assert list(schedule.steps(0, 1)) == []
    assert schedule.cost(1) == Cost(0, Fraction(0))


def test_every_collective_has_an_algorithm() -> None:
    assert sorted(ALGORITHMS) == sorted(COLLECTIVES)
    assert set(ALGORITHMS["all_reduce"].names()) >= {"direct", "halving_doubling", "recursive_doubling", "ring", "tree"}
    assert {collective for collective, _ in cases()} == set(COLLECTIVES)


# Rounds, and bytes in units of the message, among p >= 2 ranks.
FORMS: dict[tuple[str, str], Callable[[int], tuple[int, Fraction | int]]] = {
    ("all_reduce", "direct"): lambda p: (1, p - 1),
    ("all_reduce", "two_shot"): lambda p: (2, Fraction(2 * (p - 1), p)),
    ("all_reduce", "recursive_doubling"): lambda p: (floor(log2(p)) + 2 * beyond(p), floor(log2(p)) + beyond(p)),
    ("all_reduce", "ring"): lambda p: (2 * (p - 1), Fraction(2 * (p - 1), p)),
    ("all_reduce", "tree"): lambda p: (2 * ceil(log2(p)), ceil(log2(p))),
    ("reduce_scatter", "ring"): lambda p: (p - 1, Fraction(p - 1, p)),
    ("reduce_scatter", "direct"): lambda p: (1, Fraction(p - 1, p)),
    ("all_gather", "ring"): lambda p: (p - 1, Fraction(p - 1, p)),
    ("all_gather", "direct"): lambda p: (1, Fraction(p - 1, p)),
    ("broadcast", "binomial"): lambda p: (ceil(log2(p)), ceil(log2(p))),
    ("broadcast", "chain"): lambda p: (2 * (p - 1), 1),
    ("broadcast", "scatter_allgather"): lambda p: (ceil(log2(p)) + p - 1, Fraction(2 * (p - 1), p)),
    ("reduce", "binomial"): lambda p: (ceil(log2(p)), 1),
    ("scatter", "binomial"): lambda p: (ceil(log2(p)), Fraction(p - 1, p)),
    ("all_to_all", "pairwise"): lambda p: (p - 1, Fraction(p - 1, p)),
    ("all_to_all", "direct"): lambda p: (1, Fraction(p - 1, p)),
    ("barrier", "dissemination"): lambda p: (ceil(log2(p)), ceil(log2(p))),
}


def beyond(size: int) -> bool:
    return size.bit_count() > 1


@pytest.mark.parametrize("key", FORMS, ids="/".join)
def test_closed_forms(key: tuple[str, str]) -> None:
    schedule = ALGORITHMS[key[0]][key[1]]
    for size in range(2, 65):
        rounds, sent = FORMS[key](size)
        assert schedule.cost(size) == Cost(rounds, Fraction(sent)), size


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_binomial_gather_sends_half_for_powers_of_two(size: int) -> None:
    assert verify("gather", ALGORITHMS["gather"]["binomial"], size) == Cost(int(log2(size)), Fraction(1, 2))


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
def test_halving_doubling_is_optimal_for_powers_of_two(size: int) -> None:
    assert verify("all_reduce", halving_doubling, size) == Cost(2 * int(log2(size)), Fraction(2 * (size - 1), size))


@pytest.mark.parametrize("size", range(3, 64))
def test_halving_doubling_costs_less_than_folding_for_other_sizes(size: int) -> None:
    core = 2 ** floor(log2(size))
    cost = halving_doubling.cost(size)
    assert cost.rounds == 2 * log2(core)
    assert cost.sent < 1 + Fraction(2 * (core - 1), core)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_unknown_name_lists_the_known_ones(collective: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {collective} algorithm 'rang'; known: ") as caught:
        ALGORITHMS[collective]["rang"]
    assert all(name in str(caught.value) for name in ALGORITHMS[collective].names())


def test_chunks() -> None:
    assert chunks_of(ring, "all_reduce", 6) == 6
    assert chunks_of(tree, "all_reduce", 6) == 1
    assert chunks_of(halving_doubling, "all_reduce", 6) == 4
    assert chunks_of(ALGORITHMS["all_to_all"]["pairwise"], "all_to_all", 6) == 12
    assert chunks_of(ALGORITHMS["barrier"]["dissemination"], "barrier", 6) == 1


@pytest.fixture
def new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(all_reduce, "__path__", [*all_reduce.__path__, str(tmp_path)])
    yield tmp_path / "fresh.py"
    sys.modules.pop("unisono.collectives.algorithms.all_reduce.fresh", None)
    all_reduce.__dict__.pop("fresh", None)


def test_new_algorithm_file_is_found_and_verified(new_file: Path) -> None:
    assert ring.__file__ is not None
    new_file.write_text(Path(ring.__file__).read_text())
    assert ("all_reduce", "fresh") in cases()
    assert verify("all_reduce", ALGORITHMS["all_reduce"]["fresh"], 5) == ring.cost(5)


def test_wrong_algorithm_file_is_rejected(new_file: Path) -> None:
    assert ring.__file__ is not None
    new_file.write_text(Path(ring.__file__).read_text().replace("2 * (size - 1), F", "size, F"))
    with pytest.raises(AlgorithmError, match="all_reduce: among 5 ranks cost declares 5 rounds; counted are 8"):
        verify("all_reduce", ALGORITHMS["all_reduce"]["fresh"], 5)


class Registered:
    """Not a module: anything with the functions does."""

    def chunks(self, size: int) -> int:
        return 3 * size

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        yield from ()

    def cost(self, size: int) -> Cost:
        return Cost(0, Fraction(0))


def test_registered_algorithm_is_a_test_case() -> None:
    registry = ALGORITHMS["all_reduce"]
    registry.register("registered", Registered())
    try:
        assert ("all_reduce", "registered") in cases()
        assert verify("all_reduce", registry["registered"], 1) == Cost(0, Fraction(0))
        with pytest.raises(
            AlgorithmError, match=r"rank 0 of 2.*after the last step, chunk 0 lacks the contribution of rank 1"
        ):
            verify("all_reduce", registry["registered"], 2)
    finally:
        registry.unregister("registered")
    assert ("all_reduce", "registered") not in cases()


def test_count_ignores_the_declared_cost() -> None:
    class Modest:
        steps = staticmethod(ring.steps)

        def cost(self, size: int) -> Cost:
            return Cost(0, Fraction(0))

    assert count("all_reduce", Modest(), 4) == ring.cost(4)
    with pytest.raises(AlgorithmError, match="cost declares 0 rounds; counted are 6"):
        verify("all_reduce", Modest(), 4)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="unknown collective 'all_reduced'; known: all_gather, all_reduce, "):
        verify("all_reduced", ring, 2)
    with pytest.raises(ValueError, match="a group must have at least 1 rank, not 0"):
        verify("all_reduce", ring, 0)
