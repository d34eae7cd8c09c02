"""Gradients of embeddings that are sparse, and what becomes of them where they are not so everywhere."""

from __future__ import annotations

import pytest
import torch
from averaged_models import gradients, made, same
from torch import nn

import unisono as un
from unisono.testing import pool


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
        # After the pass it has a gradient, of which mypy does not know.
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


class Tied(nn.Module):
    """An embedding, optionally shared with a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, dense: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(x)
        return hidden @ self.embedding.weight.T if dense else self.head(hidden)


@pytest.mark.parametrize("call", [False, True])
@pytest.mark.parametrize("dense", [[True, True], [False, True]])
def test_gradient_dense_on_one_rank_is_dense_on_all(dense: list[bool], call: bool) -> None:
    words = [torch.tensor([1, 2, 2]), torch.tensor([8, 2])]

    def program(comm: un.Communicator) -> tuple[torch.layout, list[torch.Tensor | None]]:
        model = made(Tied)
        if not call:
            un.GradientAverager(model, comm, find_unused_parameters=True)
        model(words[comm.rank], dense[comm.rank]).square().sum().backward()
        if call:
            model.get_submodule("head").requires_grad_(False)
            un.average_gradients(model, comm)
        # It has one by now, of which mypy does not know.
        return model.get_parameter("embedding.weight").grad.layout, gradients(model)[:1]  # type: ignore[union-attr]

    model = made(Tied)
    (sum(model(w, d).square().sum() for w, d in zip(words, dense, strict=True)) / 2).backward()
    for layout, found in un.launch(program, 2, "thread"):
        assert layout == torch.strided
        assert same(found, gradients(model)[:1])


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_rank_skipping_an_embedding_is_named_on_every_rank(backend: str) -> None:
    def program(comm: un.Communicator) -> str:
        model = made(lambda: Words(sparse=True))
        averager = un.GradientAverager(model, comm)
        head, words = model.get_submodule("head"), torch.tensor([1, 2])
        with pytest.raises(un.errors.MismatchError) as caught:
            (head(torch.ones(4, dtype=torch.float64)) if comm.rank else model(words)).sum().backward()
        # Nothing is broken: the next step is right again.
        model.zero_grad()
        model(words).sum().backward()
        averager.remove()
        return str(caught.value)

    for message in pool(backend, 3).run(program):
        assert "rank 1, 2 has no gradient for 'embedding.weight', which other ranks have" in message


def test_gradient_averaged_while_frozen_on_a_rank_is_not_averaged_again() -> None:
    """The rank sets p.grad once its parameter is no longer frozen there: that gradient stays its own."""

    def program(comm: un.Communicator) -> float:
        table = nn.Embedding(3, 2, sparse=True)
        head = nn.Parameter(torch.ones(2))
        model = nn.ParameterDict({"head": head})
        model.add_module("table", table)
        averager = un.GradientAverager(model, comm, find_unused_parameters=True)
        words = torch.tensor([1])
        with averager.no_sync():
            (table(words) * head).sum().backward()
        table.weight.requires_grad_(comm.rank == 0)
        (table(words) * head).sum().backward()
        table.weight.requires_grad_(True)
        table.weight.grad = torch.full((3, 2), float(comm.rank))
        (head * 2.0).sum().backward()
        averager.remove()
        return table.weight.grad.mean().item()

    assert un.launch(program, 2, "thread") == [0.0, 1.0]


def test_accumulated_gradient_that_was_set_to_none_is_gone() -> None:
    """One rank alone had accumulated it; then no rank uses the embedding, so no rank lacks it."""

    def program(comm: un.Communicator) -> tuple[bool, float]:
        model = made(lambda: Words(sparse=True))
        head = model.get_submodule("head")
        averager = un.GradientAverager(model, comm)
        if comm.rank == 0:
            with averager.no_sync():
                model(torch.tensor([1, 2])).sum().backward()
        model.zero_grad()
        (head(torch.ones(4, dtype=torch.float64)) * (comm.rank + 1.0)).sum().backward()
        averager.remove()
        bias = model.get_parameter("head.bias").grad
        assert bias is not None
        return model.get_parameter("embedding.weight").grad is None, bias.mean().item()

    assert un.launch(program, 2, "thread") == [(True, 1.5)] * 2


def test_rank_without_data_does_not_decide_the_layout() -> None:
    """It has a dense p.grad from before; the gradient of the rank that goes on is sparse, as alone."""

    def program(comm: un.Communicator) -> torch.layout:
        table = nn.Embedding(3, 2, sparse=True)
        averager = un.GradientAverager(table, comm)
        with averager.join():
            for number in range(3 - comm.rank):
                table.weight.grad = torch.zeros(3, 2) if number < 2 else None
                table(torch.tensor([1])).sum().backward()
        averager.remove()
        assert table.weight.grad is not None
        return table.weight.grad.layout

    assert un.launch(program, 2, "thread") == [torch.sparse_coo, torch.strided]
