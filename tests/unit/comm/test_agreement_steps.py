"""`agree_step`: what training keeps on every rank is compared after its steps, and the first difference is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono as un
from unisono.errors import MismatchError
from unisono.testing import pool, run_ranks

STEPS = 8


def train(comm: un.Communicator, plant: Any = None, every: Any = 1, steps: int = STEPS) -> int:
    """Train, change something on rank 1 before step 5, and return the number of steps made."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * number)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    un.agree_step(model, optimizer, comm, every=every)
    made = 0
    for step in range(1, steps + 1):
        if plant is not None and comm.rank == 1 and step == 5:
            plant(model, optimizer)
        optimizer.zero_grad()
        model(torch.arange(8.0).view(2, 4)).sum().backward()
        un.average_gradients(model, comm)
        optimizer.step()
        made += 1
    comm.barrier()
    return made


def lr(model: nn.Sequential, optimizer: torch.optim.Adam) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def moment(model: nn.Sequential, optimizer: torch.optim.Adam) -> None:
    next(iter(optimizer.state.values()))["exp_avg"].view(-1)[3] += 1e-3


def buffer(model: nn.Sequential, optimizer: torch.optim.Adam) -> None:
    model[1].running_mean[2] = 7.0


def parameter(model: nn.Sequential, optimizer: torch.optim.Adam) -> None:
    model[2].bias.data += 1e-6


def left_out(model: nn.Sequential, optimizer: torch.optim.Adam) -> None:
    """Make the step by another optimizer, without the one that is watched."""
    optimizer.step = lambda *_: None


@pytest.mark.parametrize("backend", ["thread", "shm", "tcp"])
def test_equal_training_passes(backend: str) -> None:
    assert pool(backend, 3).run(train) == [STEPS] * 3


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lr, r"'the optimizer after step 5', at \['param_groups'\]\[0\]\['lr'\]: ranks 0, 2: 0.01; rank 1: 0.02"),
        (moment, r"'the optimizer after step 5', at \['state'\]\[0\]\['exp_avg'\]: ranks 0, 2: .*; rank 1: "),
        (buffer, r"'the model after step 5', at \['1.running_mean'\]: ranks 0, 2: .*; rank 1: "),
        (parameter, r"'the model after step 5', at \['2.bias'\]: ranks 0, 2: .*; rank 1: "),
    ],
)
def test_difference_is_named(plant: Any, words: str) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=words):
            train(comm, plant)

    run_ranks(program, 3)


def test_step_that_a_rank_has_left_out_is_named() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"ranks 0, 2: agree\('the optimizer after step 5'.*; rank 1: "):
            train(comm, left_out)

    run_ranks(program, 3)


def test_schedule_is_followed() -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match="after step 6'"):
            train(comm, parameter, every=3)

    run_ranks(program, 3)


def test_what_no_collective_compares_is_compared_after_a_hundred_steps() -> None:
    def program(comm: un.Communicator) -> int:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        un.agree_step(nn.ParameterList([weight]), optimizer, comm)
        for step in range(1, 100):
            weight.grad = torch.ones(2) if comm.rank == 0 or step != 7 else torch.zeros(2)
            optimizer.step()
        with pytest.raises(MismatchError, match="the model after step 7"):
            optimizer.step()
        return step

    assert un.launch(program, 2, "thread") == [99, 99]


def test_handle_ends_the_comparison() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = nn.Parameter(torch.full((2,), float(comm.rank)))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        handle = un.agree_step(nn.ParameterList([weight]), optimizer, comm)
        handle.remove()
        optimizer.step()
        comm.barrier()
        return weight.tolist()

    assert run_ranks(program, 2) == [[0.0, 0.0], [1.0, 1.0]]


def test_wrong_schedule_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with un.init() as comm, pytest.raises(ValueError, match="every must be at least 1 step"):
        un.agree_step(nn.Linear(1, 1), optimizer, comm, every=0)
