"""Parameters that thaw and freeze while an averager is attached."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from averaged_models import TINY, Net, batches, gradients, made, same, wanted_of
from torch import nn

import unisono as un


def test_parameters_that_thaw_are_averaged_from_then_on() -> None:
    given = batches(2, 2)

    def program(comm: un.Communicator) -> list[list[torch.Tensor | None]]:
        model = made(Net)
        model.get_submodule("a").requires_grad_(False)
        un.GradientAverager(model, comm, **TINY)
        found = []
        for step in range(2):
            if step:
                model.get_submodule("a").requires_grad_(True)
            model.zero_grad()
            model(given[comm.rank][step]).square().mean().backward()
            found.append(gradients(model))
        return found

    first, second = (wanted_of(Net, [given[r][step] for r in range(2)]) for step in range(2))
    for found in un.launch(program, 2, "thread"):
        assert found[0][:2] == [None, None]
        assert same(found[0][2:], first[2:])
        assert same(found[1], second)


@pytest.mark.parametrize("inside", [False, True])
def test_all_of_a_model_may_thaw(inside: bool) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net).requires_grad_(False)
        averager = un.GradientAverager(model, comm, **TINY)
        model.requires_grad_(True)
        with averager.no_sync() if inside else nullcontext():
            model(given[comm.rank][0]).square().mean().backward()
        if inside:
            model.zero_grad()
            model(given[comm.rank][0]).square().mean().backward()
        return gradients(model)

    given = batches(2, 1)
    wanted = wanted_of(Net, [given[r][0] for r in range(2)])
    for found in un.launch(program, 2, "thread"):
        assert same(found, wanted)


def test_parameters_that_freeze_are_left_alone() -> None:
    given = batches(2, 2)

    def program(comm: un.Communicator) -> list[torch.Tensor | None]:
        model = made(Net)
        un.GradientAverager(model, comm, **TINY)
        model(given[comm.rank][0]).square().mean().backward()
        model.zero_grad()
        model.get_submodule("a").requires_grad_(False)
        model(given[comm.rank][1]).square().mean().backward()
        return gradients(model)

    wanted = wanted_of(Net, [given[r][1] for r in range(2)])
    for found in un.launch(program, 2, "thread"):
        assert found[:2] == [None, None]
        assert same(found[2:], wanted[2:])


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(x))
        return out


@pytest.mark.parametrize("thawed", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
def test_sparse_gradients_equal_dense_ones(as_list: bool, thawed: bool) -> None:
    words = [torch.tensor([1, 2, 2]), torch.tensor([8, 2]), torch.tensor([], dtype=torch.int64)]

    def program(comm: un.Communicator) -> tuple[bool, list[torch.Tensor | None]]:
        model = made(lambda: Words(sparse=True))
        model.get_submodule("embedding").requires_grad_(not thawed)
        un.GradientAverager(list(model.parameters()) if as_list else model, comm)
        model.requires_grad_(True)
        model(words[comm.rank]).square().sum().backward()
        return model.get_parameter("embedding.weight").grad.is_sparse, gradients(model)  # type: ignore[union-attr]

    model = made(lambda: Words(sparse=False))
    (sum(model(w).square().sum() for w in words) / 3).backward()
    for is_sparse, found in un.launch(program, 3, "thread"):
        assert is_sparse is not as_list
        assert same(found, gradients(model))
