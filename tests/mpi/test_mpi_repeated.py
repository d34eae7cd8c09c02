"""Calls of the MPI backend that are made again with tensors that have changed meanwhile."""

from __future__ import annotations

import torch
from autograd_checks import check_writes

import unisono as un
from unisono.testing.pools import RankPool

RANKS = 3


def test_lists_are_checked_per_tensor(ranks: RankPool) -> None:
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


def test_newly_read_only_tensor_is_rejected(ranks: RankPool) -> None:
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


def test_writes_increment_autograd_versions(ranks: RankPool) -> None:
    check_writes(ranks)
