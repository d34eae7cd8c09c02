"""Every algorithm is proved; one more file is one more proof."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest

from unisono.collectives.algorithms import ALGORITHMS, COLLECTIVES, Cost, Step, all_reduce, elements, find
from unisono.collectives.algorithms.all_reduce import ring
from unisono.collectives.algorithms.hosts import EVEN, across_hosts
from unisono.collectives.verify.prover import AlgorithmError, verify


def cases() -> list[tuple[str, str]]:
    return [(collective, name) for collective, registry in ALGORITHMS.items() for name in registry.names()]


@pytest.mark.parametrize(("collective", "name"), cases())
def test_verified(collective: str, name: str) -> None:
    for size in (*range(1, 10), 12, 16):
        prove(collective, name, size)


@pytest.mark.soak
@pytest.mark.parametrize(("collective", "name"), cases())
def test_verified_for_all_sizes(collective: str, name: str) -> None:
    for size in range(10, 65):
        prove(collective, name, size)


def prove(collective: str, name: str, size: int) -> None:
    """Prove an algorithm for a number of ranks, or see that it refuses that number."""
    if reason := find(collective, name).unsupported(size):
        with pytest.raises(ValueError, match=re.escape(reason)):
            verify(collective, name, size)
        assert size & (size - 1), "an algorithm must serve at least powers of two"
    else:
        verify(collective, name, size)


@pytest.mark.parametrize(("collective", "name"), cases())
def test_single_rank_does_nothing(collective: str, name: str) -> None:
    assert verify(collective, name, 1).cost == Cost(0, 0, 0)


def test_every_collective_has_an_algorithm() -> None:
    assert sorted(ALGORITHMS) == sorted(COLLECTIVES)
    assert {collective for collective, _ in cases()} == set(COLLECTIVES)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_unknown_name_lists_the_known_ones(collective: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {collective} algorithm 'rang'; known: ") as caught:
        ALGORITHMS[collective]["rang"]
    assert all(name in str(caught.value) for name in ALGORITHMS[collective].names())


def test_chunks() -> None:
    assert find("all_reduce", "ring").chunks(6) == 6
    assert find("all_reduce", "recursive_doubling").chunks(6) == 1
    assert find("all_to_all", "pairwise").chunks(6) == 12
    assert find("barrier", "dissemination").chunks(6) == 1


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
    assert verify("all_reduce", "fresh", 5) == verify("all_reduce", "ring", 5)


def test_wrong_algorithm_file_is_rejected(new_file: Path) -> None:
    assert ring.__file__ is not None
    new_file.write_text(Path(ring.__file__).read_text().replace("Cost(2 * (size - 1), ", "Cost(size, "))
    with pytest.raises(AlgorithmError, match="all_reduce: among 5 ranks cost declares 5 rounds; counted are 8"):
        verify("all_reduce", "fresh", 5)


class Registered:
    """Not a module: anything with the functions does."""

    def chunks(self, size: int) -> int:
        return 3 * size

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        yield from ()

    def cost(self, size: int, numel: int) -> Cost:
        return Cost(0, 0, 0)


def test_registered_algorithm_is_a_test_case() -> None:
    registry = ALGORITHMS["all_reduce"]
    registry.register("registered", Registered())
    try:
        assert ("all_reduce", "registered") in cases()
        assert verify("all_reduce", "registered", 1).cost == Cost(0, 0, 0)
        with pytest.raises(
            AlgorithmError, match=r"rank 0 of 2.*after the last step, chunk 0 lacks the contribution of rank 1"
        ):
            verify("all_reduce", "registered", 2)
    finally:
        registry.unregister("registered")
    assert ("all_reduce", "registered") not in cases()


def test_file_without_registration_is_proved() -> None:
    class Modest:
        steps = staticmethod(ring.steps)

        def cost(self, size: int, numel: int) -> Cost:
            return Cost(0, 0, 0)

    with pytest.raises(AlgorithmError, match="cost declares 0 rounds; counted are 6"):
        verify("all_reduce", Modest(), 4)


def test_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="the all_reduce algorithm 'ring' has no option 'segments'; it has none"):
        find("all_reduce", "ring", segments=4)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="'double_binary_tree' needs at least 1 segment, not 0"):
        verify("all_reduce", find("all_reduce", "double_binary_tree", segments=0), 4)
    with pytest.raises(ValueError, match=r"needs levels whose product is the number of ranks, 6, not \(4, 2\)"):
        verify("all_reduce", find("all_reduce", "hierarchical", levels=(4, 2)), 6)


@pytest.mark.parametrize("levels", [(2, 2, 2), (3, 4), (2, 3, 5), (6,), (1, 5), (4, 2, 1)])
def test_hierarchy_of_any_depth(levels: tuple[int, ...]) -> None:
    verify("all_reduce", find("all_reduce", "hierarchical", levels=levels), prod(levels))


class AcrossHosts:
    """Steps among ranks on several hosts, as an algorithm that `verify` proves.

    It declares the rounds that are documented, but as many messages and elements as it counts itself;
    `test_traffic_across_hosts` tests those that are documented.
    """

    def __init__(self, collective: str, sizes: tuple[int, ...], *, short: bool = False) -> None:
        self._collective = collective
        self._sizes = sizes
        self._short = short

    def chunks(self, size: int) -> int:
        return self._of(0)[0]

    def steps(self, rank: int, size: int) -> Iterator[Step]:
        return self._of(rank)[1]

    def _of(self, rank: int) -> tuple[int, Iterator[Step]]:
        found = across_hosts(self._collective, rank, self._sizes, short=self._short)
        assert found is not None
        return found

    def cost(self, size: int, numel: int) -> Cost:
        chunks = self.chunks(size)
        sent = [[move for step in self.steps(rank, size) for move in step.send] for rank in range(size)]
        most = max(sum(elements(numel, chunks, *run) for move in moves for run in move.runs) for moves in sent)
        return Cost(self._rounds(), max(map(len, sent)), most)

    def _rounds(self) -> int:
        hosts = len(self._sizes)
        if self._collective == "all_reduce":
            across = (hosts > 1) if self._short or hosts == 1 else 2 * (hosts - 1).bit_length()
            return 2 * (max(self._sizes) > 1) + across
        if self._collective in EVEN:
            return (hosts > 1) + (self._sizes[0] > 1)
        # For each host, the number of rounds until its first rank has sent its last message to another host.
        ended = [0] * hosts
        for bit in reversed(range((hosts - 1).bit_length())):
            for host in range(0, hosts - (1 << bit), 2 << bit):
                ended[host] += 1
                ended[host + (1 << bit)] = ended[host]
        return max(rounds + (ranks - 1).bit_length() for rounds, ranks in zip(ended, self._sizes, strict=True))


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", *sorted(EVEN)])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 4, 2), (2, 2, 2), (1, 2, 1, 3, 2), (4, 4, 4, 4), (5,)], ids=str)
def test_hosts_of_any_size(collective: str, sizes: tuple[int, ...]) -> None:
    for short in (False, True):
        if collective in EVEN and len(set(sizes)) > 1:
            assert across_hosts(collective, 0, sizes, short=short) is None
        else:
            verify(collective, AcrossHosts(collective, sizes, short=short), sum(sizes))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 4, 2), (2, 2, 2), (1, 2, 1, 3, 2), (4, 4, 4, 4)], ids=str)
def test_traffic_across_hosts(sizes: tuple[int, ...]) -> None:
    hosts, size = len(sizes), sum(sizes)
    host_of = [host for host, ranks in enumerate(sizes) for _ in range(ranks)]

    def sent(collective: str, *, short: bool = False) -> list[tuple[int, int, Fraction]]:
        """Return sender, receiver and share of the message, for each message to another host."""
        algorithm = AcrossHosts(collective, sizes, short=short)
        return [
            (rank, move.peer, Fraction(len(move.chunks), algorithm.chunks(size)))
            for rank in range(size)
            for step in algorithm.steps(rank, size)
            for move in step.send
            if host_of[move.peer] != host_of[rank]
        ]

    def leaving(collective: str, *, short: bool = False) -> list[Fraction]:
        """Return the share of the message that each host sends."""
        shares = [Fraction(0)] * hosts
        for rank, _, share in sent(collective, short=short):
            shares[host_of[rank]] += share
        return shares

    assert leaving("all_reduce", short=True) == [hosts - 1] * hosts
    assert leaving("all_reduce") == [Fraction(2 * (hosts - 1), hosts)] * hosts
    assert sorted((host_of[peer], share) for _, peer, share in sent("broadcast")) == [(h, 1) for h in range(1, hosts)]
    assert leaving("reduce") == [0] + [1] * (hosts - 1)
    messages = Counter(
        rank for rank in range(size) for step in AcrossHosts("reduce", sizes).steps(rank, size) for _ in step.send
    )
    assert messages == dict.fromkeys(range(1, size), 1)
    for collective in EVEN if len(set(sizes)) == 1 else ():
        assert leaving(collective) == [Fraction(hosts - 1, hosts)] * hosts
        assert Counter(rank for rank, _, _ in sent(collective)) == dict.fromkeys(range(size), hosts - 1)


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_short_messages_cross_the_network_once(hosts: int) -> None:
    algorithm = AcrossHosts("all_reduce", (2,) * hosts, short=True)
    assert verify("all_reduce", algorithm, 2 * hosts).cost == Cost(rounds=3, messages=hosts + 1, sent=hosts + 1)


@pytest.mark.parametrize("size", range(1, 17))
def test_sums_are_balanced_for_any_number_of_ranks(size: int) -> None:
    for name in ("binomial", "halving_doubling", "one_shot", "recursive_doubling", "two_shot"):
        assert verify("all_reduce", name, size).balanced, name


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="unknown collective 'all_reduced'; known: all_gather, all_reduce, "):
        verify("all_reduced", ring, 2)
    with pytest.raises(ValueError, match="a group must have at least 1 rank, not 0"):
        verify("all_reduce", ring, 0)
