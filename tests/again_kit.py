"""Calls that are made again with the same tensors, which may have changed: for each transport that keeps some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as un
from unisono.testing.pools import RankPool

__all__ = ["check_called_again", "of_each_change"]

ALGORITHMS = {"all_reduce": "ring", "broadcast": "binomial", "all_gather": "ring", "all_to_all_single": "pairwise"}
"""Of calls to be made again, how they are made the longer way."""


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


def called_again(comm: un.Communicator, name: str, changes: list[Change]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What calls give between changes of their tensor, and what a schedule gives, for which nothing is kept."""
    tensor, found = torch.arange(9.0).view(3, 3) + comm.rank, []
    for change in changes:
        tensor = change(tensor, comm.rank)
        expected = made(comm, name, tensor.clone(), algorithm=ALGORITHMS[name])
        for _ in range(3):
            given = tensor.clone()
            found.append((made(comm, name, tensor), expected))
            tensor.copy_(given)
    return found


def of_each_change(test: Any) -> Any:
    """Runs a test with the `name` of each call, and several lists of `changes` of its tensor."""
    test = pytest.mark.parametrize("changes", [[change] * 2 for change in CHANGES] + [CHANGES[1:], CHANGES[::-1]])(test)
    return pytest.mark.parametrize("name", list(ALGORITHMS))(test)


def check_called_again(ranks: RankPool, name: str, changes: list[Change]) -> None:
    """Fail unless calls between changes of their tensor give what a schedule gives, on all ranks."""
    for found, expected in (pair for one in ranks.run(called_again, name, changes) for pair in one):
        assert torch.equal(found, expected)
