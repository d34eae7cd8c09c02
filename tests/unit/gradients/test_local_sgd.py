"""Local SGD, and what all periodic ones have in common: schedules, names, agreement, hooks, ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch

import unisono as un
from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.errors import ClosedError, MismatchError, PeerLostError
from unisono.gradients.gossip import Gossip
from unisono.gradients.local_sgd import LocalSGD
from unisono.gradients.periodic import every
from unisono.testing import run_ranks
from unisono.wrappers.base import Wrapper

SIZES = [1, 2, 3]


class Odd(torch.nn.Module):
    """Several shapes, dtypes and strides, one frozen, one of integers, and two buffers; values differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        shapes = ((3, 5), (1,), (2, 0), (), (7,))
        source = torch.Generator().manual_seed(rank)
        self.many = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(s, generator=source)) for s in shapes])
        self.turned = torch.nn.Parameter(torch.randn(4, 3, generator=source).t())
        self.gaps = torch.nn.Parameter(torch.randn(4, 6, generator=source)[:, ::2])
        self.wide = torch.nn.Parameter(torch.randn(6, dtype=torch.float64, generator=source))
        self.low = torch.nn.Parameter(torch.randn(5, generator=source).bfloat16())
        self.pair = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=source))
        self.frozen = torch.nn.Parameter(torch.randn(2, generator=source), requires_grad=False)
        self.index = torch.nn.Parameter(torch.tensor([rank, 7]), requires_grad=False)
        self.register_buffer("running", torch.randn(3, generator=source))
        self.register_buffer("count", torch.tensor(rank))


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("buffers", [False, True])
def test_floating_point_state_is_averaged(size: int, buffers: bool) -> None:
    def program(comm: un.Communicator) -> dict[str, torch.Tensor]:
        model = Odd(comm.rank)
        places = {name: t.data_ptr() for name, t in model.state_dict().items()}
        # Messages of 40 bytes, so that there are several, and one tensor that is longer.
        with LocalSGD(model, comm, every=1, buffers=buffers, bucket_cap_mb=40 / 2**20) as local:
            assert local.step()
        assert places == {name: t.data_ptr() for name, t in model.state_dict().items()}
        return values(model)

    before, after = [values(Odd(rank)) for rank in range(size)], run_ranks(program, size)
    kept = {"index", "count"} | (set() if buffers else {"running"})
    for name in before[0]:
        for rank in range(size):
            found = after[rank][name]
            if name in kept:
                assert torch.equal(found, before[rank][name]), name
                continue
            wide = torch.complex128 if found.is_complex() else torch.float64
            mean = torch.stack([b[name].to(wide) for b in before]).mean(0)
            assert torch.allclose(found.to(wide), mean, atol=0.02 if found.itemsize == 2 else 1e-6), name
            assert torch.equal(found, after[0][name]), f"{name} is not the same on rank {rank}"


def test_buffers_may_be_replaced() -> None:
    def program(comm: un.Communicator) -> float:
        model = torch.nn.BatchNorm1d(1)
        local = LocalSGD(model, comm, every=1, buffers=True)
        model.running_mean = torch.full((1,), float(comm.rank))
        local.step()
        return model.running_mean.item()

    assert run_ranks(program, 2) == [0.5, 0.5]


def trained(comm: un.Communicator, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], n: int) -> torch.Tensor:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    optimizer = make([weight])
    with LocalSGD([weight], comm, every=n) as local:
        local.attach(optimizer)
        for step in range(12):
            weight.grad = (weight.detach() - comm.rank).cos() * (step + 1)
            optimizer.step()
    return weight.detach()


