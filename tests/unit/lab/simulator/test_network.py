"""Simulated times equal closed forms and sums by hand, and all engines give the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import log2
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.algorithms import (
    ALGORITHMS,
    COLLECTIVES,
    Level,
    Move,
    Network,
    Step,
    find,
    simulate,
    simulate_backward,
)
from unisono.core.collective import FAMILIES
from unisono.lab.simulator.rounds import Rotation

A, B, G = 10e-6, 1e-9, 0.25e-9
PLAIN = Network(alpha=A, bandwidth=1 / B, gamma=G)

# Time for p ranks and n bytes, where p divides n; of trees and doublings, where p is a power of two.
CLOSED: dict[tuple[str, str], Callable[[int, float], float]] = {
    ("all_reduce", "ring"): lambda p, n: 2 * (p - 1) * (A + n / p * B) + (p - 1) * n / p * G,
    ("all_reduce", "recursive_doubling"): lambda p, n: log2(p) * (A + n * B + n * G),
    ("all_reduce", "halving_doubling"): lambda p, n: 2 * log2(p) * A + (p - 1) * n / p * (2 * B + G),
    ("all_reduce", "binomial"): lambda p, n: log2(p) * (2 * A + 2 * n * B + n * G),
    ("all_gather", "ring"): lambda p, n: (p - 1) * (A + n / p * B),
    ("reduce_scatter", "ring"): lambda p, n: (p - 1) * (A + n / p * (B + G)),
    ("all_to_all", "pairwise"): lambda p, n: (p - 1) * (A + n / p * B),
    ("broadcast", "binomial"): lambda p, n: log2(p) * (A + n * B),
    ("broadcast", "chain"): lambda p, n: (p - 2 + 8) * (A + n / 8 * B),
    ("all_reduce", "one_shot"): lambda p, n: A + (p - 1) * n * B + n * G,
    ("all_gather", "direct"): lambda p, n: A + (p - 1) * n / p * B,
    ("scatter", "binomial"): lambda p, n: log2(p) * A + (p - 1) * n / p * B,
}


@pytest.mark.parametrize("key", CLOSED, ids="/".join)
def test_closed_form(key: tuple[str, str]) -> None:
    for size in (2, 4, 32):
        for nbytes in (0, 32, 1 << 20):
            assert simulate(*key, size, nbytes, network=PLAIN).makespan == pytest.approx(
                CLOSED[key](size, nbytes), rel=1e-9
            )


def one_shot(order: Callable[[int, int], list[int]]) -> Any:
    def steps(rank: int, size: int) -> Iterator[Step]:
        others = tuple(Move(peer, 0, 1) for peer in order(rank, size))
        yield Step(others, others, reduce=True)

    return SimpleNamespace(steps=steps, chunks=lambda size: 1)


def test_one_shot_depends_on_the_order_of_sends() -> None:
    turned = one_shot(lambda rank, size: [(rank + away) % size for away in range(1, size)])
    same = one_shot(lambda rank, size: [peer for peer in range(size) if peer != rank])
    for size, nbytes in ((2, 10**6), (8, 10**6), (8, 24)):
        expected = A + (size - 1) * nbytes * B + nbytes * G
        for engine in ("rounds", "events"):
            found = simulate("all_reduce", turned, size, nbytes, network=PLAIN, engine=engine)
            assert found.makespan == pytest.approx(expected, rel=1e-9)
        # All send to the last rank last: its port receives all messages when others are through with theirs.
        found = simulate("all_reduce", same, size, nbytes, network=PLAIN)
        assert found.makespan == pytest.approx(expected + (size - 2) * nbytes * B, rel=1e-9)


def networks() -> Iterator[Network]:
    yield Network(alpha=1e-6, gamma=3e-9)
    yield Network(gamma=G, stragglers={0: 2.0, 2: 5.0})
    yield Network(gamma=G, jitter=1e-5, seed=3)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_engines_agree(collective: str) -> None:
    rng = random.Random(collective)
    engines = set()
    for name in ALGORITHMS[collective].names():
        for size in (2, 3, 8, 13):
            if find(collective, name).unsupported(size):
                continue
            for network in networks():
                starts = [rng.random() * 3e-5 for _ in range(size)]
                given: dict[str, Any] = {"network": network, "start": starts}
                expected = simulate(collective, name, size, 1003, engine="events", **given)
                found = simulate(collective, name, size, 1003, **given)
                engines.add(found.engine)
                assert list(found.ends) == pytest.approx(list(expected.ends), rel=1e-9)
                assert found.messages == expected.messages
    # Ranks of a rooted collective are not alike up to rotation.
    assert ("rounds" in engines) == (FAMILIES[collective].root is None)


def bidirectional(rank: int, size: int) -> Iterator[Step]:
    """Segments of two rings of opposite directions: several messages a step, some between the same ranks."""
    for back in range(size - 1):
        send = [Move((rank + way) % size, *_run((rank - way * back) % size, part)) for way, part in WAYS]
        recv = [Move((rank - way) % size, *_run((rank - way * (back + 1)) % size, part)) for way, part in WAYS]
        yield Step(tuple(send), tuple(recv), reduce=True)


WAYS = ((1, 0), (1, 1), (-1, 2))


def _run(owner: int, part: int) -> tuple[int, int]:
    return owner * 3 + part, owner * 3 + part + 1


def test_rounds_with_several_messages() -> None:
    file: Any = SimpleNamespace(steps=bidirectional, chunks=lambda size: 3 * size)
    for network in networks():
        starts = [1e-5 * (rank % 3) for rank in range(7)]
        found, expected = (
            simulate("all_reduce", file, 7, 100_003, network=network, start=starts, engine=engine)
            for engine in ("rounds", "events")
        )
        assert list(found.ends) == pytest.approx(list(expected.ends), rel=1e-9)


def test_lengths_of_chunks_are_exact() -> None:
    # Of 10 elements of 4 bytes in 4 chunks, two are of 3 elements; each crosses the ring, as do those of 2.
    network = Network(alpha=0, bandwidth=1)
    found = simulate("all_gather", "ring", 4, 40, network=network, itemsize=4, record=True)
    assert {message.nbytes for message in found.record} == {12, 8}
    assert sum(message.nbytes for message in found.record) == 3 * 40
    assert found.makespan == 3 * 12


@pytest.mark.parametrize(
    "use",
    [
        lambda rank: rank == 1,
        lambda rank: rank < 1,
        lambda rank: rank ^ 1,
        lambda rank: [0, 1][rank],
        lambda rank: rank % 2,
        lambda rank: {rank: 1},
        lambda rank: not rank,
        lambda rank: -1 * rank,
    ],
)
def test_symbolic_rank_refuses_all_but_rotations(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        use(Rotation(8))


def test_symbolic_rank_computes_as_an_integer() -> None:
    def computed(rank: Any) -> Any:
        return (((3 + rank - 7) % 8) * 5 + 11) % 40 + 2

    symbol = computed(Rotation(8))
    for rank in range(8):
        assert (rank + symbol.shift) % 8 * symbol.scale + symbol.offset == computed(rank)


def program(*ranks: list[Step], chunks: int = 1) -> Any:
    return SimpleNamespace(steps=lambda rank, size: iter(ranks[rank]), chunks=lambda size: chunks)


TO = [Step(send=(Move(1, 0, 1),)), Step(send=(Move(1, 0, 1),))]
FROM = [Step(recv=(Move(0, 0, 1),)), Step(recv=(Move(0, 0, 1),))]


def test_loggp_by_hand() -> None:
    # Sends at 0 and at 1 + 9 * 2 + 3 = 22; deliveries at start + o + 18 + L + o; the receiver's gap is met already.
    network = Network(alpha=100, bandwidth=1 / 2, overhead=5, gap=4)
    found = simulate("broadcast", program(TO, FROM), 2, 10, network=network, record=True)
    assert [message.start_s for message in found.record] == [0, 22]
    assert [message.end_s for message in found.record] == [5 + 18 + 100 + 5, 22 + 5 + 18 + 100 + 5]
    # The sender does not wait for delivery.
    assert list(found.ends) == [27, 150]


def test_loggp_gap_of_the_receiver() -> None:
    gather = [[Step(recv=(Move(1, 0, 1), Move(2, 0, 1)), reduce=True)], *[[Step(send=(Move(0, 0, 1),))]] * 2]
    network = Network(alpha=10, bandwidth=1, overhead=1, gap=7, gamma=0.5)
    # Both have arrived at 1 + 3 + 10 = 14; the second is taken 7 + 3 after the first, and ends with o and reduction.
    assert simulate("reduce", program(*gather), 3, 4, network=network).makespan == 14 + 10 + 1 + 2


HOSTS = Level("host", ranks=2, alpha=1, bandwidth=10, uplink=2)


def test_shared_link_by_hand() -> None:
    # Ranks 0 and 1 of a host send 20 bytes each to ranks 2 and 3: 10 s each on the links, one after the other.
    pairs = [[Step(send=(Move(rank + 2, 0, 1),))] for rank in range(2)]
    pairs += [[Step(recv=(Move(rank, 0, 1),))] for rank in range(2)]
    network = Network(alpha=5, bandwidth=10, levels=(HOSTS,))
    found = simulate("broadcast", program(*pairs), 4, 20, network=network)
    assert list(found.ends) == [15, 25, 15, 25]
    # Later by 1 s, rank 0 is second.
    found = simulate("broadcast", program(*pairs), 4, 20, network=network, start=[1, 0, 0, 0])
    assert list(found.ends) == [25, 15, 25, 15]


def test_links_are_full_duplex() -> None:
    exchange = [[Step((Move(rank ^ 2, 0, 1),), (Move(rank ^ 2, 0, 1),))] for rank in range(4)]
    network = Network(alpha=5, bandwidth=10, levels=(HOSTS,))
    assert list(simulate("all_reduce", program(*exchange), 4, 20, network=network).ends) == [15, 25, 15, 25]


def test_levels_nest() -> None:
    racks = (HOSTS, Level("rack", ranks=4, alpha=7, bandwidth=10, uplink=1))
    network = Network(alpha=50, bandwidth=10, levels=racks)
    times = {}
    for peer in (1, 2, 4):
        steps: list[list[Step]] = [[] for _ in range(8)]
        steps[0], steps[peer] = [Step(send=(Move(peer, 0, 1),))], [Step(recv=(Move(0, 0, 1),))]
        times[peer] = simulate("broadcast", program(*steps), 8, 20, network=network).makespan
    assert times == {1: 1 + 2, 2: 7 + 10, 4: 50 + 20}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ring_on_shared_links_in_rounds(ranks: int) -> None:
    levels = Level("host", ranks, 1e-6, 5e9, uplink=1e9), Level("rack", 2 * ranks, 3e-6, 2e9, uplink=5e8)
    network = Network(alpha=A, bandwidth=3e9, gamma=G, levels=levels, jitter=2e-6, stragglers={3: 2.0})
    starts = [1e-5 * (rank % 5) for rank in range(12)]
    found, expected = (
        simulate("all_reduce", "ring", 12, 100_003, network=network, start=starts, engine=engine)
        for engine in ("rounds", "events")
    )
    assert list(found.ends) == pytest.approx(list(expected.ends), rel=1e-9)
    with pytest.raises(ValueError, match="may use a shared link at the same time"):
        simulate("all_to_all", "pairwise", 12, 120, network=network, engine="rounds")


def test_levels_without_shared_links_are_plain_costs() -> None:
    same = Level("host", ranks=4, alpha=A, bandwidth=1 / B)
    network = Network(alpha=A, bandwidth=1 / B, gamma=G, levels=(same,))
    for name in ALGORITHMS["all_reduce"].names():
        found, expected = (simulate("all_reduce", name, 8, 4096, network=each) for each in (network, PLAIN))
        assert list(found.ends) == pytest.approx(list(expected.ends), rel=1e-9)


def test_stragglers_and_starts() -> None:
    late = simulate("all_reduce", "recursive_doubling", 4, 1000, network=PLAIN, start=[0, 0, 1, 0]).makespan
    assert late == pytest.approx(1 + CLOSED["all_reduce", "recursive_doubling"](4, 1000), rel=1e-9)
    slow = Network(alpha=A, bandwidth=1 / B, stragglers={1: 3.0})
    assert simulate("broadcast", "binomial", 2, 1000, network=slow).makespan == pytest.approx(A + 3 * 1000 * B)


def test_jitter_depends_on_its_seed_only() -> None:
    def ends(seed: int) -> list[float]:
        network = Network(jitter=1e-4, seed=seed)
        return list(simulate("all_reduce", "ring", 16, 1000, network=network).ends)

    assert ends(1) == ends(1) != ends(2)
    assert min(ends(1)) > simulate("all_reduce", "ring", 16, 1000).makespan


def test_backward_hides_communication() -> None:
    one = CLOSED["all_reduce", "ring"](4, 1e6)
    alone = simulate_backward("ring", 4, [(0.0, 10**6)] * 3, PLAIN)
    assert alone.end == alone.exposed == alone.serial == pytest.approx(3 * one)
    hidden = simulate_backward("ring", 4, [(0.1, 10**6), (0.2, 10**6), (0.3, 10**6)], PLAIN)
    assert (hidden.exposed, hidden.serial) == (pytest.approx(one), pytest.approx(3 * one))
    # The second bucket waits for the first one.
    queued = simulate_backward("ring", 4, [(0.1, 10**6), (0.1, 10**6)], PLAIN)
    assert queued.exposed == pytest.approx(2 * one)


def test_backward_on_shared_links_equals_one_without() -> None:
    levels = (Level("host", ranks=2, alpha=A, bandwidth=1 / B),)
    buckets = [(0.0, 1000), (1e-5, 10**5), (3e-4, 10)]
    found = simulate_backward("halving_doubling", 4, buckets, Network(alpha=A, gamma=G, levels=levels))
    assert found.end == pytest.approx(simulate_backward("halving_doubling", 4, buckets, PLAIN).end, rel=1e-9)


def test_errors_are_one_sentence() -> None:
    stuck = program([Step(recv=(Move(1, 0, 1),))], [Step(recv=(Move(0, 0, 1),))])
    for network in (Network(), Network(levels=(HOSTS,))):
        with pytest.raises(ValueError, match=r"2 ranks never end: .* deadlocks; check it with un.algorithms.verify"):
            simulate("all_reduce", stuck, 2, 8, network=network)
    with pytest.raises(ValueError, match="8 bytes of 3 do not"):
        simulate("all_reduce", "ring", 2, 8, itemsize=3)
    with pytest.raises(ValueError, match="2 ranks, 1 starts"):
        simulate("all_reduce", "ring", 2, 8, start=[0])
    with pytest.raises(ValueError, match="engine 'rounds' cannot serve 'binomial': "):
        simulate("all_reduce", "binomial", 4, 8, engine="rounds")
    with pytest.raises(ValueError, match="those that can: events"):
        simulate("all_reduce", "ring", 4, 8, engine="rounds", record=True)
    with pytest.raises(ValueError, match="is an algorithm of broadcast, not of all_reduce"):
        simulate("all_reduce", find("broadcast", "chain"), 4, 8)
    for wrong in ({"alpha": -1}, {"alpha": float("nan")}, {"bandwidth": 0}, {"gap": 1}, {"stragglers": {0: 0}}):
        with pytest.raises(ValueError, match=r"must be|pass an overhead"):
            Network(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="whole units of 2 ranks"):
        Network(levels=(HOSTS, Level("rack", ranks=3, alpha=0, bandwidth=1)))
