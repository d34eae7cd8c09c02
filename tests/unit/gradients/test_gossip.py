"""Gossip: weights that keep the mean, rounds that come nearer to it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.errors import AbortedError, MismatchError
from unisono.gradients.gossip import Gossip
from unisono.gradients.topology import TOPOLOGIES, Neighbours, Topology, mixing, topology
from unisono.testing import run_ranks

NAMES = sorted(TOPOLOGIES)


def matrix(neighbours: Neighbours) -> torch.Tensor:
    size = len(neighbours)
    found = torch.zeros(size, size, dtype=torch.float64)
    for rank, row in enumerate(mixing(neighbours, size)):
        for other, weight in row.items():
            found[rank, other] = weight
    return found


def check_doubly_stochastic(found: torch.Tensor) -> None:
    assert (found >= 0).all()
    assert (found.sum(0) - 1).abs().max() < 1e-12
    assert (found.sum(1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_named_topologies_keep_the_mean_and_connect_all(name: str) -> None:
    for size in (*range(1, 18), 64):
        product_of_rounds = torch.eye(size, dtype=torch.float64)
        for turn in range(8):
            weights = matrix(TOPOLOGIES[name](size, turn))
            check_doubly_stochastic(weights)
            product_of_rounds = weights @ product_of_rounds
        for _ in range(3):
            product_of_rounds @= product_of_rounds
        # 64 rounds and more: a rank's word has come everywhere.
        assert (product_of_rounds > 0).all(), f"{name} does not connect {size} ranks"


@given(st.integers(1, 9).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size * size - 1)))))
def test_mutual_neighbours_get_mean_preserving_weights(drawn: tuple[int, set[int]]) -> None:
    size, edges = drawn
    pairs = {frozenset(divmod(edge, size)) for edge in edges}
    lists = [[other for other in range(size) if other != r and {r, other} in pairs] for r in range(size)]
    found = matrix(lists)
    check_doubly_stochastic(found)
    assert torch.equal(found, found.T) or torch.allclose(found, found.T, atol=1e-15)


def test_metropolis_and_hastings_weights() -> None:
    star = matrix([[1, 2, 3], [0], [0], [0]])
    assert star.tolist() == [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0, 0], [0.25, 0, 0.75, 0], [0.25, 0, 0, 0.75]]


def test_balanced_directed_neighbours() -> None:
    # Two cycles through rank 0, which takes from two and gives to two; the others have one each.
    found = matrix([[2, 4], [0], [1], [0], [3]])
    check_doubly_stochastic(found)
    assert found[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert found[1].tolist() == pytest.approx([1 / 3, 2 / 3, 0, 0, 0])


def start(rank: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [
        torch.randn(3, 4, dtype=torch.float64, generator=source).t(),
        torch.randn(5, generator=source),
        torch.randn(4, 6, generator=source)[:, ::2],
        torch.randn(0, generator=source),
        torch.randn((), generator=source),
        torch.randn(3, dtype=torch.complex64, generator=source),
        torch.randn(6, generator=source).half(),
        torch.tensor([rank]),
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_round_applies_the_mixing_matrix(name: str, size: int) -> None:
    def program(comm: un.Communicator) -> list[list[torch.Tensor]]:
        tensors = start(comm.rank)
        # Messages of 40 bytes, so that there are several.
        gossip = Gossip(tensors, comm, name, bucket_cap_mb=40 / 2**20)
        rounds = []
        for _ in range(3):
            assert gossip.step()
            rounds.append([t.clone() for t in tensors])
        return rounds

    before, found = [start(rank) for rank in range(size)], run_ranks(program, size)
    for index in range(7):
        wide = torch.complex128 if before[0][index].is_complex() else torch.float64
        wanted = torch.stack([tensors[index].to(wide) for tensors in before])
        for turn in range(3):
            weights = matrix(TOPOLOGIES[name](size, turn)).to(wide)
            wanted = torch.tensordot(weights, wanted, 1)
            given = torch.stack([found[rank][turn][index].to(wide) for rank in range(size)])
            within = {2: 5e-3, 4: 1e-5, 8: 1e-5 if wide.is_complex else 1e-13}[before[0][index].itemsize]
            assert torch.allclose(given, wanted, rtol=0, atol=within), (index, turn)
            # So that the next round is held to its own rounding only.
            wanted = given
    assert [found[rank][2][7].item() for rank in range(size)] == list(range(size))


@pytest.mark.parametrize(("name", "size"), [*product(NAMES, [1, 2, 5]), ("exponential", 8)])
def test_mean_is_kept_and_reached(name: str, size: int) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor]:
        values = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank))
        gossip = Gossip([values], comm, name)
        history = [values.clone()]
        # Ranks on a grid that is a line are the slowest.
        for _ in range(110 if name == "grid" else 40):
            gossip.mix()
            history.append(values.clone())
        return history

    ranks = run_ranks(program, size)
    history = torch.stack([torch.stack(found) for found in ranks], dim=1)
    mean = history[0].mean(0)
    assert (history.mean(1) - mean).abs().max() < 1e-14
    spread = (history - mean).abs().amax(dim=(1, 2))
    assert spread[-1] < 1e-6
    if name == "exponential" and size == 8:
        assert spread[2] > 1e-3
        assert spread[3] < 1e-14


def test_equal_parameters_are_unchanged() -> None:
    given = torch.tensor([0.1, 1e-40, -3e38, 1 / 3])

    def program(comm: un.Communicator) -> torch.Tensor:
        values = given.clone()
        gossip = Gossip([values], comm, "grid")
        for _ in range(5):
            gossip.mix()
        return values

    for found in run_ranks(program, 5):
        assert torch.equal(found, given)


def test_lists_and_functions() -> None:
    def program(comm: un.Communicator, given: Neighbours | Topology) -> list[float]:
        value = torch.tensor([float(comm.rank)], dtype=torch.float64)
        gossip = Gossip([value], comm, given)
        gossip.step()
        gossip.step()
        return [value.item(), gossip.rounds]

    line = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]], dtype=torch.float64) / 3
    wanted = line @ line @ torch.arange(3, dtype=torch.float64)
    found = run_ranks(program, 3, "thread", [[1], [0, 2], [1]])
    assert [f[0] for f in found] == pytest.approx(wanted.tolist(), abs=1e-14)

    def pairs(size: int, turn: int) -> list[list[int]]:
        return [[1], [0], []] if turn == 0 else [[], [2], [1]]

    assert [f[0] for f in run_ranks(program, 3, "thread", pairs)] == [0.5, 1.25, 1.25]


def test_converges_to_the_mean_and_resumes() -> None:
    def program(comm: un.Communicator) -> tuple[list[float], float]:
        value = torch.tensor([float(comm.rank)])
        old = Gossip([value], comm, "exponential", every=2)
        done = [old.step() for _ in range(3)]
        assert done == [False, True, False]
        new = Gossip([value], comm, "exponential", every=2)
        new.load_state_dict(old.state_dict())
        assert (new.steps, new.rounds) == (3, 1)
        assert new.step()
        mixed = value.item()
        value.fill_(comm.rank * 2.0)
        new.average()
        return [mixed], value.item()

    # Distances 1, then 2: the mean of four, which distance 1 twice would not give.
    assert run_ranks(program, 4) == [([1.5], 3.0)] * 4


def test_ranks_need_not_wait_for_all() -> None:
    """On a line of four, ranks 0 and 1 mix while 2 and 3 have not come."""

    def pairs(size: int, turn: int) -> list[list[int]]:
        return [[1], [0], [3], [2]]

    def program(comm: un.Communicator) -> float:
        value = torch.tensor([float(comm.rank)])
        gossip = Gossip([value], comm, pairs)
        if comm.rank >= 2:
            comm.recv(torch.empty(1), comm.rank - 2)
        gossip.mix()
        if comm.rank < 2:
            comm.send(value, comm.rank + 2)
        return value.item()

    assert run_ranks(program, 4) == [0.5, 0.5, 2.5, 2.5]


@pytest.mark.parametrize(
    ("neighbours", "said"),
    [
        ("rang", "unknown topology 'rang'; known: complete, exponential, grid, ring"),
        ([[1], [0]], "for each of the 3 ranks, not 2"),
        ([[1], [0, 1], [1]], "neighbours of rank 1 must be distinct, other ranks of 0 to 2"),
        ([[1, 1], [0], []], "neighbours of rank 0 must be distinct"),
        ([[3], [0], [0]], "neighbours of rank 0 must be"),
        ([[1, 2], [0], []], "rank 0 receives from 2 ranks and sends to 1: mixing would not keep the mean"),
        ([[1], [0], []], "rank 2 receives nothing from rank 0"),
    ],
)
def test_bad_topologies_send_nothing(neighbours: str | Neighbours, said: str) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match=said):
            Gossip([torch.zeros(1)], comm, neighbours)
        comm.barrier()

    run_ranks(program, 3)
    with pytest.raises(ValueError, match=said):
        topology(neighbours, 3)


def test_different_topologies_and_models() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"'topology'\]: rank 0: 'grid'; rank 1: 'ring'"):
            Gossip([torch.zeros(1)], comm, "ring" if comm.rank else "grid")
        with pytest.raises(
            MismatchError, match=r"'parameter 0'\]: rank 0: 'float32 \(1,\) on cpu'; rank 1: 'float32 \(2,\)"
        ):
            Gossip([torch.zeros(1 + comm.rank)], comm)

    run_ranks(program, 2)


def test_neighbours_of_which_one_took_more_steps_are_named() -> None:
    def program(comm: un.Communicator) -> None:
        gossip = Gossip([torch.zeros(1)], comm, every=2)
        for _ in range(4 + (comm.rank == 1)):
            gossip.step()
        gossip.mix()

    ends = run_ranks(program, 4, on_failure="continue")
    assert any("and a neighbour is not: they resumed" in str(end) for end in ends)
    assert all(isinstance(end, MismatchError | AbortedError) for end in ends)


def test_with_processes() -> None:
    def program(comm: un.Communicator) -> list[float]:
        values = torch.full((3000,), float(comm.rank))
        with Gossip([values], comm, "exponential") as gossip:
            gossip.mix()
            gossip.mix()
        return values.unique().tolist()

    assert un.testing.pool("gloo").run(program, size=4) == [[1.5]] * 4