def alone(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], n: int, size: int) -> torch.Tensor:
    """The same by hand: all ranks in one loop."""
    weights = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(size)]
    optimizers = [make([weight]) for weight in weights]
    for step in range(12):
        for rank, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            weight.grad = (weight.detach() - rank).cos() * (step + 1)
            optimizer.step()
        if (step + 1) % n == 0:
            mean = torch.stack([w.detach() for w in weights]).mean(0)
            for weight in weights:
                weight.data.copy_(mean)
    return weights[0].detach()


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)],
    ids=["momentum", "adam"],
)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_equals_manual_averaging(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], n: int) -> None:
    found = run_ranks(lambda comm: trained(comm, make, n), 3)
    assert all(torch.equal(found[0], other) for other in found)
    assert (found[0] - alone(make, n, 3)).abs().max() < 1e-12


def test_one_step_of_sgd_is_synchronous_sgd() -> None:
    def program(comm: un.Communicator) -> float:
        ways = []
        for synchronous in (False, True):
            weight = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)
            local = LocalSGD([weight], comm, every=1)
            for step in range(5):
                optimizer.zero_grad()
                (weight * (comm.rank + step)).sin().sum().backward()
                if synchronous:
                    un.average_gradients([weight], comm)
                optimizer.step()
                if not synchronous:
                    local.step()
            ways.append(weight.detach())
        return float((ways[0] - ways[1]).abs().max())

    assert max(run_ranks(program, 3)) < 1e-12


def test_optimizer_state_is_averaged_on_request() -> None:
    def program(comm: un.Communicator, average_state: bool) -> tuple[list[float], float]:
        weight = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.Adam([weight], betas=(0.5, 0.5))
        local = LocalSGD([weight], comm, every=1, average_state=average_state)
        local.attach(optimizer)
        weight.grad = torch.full((2,), 2.0 * comm.rank)
        optimizer.step()
        state = optimizer.state[weight]
        return [state["exp_avg"][0].item(), state["exp_avg_sq"][1].item()], float(state["step"])

    assert run_ranks(program, 2, "thread", True) == [([0.5, 1.0], 1.0)] * 2
    assert run_ranks(program, 2, "thread", False) == [([0.0, 0.0], 1.0), ([1.0, 2.0], 1.0)]


def test_different_states_are_named() -> None:
    def program(comm: un.Communicator) -> None:
        first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
        optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
        local = LocalSGD([("first", first), ("second", second)], comm, every=1, average_state=True)
        local.attach(optimizer)
        first.grad = torch.ones(2)
        second.grad = torch.ones(2) if comm.rank else None
        optimizer.step()

    errors = run_ranks(program, 3, on_failure="continue")
    for error in errors:
        assert isinstance(error, MismatchError)
        assert "['second.momentum_buffer']: rank 0: not there; ranks 1, 2: 'float32 (2,)" in str(error)


def test_averaged_state_needs_an_attached_optimizer() -> None:
    def program(comm: un.Communicator) -> None:
        local = LocalSGD([torch.zeros(2)], comm, average_state=True)
        with pytest.raises(ValueError, match=r"call attach\(optimizer\)"):
            local.step()

    run_ranks(program, 1)


@pytest.mark.parametrize("backend", ["thread", "gloo"])
def test_averages_by_schedule_only(backend: str) -> None:
    def program(comm: un.Communicator) -> tuple[list[int], list[float]]:
        weight = torch.full((1,), float(comm.rank))
        local = LocalSGD([weight], comm, every=every(3, warmup=2))
        steps, held = [], []
        for step in range(1, 9):
            weight += comm.rank
            if local.step():
                steps.append(step)
            held.append(weight.item())
        return steps, held

    (steps, first), (_, second) = un.testing.pool(backend).run(program, size=2)
    assert steps == [1, 2, 5, 8]
    assert [step for step in range(1, 9) if first[step - 1] == second[step - 1]] == steps


def test_schedule_may_be_a_function_and_average_is_manual() -> None:
    def program(comm: un.Communicator) -> tuple[list[bool], float, float]:
        weight = torch.full((1,), float(comm.rank))
        local = LocalSGD([weight], comm, every=lambda step: math.log2(step).is_integer())
        done = [local.step() for _ in range(8)]
        weight += comm.rank
        before = weight.item()
        local.average()
        return done, before, weight.item()

    first, second = run_ranks(program, 2)
    assert first == ([True, True, False, True, False, False, False, True], 0.5, 1.0)
    assert second[1:] == (1.5, 1.0)


