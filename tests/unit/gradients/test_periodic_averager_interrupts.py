"""Periodic averaging on a rank that is interrupted (Ctrl-C), after which its program continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import unisono as un
from unisono.errors import AbortedError
from unisono.gradients import DiLoCo, PeriodicAverager
from unisono.testing import run_ranks

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}


def interrupted_wait(averager: PeriodicAverager, call: Callable[[], object]) -> None:
    """Make a call whose wait for the exchange in flight is interrupted, just when the exchange has ended."""
    exchange = averager._fragments[0].exchange
    assert exchange is not None
    exchange.wait()
    with mock.patch.object(exchange.done, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        call()


@pytest.mark.parametrize("end", ["finish", "outer_step"])
def test_an_interrupted_wait_for_a_result_changes_nothing(end: str) -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(1)
        diloco = DiLoCo([weight], comm, 3, **PLAIN, overlap_steps=1)
        for step in range(1, 9):
            weight += comm.rank + 1
            if comm.rank == 0 and step == 4:
                interrupted_wait(diloco, diloco.step)
            else:
                diloco.step()
            if comm.rank == 0 and step == 6:
                interrupted_wait(diloco, diloco.state_dict)
                assert diloco.state_dict()["under_way"] != [None]
        for _ in range(4):
            diloco.step()
        weight += comm.rank + 1
        diloco.step()
        diloco.step()
        diloco.step()
        # Sent after the 15th step, and not applied yet.
        if comm.rank == 0:
            interrupted_wait(diloco, getattr(diloco, end))
        getattr(diloco, end)()
        return [weight.item(), diloco.anchor[0].item()]

    assert run_ranks(program, 2) == [[13.5, 13.5]] * 2


def test_an_interrupted_wait_for_a_result_changes_nothing_in_a_turn() -> None:
    def program(comm: un.Communicator) -> float:
        weight = torch.zeros(1)
        diloco = DiLoCo([weight], comm, timedelta(seconds=10), **PLAIN, overlap_steps=2)
        for step in range(1, 15):
            time.sleep(1.0)
            weight += comm.rank + 1
            if comm.rank == 0 and step == 13:
                interrupted_wait(diloco, diloco.step)
            else:
                diloco.step()
        diloco.finish()
        return weight.item()

    assert un.simulate(program, 2).results == [21.0] * 2


def continues_after(comm: un.Communicator, averager: PeriodicAverager, weight: torch.Tensor, said: str) -> list[float]:
    """Check that each rank gets the error, at its next exchange at the latest; move on, and return the weights."""

    def steps() -> None:
        for _ in range(4):
            averager.step()

    for call in (steps, averager.step, averager.state_dict, averager.finish):
        with pytest.raises(AbortedError, match=said):
            call()
    comm.barrier()
    averager.move_to(comm)
    weight += comm.rank + 1
    averager.finish()
    return weight.tolist()


def test_an_interrupt_of_a_step_that_sends_is_an_error_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> list[float]:
        weight = torch.zeros(1)
        diloco = DiLoCo([weight], comm, 2, **PLAIN, overlap_steps=2)
        for _ in range(3):
            diloco.step()
        if comm.rank == 0:
            interrupted_wait(diloco, diloco.step)
        return continues_after(comm, diloco, weight, "DiLoCo of rank 0 has failed in an exchange: KeyboardInterrupt")

    assert run_ranks(program, 2) == [[1.5]] * 2


def test_an_interrupt_of_a_reduction_is_raised_once_and_is_an_error_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> list[float]:
        def reduce(flat: torch.Tensor, inner: un.Communicator, turn: int) -> None:
            if comm.rank == 0 and turn == 1 and not interrupted:
                interrupted.append(turn)
                raise KeyboardInterrupt
            inner.all_reduce(flat, "avg")

        interrupted: list[int] = []
        weight = torch.zeros(1)
        outer = un.gradients.OuterUpdate(lambda anchor: torch.optim.SGD(anchor, lr=1.0))
        averager = PeriodicAverager([weight], comm, 1, outer=outer, reduce=reduce)
        averager.step()
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                averager.step()
        return continues_after(comm, averager, weight, "PeriodicAverager of rank 0 has failed in an exchange")

    assert run_ranks(program, 2) == [[1.5]] * 2


class InterruptedSGD(torch.optim.SGD):
    """An outer optimizer that is interrupted, on request, when it has changed the first of two parameters."""

    def __init__(self, anchor: list[torch.Tensor]) -> None:
        super().__init__(anchor, lr=1.0)
        self.interrupts = False

    def step(self, closure: Any = None) -> None:
        if self.interrupts:
            self.interrupts = False
            first = self.param_groups[0]["params"][0]
            first.sub_(first.grad)
            raise KeyboardInterrupt
        super().step(closure)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_half_applied_result_is_not_kept(lag: int) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        weights = [torch.zeros(1), torch.zeros(1)]
        diloco = DiLoCo(weights, comm, 2, outer=InterruptedSGD, overlap_steps=lag, alpha=0.0)
        assert isinstance(diloco.outer, InterruptedSGD)
        for weight in weights:
            weight += 8 * (comm.rank + 1)
        for _ in range(1 + lag):
            diloco.step()
        diloco.outer.interrupts = comm.rank == 0
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                diloco.step()
        else:
            diloco.step()
        said = "DiLoCo of rank 0 has failed in an exchange: KeyboardInterrupt"
        ends = continues_after(comm, diloco, weights[0], said)
        return [ends, weights[1].tolist(), [there.item() for there in diloco.anchor]]

    # The mean of the first exchange is 12 on both ranks, and each has learnt a little more with the first weight.
    assert run_ranks(program, 2) == [[[13.5], [12.0], [13.5, 12.0]]] * 2
