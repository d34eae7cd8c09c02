"""Calls of the MPI backend that are made again with the same tensors: what was found out about these may be over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unisono as un
from unisono.testing.pools import RankPool
from unisono.transports._mpi_seen import same, seen

RANKS = 3
ALGORITHMS = {"all_reduce": "ring", "broadcast": "binomial", "all_gather": "ring", "all_to_all_single": "pairwise"}


def resized(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.resize_(3 if tensor.numel() > 3 else 9)


def turned(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.t_() if rank == 1 else tensor


def of_other_memory(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    tensor.data = tensor.data + 10
    return tensor


def of_whole_numbers(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    tensor.data = tensor.data.view(torch.int32)
    return tensor


def another(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.clone()


Change = Callable[[torch.Tensor, int], torch.Tensor]
CHANGES: list[Change] = [resized, turned, of_other_memory, of_whole_numbers, another]


def made(comm: un.Communicator, name: str, tensor: torch.Tensor, **how: str) -> torch.Tensor:
    """What a call gives of a tensor, in its memory where the call writes there."""
    if name == "all_reduce":
        comm.all_reduce(tensor, **how)
    elif name == "broadcast":
        comm.broadcast(tensor, 1, **how)
    elif name == "all_gather":
        gathered = [torch.zeros_like(tensor) for _ in range(comm.size)]
        comm.all_gather(gathered, tensor, **how)
        return torch.stack(gathered)
    else:
        comm.all_to_all_single(tensor, tensor.clone(), **how)
    return tensor.clone()


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("changes", [[change] * 2 for change in CHANGES] + [CHANGES[1:], CHANGES[::-1]])
def test_a_call_is_made_again_with_what_the_tensor_is_by_then(
    ranks: RankPool, name: str, changes: list[Change]
) -> None:
    """The short way keeps what it found out about tensors; the long one, by a schedule, keeps nothing."""

    def program(comm: un.Communicator, name: str, changes: list[Change]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        tensor, found = torch.arange(9.0).view(3, 3) + comm.rank, []
        for change in changes:
            tensor = change(tensor, comm.rank)
            expected = made(comm, name, tensor.clone(), algorithm=ALGORITHMS[name])
            for _ in range(2):
                given = tensor.clone()
                found.append((made(comm, name, tensor), expected))
                tensor.copy_(given)
        return found

    comparisons = ranks.run(program, name, changes)
    for found, expected in (pair for one in comparisons for pair in one):
        assert torch.equal(found, expected)


def test_another_tensor_in_the_same_memory_is_not_the_same() -> None:
    numbers = torch.tensor([1 + 2j])
    plain, negative = numbers.imag, numbers.conj().imag
    assert plain.data_ptr() == negative.data_ptr()
    assert (same(seen(plain), plain), same(seen(plain), negative)) == (True, False)
    assert not same(seen([plain]), (plain, plain))
    assert not same(seen([plain]), plain)


def test_lists_are_looked_at_one_by_one(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor]:
        rows = [torch.zeros(2) for _ in range(comm.size)]
        given = torch.full((2,), comm.rank + 1.0)
        for _ in range(3):
            comm.all_gather(rows, given)
        first = torch.cat(rows)
        rows[1] = torch.zeros(2)
        comm.all_gather(rows, given)
        return [first, torch.cat(rows)]

    for first, second in ranks.run(program):
        assert torch.equal(first, torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0]))
        assert torch.equal(second, first)


def test_what_may_not_be_written_is_refused_also_when_it_could_be_before(ranks: RankPool) -> None:
    def program(comm: un.Communicator) -> list[str]:
        said, tensor, weight = [], torch.ones(2), torch.ones(2, requires_grad=True)
        for _ in range(2):
            comm.all_reduce(tensor)
        tensor.mul_(weight)
        with torch.inference_mode():
            made = torch.ones(2)
            for _ in range(2):
                comm.all_reduce(made, "avg")
        numbers = torch.ones(2, dtype=torch.complex64)
        for _ in range(2):
            comm.broadcast(numbers, 1)
        for call in (lambda: comm.all_reduce(tensor), lambda: comm.all_reduce(tensor, root_of_all_evil=True)):
            try:
                call()
            except (ValueError, TypeError) as error:
                said.append(type(error).__name__)
        numbers += comm.rank * 1j
        if comm.rank == 1:
            numbers.data = numbers.data.conj()
        comm.broadcast(numbers, 1)
        return [*said, str(numbers.resolve_conj().tolist())]

    assert ranks.run(program) == [["ValueError", "TypeError", "[(1-1j), (1-1j)]"]] * RANKS