def test_step_count_resumes() -> None:
    def program(comm: un.Communicator) -> list[bool]:
        weight = torch.zeros(1)
        old, new = LocalSGD([weight], comm, every=4), LocalSGD([weight], comm, every=4)
        for _ in range(3):
            old.step()
        new.load_state_dict(old.state_dict())
        return [new.step() for _ in range(5)]

    assert run_ranks(program, 2) == [[True, False, False, False, True]] * 2


def test_attach_ends_with_its_handle_and_with_close() -> None:
    def program(comm: un.Communicator) -> list[int]:
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.ones(1)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        local = LocalSGD([weight], comm)
        counts = []
        handle = local.attach(optimizer)
        with pytest.raises(ValueError, match="attached already"):
            local.attach(optimizer)
        optimizer.step()
        counts.append(local.steps)
        handle.remove()
        optimizer.step()
        counts.append(local.steps)
        local.attach(optimizer)
        optimizer.step()
        counts.append(local.steps)
        local.close()
        local.close()
        optimizer.step()
        counts.append(local.steps)
        with pytest.raises(ClosedError):
            local.average()
        comm.barrier()
        return counts

    assert run_ranks(program, 2) == [[1, 1, 2, 2]] * 2


def test_messages_are_separate_from_the_callers() -> None:
    def program(comm: un.Communicator) -> tuple[float, float]:
        weight, own = torch.full((3,), float(comm.rank)), torch.ones(1000)
        local = LocalSGD([weight], comm, every=1)
        if comm.rank:
            work = comm.all_reduce(own, async_op=True)
            local.step()
        else:
            local.step()
            work = comm.all_reduce(own, async_op=True)
        work.wait()
        return weight[0].item(), own[-1].item()

    assert run_ranks(program, 2) == [(0.5, 2.0)] * 2


class Mortal(Wrapper):
    """Ends this rank when it has sent some batches, of those that it still may send."""

    left: int | None = None

    def __init__(self, inner: Transport, whole: Mortal | None = None) -> None:
        super().__init__(inner)
        self.whole = whole or self

    def wrap_child(self, inner: Transport) -> Mortal:
        return Mortal(inner, self.whole)

    def post(self, batch: Sequence[Message]) -> Work:
        if self.whole.left is not None:
            if not self.whole.left:
                raise KeyError("this rank is gone")
            self.whole.left -= 1
        return super().post(batch)


@pytest.mark.parametrize("make", [LocalSGD, Gossip])
def test_parameters_keep_their_values_in_an_average_that_fails(make: Callable[..., LocalSGD | Gossip]) -> None:
    """A ring adds up the parts of a message on their way; of ranks that go on, none may keep such sums."""
    transports: list[Mortal] = []

    def mortal(inner: Transport) -> Transport:
        transports.append(Mortal(inner))
        return transports[-1]

    def program(comm: un.Communicator, batches: int) -> set[float]:
        # One tensor, so that the message needs no copy, of so many elements that it is sent in parts.
        weight = torch.full((400_000,), comm.rank + 1.0)
        averager = make([weight], comm)
        comm.barrier()
        mine = next(each for each in transports if each.rank == comm.rank)
        mine.left = batches if comm.rank == 2 else None
        try:
            with suppress(PeerLostError):
                averager.average()
        finally:
            # The rank has to close its communicators in any case.
            mine.left = None
        return set(weight.unique().tolist())

    seen = set()
    for batches in range(4):
        transports.clear()
        first, second, third = run_ranks(program, 3, "thread", batches, wrap=mortal, on_failure="continue")
        assert first in ({1.0}, {2.0})
        assert second == {2.0}
        seen.add(isinstance(third, KeyError))
    assert seen == {False, True}
