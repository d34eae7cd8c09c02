"""Uses that would give wrong gradients in silence: exchanged gradients, and two backward passes of one model."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from averaged_models import gradients
from averager_helpers import BACKENDS, SMALL, sample, stack
from torch import nn

import unisono as un
from unisono.testing import pool

PATIENCE_S = 5.0


@pytest.mark.parametrize("sizes", [SMALL, {}], ids=["two buckets", "one bucket"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped_gradients_are_rejected(backend: str, sizes: dict[str, Any]) -> None:
    """Each would be overwritten before it is read. A clone is as good as any other gradient."""

    def program(comm: un.Communicator) -> list[list[float]]:
        model = stack(count=2)
        averager = un.GradientAverager(model, comm, **sizes)
        first, second = model.parameters()

        def step() -> None:
            (first.sum() + 2.0 * second.sum()).backward()

        # The first pass decides on the buckets, and the second one fills them.
        for _ in range(2):
            model.zero_grad()
            step()
        first.grad, second.grad = second.grad, first.grad
        kept = [grad for grad in gradients(model) if grad is not None]
        with pytest.raises(RuntimeError, match="clone"):
            step()
        first.grad, second.grad = kept
        step()
        averager.remove()
        return [grad.unique().tolist() for grad in gradients(model) if grad is not None]

    assert pool(backend, 2).run(program) == [[[3.0], [3.0]]] * 2


class Meeting:
    """Places in a backward pass where two threads wait for each other, unless one of them has ended."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def wait(self, *_: object) -> None:
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(PATIENCE_S)

    def end(self) -> None:
        self._barrier.abort()


def overlapping(model: nn.Sequential, rank: int) -> list[BaseException | None]:
    """The errors of two threads whose backward passes both reach the last layer before either reaches the others."""
    meeting = Meeting()
    errors: list[BaseException | None] = [None, None]

    def trains(number: int) -> None:
        hidden = model[1](model[0](sample(rank + number)))
        found = model[2](hidden)
        # The gradient of the output is known before that of any parameter; that of `hidden` after the last layer's.
        found.register_hook(meeting.wait)
        hidden.register_hook(meeting.wait)
        try:
            found.square().mean().backward()
        except BaseException as error:
            errors[number] = error
        meeting.end()

    threads = [threading.Thread(target=trains, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("sizes", [SMALL, {}], ids=["small", "large"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_concurrent_backward_of_one_model_is_an_error(backend: str, sizes: dict[str, Any]) -> None:
    def program(comm: un.Communicator) -> list[bool]:
        model = stack()
        averager = un.GradientAverager(model, comm, **sizes)
        errors = overlapping(model, comm.rank)
        # Without a barrier before it: the other rank's pass may wait for one that failed here.
        averager.remove()
        return [isinstance(error, un.CommError) for error in errors if error is not None]

    results = pool(backend, 2).run(program)
    assert all(results), "both passes ended without an error"
    assert not all(of_peers for result in results for of_peers in result), "no rank noticed by itself"


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_may_alternate(backend: str) -> None:
    def program(comm: un.Communicator) -> list[list[float]]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        averager = un.GradientAverager([weight], comm)

        def trains() -> None:
            weight.grad = None
            (weight * (comm.rank + 1.0)).sum().backward()

        found = []
        for _ in range(3):
            thread = threading.Thread(target=trains)
            thread.start()
            thread.join()
            assert weight.grad is not None
            found.append(weight.grad.unique().tolist())
        averager.remove()
        return found

    assert pool(backend, 2).run(program) == [[[1.5]] * 3] * 2


@pytest.mark.skipif(not hasattr(torch.ones(1), "grad_dtype"), reason="this torch gives gradients the parameter's dtype")
def test_gradients_of_another_dtype_are_refused() -> None:
    def program(comm: un.Communicator) -> None:
        model: Any = nn.Linear(2, 1, dtype=torch.bfloat16)
        model.bias.grad_dtype = torch.float32
        with pytest.raises(ValueError, match=r"'bias' is torch.bfloat16, but its grad_dtype is torch.float32"):
            un.GradientAverager(model, comm)

    pool("thread", 2).run(program)
