"""Parts of one length that lie side by side go by MPI's simpler calls, if they lie so on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import unisono as un
from unisono.testing.pools import RankPool
from unisono.transports._mpi_lists import Parts, levelled

RANKS = 3
ALL = frozenset(range(RANKS))
SIMPLER = {"all_gather": "Allgather", "all_to_all": "Alltoall", "gather": "Gather", "scatter": "Scatter"}


def program(
    comm: un.Communicator, name: str, level: frozenset[int], long: frozenset[int]
) -> tuple[list[str], list[bool]]:
    """MPI's functions by which five calls were made, and whether the results were right; three each time.

    Args:
        name: Of a collective.
        level: The ranks whose parts lie side by side; those of the others lie apart.
        long: The ranks that go the longer way once, in the fourth call.
    """
    # The first call makes this thread the owner.
    comm.barrier()
    quick, size, used, right = comm._engine.quick, comm.size, [], []
    native, own = quick._native, quick._comms.own
    make, keep = native.make, quick._keep
    # Tensors of an earlier program may have lain in the places of these: such are not kept.
    quick._twice.clear()
    known = {getattr(own, f"{one}{v}"): f"{one}{v}" for one in SIMPLER.values() for v in ("", "v")}

    def parts(count: int) -> list[torch.Tensor]:
        whole = torch.zeros(2 * size * count)
        return list(whole[: size * count].split(count) if comm.rank in level else whole.split(2 * count))[:size]

    def numbered(tensors: list[torch.Tensor], by: int) -> list[torch.Tensor]:
        return [tensor[:4].fill_(10 * by + rank) for rank, tensor in enumerate(tensors)]

    def called(begin: object, *rest: object) -> None:
        used.append(known[begin])
        make(begin, *rest)

    def kept(*call: object) -> None:
        ready = call[-1]
        keep(*call[:-1], ready._replace(begin=lambda *given: (used.append(known[ready.begin]), ready.begin(*given))))

    into, given = [tensor[:4] for tensor in parts(4)], numbered(parts(4), comm.rank)
    native.make, quick._keep = called, kept
    try:
        for number in range(5):
            how = {"algorithm": "native"} if number == 3 and comm.rank in long else {}
            for tensor in into:
                tensor.zero_()
            if name == "all_to_all":
                comm.all_to_all(into, given, **how)
                wanted = [10 * rank + comm.rank for rank in range(size)]
            elif name == "all_gather":
                comm.all_gather(into, given[0], **how)
                wanted = [10 * rank for rank in range(size)]
            elif name == "gather":
                comm.gather(given[0], into if comm.rank == 1 else None, 1, **how)
                wanted = [10 * rank if comm.rank == 1 else 0 for rank in range(size)]
            else:
                comm.scatter(into[0], given if comm.rank == 1 else None, 1, **how)
                wanted = [10 + comm.rank] + [0] * (size - 1)
            right.append(
                torch.equal(torch.stack(into), torch.tensor(wanted, dtype=torch.float32)[:, None].expand(-1, 4))
            )
    finally:
        native.make, quick._keep = make, keep
    return used, right


@pytest.mark.parametrize("level", [ALL, ALL - {0}, ALL - {1}, frozenset({1}), frozenset()])
@pytest.mark.parametrize("name", list(SIMPLER))
def test_the_simpler_call_is_made_if_all_can(ranks: RankPool, name: str, level: frozenset[int]) -> None:
    # Of rooted ones, only the root has a list.
    simple = level >= (ALL if name.startswith("all") else {1})
    for used, right in ranks.run(program, name, level, frozenset()):
        assert right == [True] * 5
        assert used == [SIMPLER[name] + ("" if simple else "v")] * 5


@pytest.mark.parametrize("long", [{0}, {1, 2}])
@pytest.mark.parametrize("name", list(SIMPLER))
def test_who_goes_the_longer_way_is_met(ranks: RankPool, name: str, long: set[int]) -> None:
    for rank, (used, right) in enumerate(ranks.run(program, name, ALL, frozenset(long))):
        assert right == [True] * 5
        # What is made the longer way is not seen here. After it, all go the way that is open to all.
        assert used == [SIMPLER[name]] * 3 + [SIMPLER[name] + "v"] * (1 if rank in long else 2)


def test_level_parts_are_of_one_length_and_side_by_side() -> None:
    buffer, byte = object(), object()
    assert levelled((None, [buffer, [4, 4, 4], [0, 4, 8], byte], 2)) == (None, [buffer, byte], 2)
    assert levelled(([buffer, byte], [buffer, [4, 4], [0, 4], byte])) == ([buffer, byte], [buffer, byte])
    assert levelled(([buffer, [4, 8], [0, 4], byte],)) is None
    assert levelled(([buffer, [4, 4], [0, 8], byte],)) is None
    assert levelled(([buffer, [4, 4], [4, 0], byte],)) is None
    assert levelled(([buffer, [4, 4], [0, 4], byte], [buffer, [4, 4], [0, 5], byte])) is None


class At:
    """What lies at an address; what is empty lies at 0."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def test_empty_tensors_lie_nowhere() -> None:
    comms = SimpleNamespace(
        own=SimpleNamespace(Get_rank=lambda: 0),
        mpi=SimpleNamespace(buffer=SimpleNamespace(fromaddress=lambda address, nbytes: (address, nbytes)), BYTE="byte"),
    )

    def described(counts: tuple[int, ...], *addresses: int) -> object:
        return Parts(comms, torch.float32, counts).described([At(address) for address in addresses])

    # The memory of a program that was linked to a fixed place begins low.
    assert described((0, 3, 2), 0, 4096, 4108) == [(4096, 20), [0, 12, 8], [0, 0, 12], "byte"]
    assert described((3, 0, 2), 4120, 0, 4096) == [(4096, 36), [12, 0, 8], [24, 0, 0], "byte"]
    assert described((2, 3, 0), 4096, 4104, 0) == [(4096, 20), [8, 12, 0], [0, 8, 0], "byte"]
    assert described((0, 0), 0, 0) == [(0, 0), [0, 0], [0, 0], "byte"]
    assert described((2, 3), 4096, 4100) is None
