"""Parameters that thaw and freeze while an averager is attached."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from averaged_models import TINY, Net, batches, gradients, made, same, wanted_of

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
