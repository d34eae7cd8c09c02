"""The optimizer of parameters on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rpc_graphs import N, begin, locally, own_parameters, parameters, walk

import unisono as un
from unisono.errors import CommError
from unisono.rpc import autograd
from unisono.testing import run_ranks

rpc = un.rpc


class Fancy(torch.optim.Adagrad):
    """A user-defined optimizer."""


def steps_with(comm: un.Communicator, name: str, options: dict[str, Any]) -> Any:
    rpc.init(comm, timeout=20.0, expose=[read_parameters])
    begin(comm.rank)
    comm.barrier()
    found = None
    if comm.rank == 0:
        refs = [r for rank in range(comm.size) for r in rpc.rpc_sync(rank, references)]
        cls = Fancy if name == "Fancy" else getattr(torch.optim, name)
        optimizer = rpc.DistributedOptimizer(cls, refs, **options)
        for _ in range(3):
            with autograd.context() as context:
                x = torch.ones(N, dtype=torch.float64)
                loss = rpc.rpc_sync(1, walk, ((0,), "shared", [x]))[0].pow(2).sum()
                autograd.backward(context, [loss])
                optimizer.step(context)
        found = [rpc.rpc_sync(rank, read_parameters) for rank in range(comm.size)]
    rpc.shutdown(timeout=20.0)
    return found


@rpc.expose
def references() -> list[Any]:
    return [rpc.RRef(parameter) for parameter in own_parameters()]


@rpc.expose
def read_parameters() -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in own_parameters()]


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.05}), ("Fancy", {"lr": 0.3})],
)
def test_optimizer_equals_a_local_one(name: str, options: dict[str, Any]) -> None:
    found = run_ranks(steps_with, 2, "thread", name, options)[0]
    all_own = {rank: parameters(rank) for rank in range(2)}
    cls = Fancy if name == "Fancy" else getattr(torch.optim, name)
    optimizer = cls([p for own in all_own.values() for p in own], **options)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(N, dtype=torch.float64)
        locally((0,), "shared", [x], 1, all_own)[0].pow(2).sum().backward()
        optimizer.step()
    for rank in range(2):
        for mine, other in zip(found[rank], all_own[rank], strict=True):
            assert torch.allclose(mine, other, rtol=1e-9, atol=1e-9)


def test_optimizer_rejects_wrong_arguments() -> None:
    with un.init() as comm:
        rpc.init(comm)
        ref = rpc.RRef(torch.ones(2, requires_grad=True))
        with pytest.raises(TypeError, match="class of torch optimizers"):
            rpc.DistributedOptimizer(dict, [ref])  # type: ignore[arg-type]  # wrong or narrower on purpose
        with pytest.raises(ValueError, match="no parameters"):
            rpc.DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
        with pytest.raises(ValueError, match="learning rate"):
            rpc.DistributedOptimizer(torch.optim.SGD, [ref], lr=-1.0)
        with pytest.raises(TypeError, match=r"LBFGS\.step .* needs a closure"):
            rpc.DistributedOptimizer(torch.optim.LBFGS, [ref])
        with pytest.raises(TypeError, match=r"RRefs.*not a Tensor"):
            rpc.DistributedOptimizer(torch.optim.SGD, [torch.ones(2)], lr=0.1)  # type: ignore[list-item]  # a mistake
        rpc.shutdown()


def test_step_after_the_context_is_an_error() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=20.0)
        w = torch.nn.Parameter(torch.ones(1))
        with pytest.raises(ValueError, match="no parameters"):
            rpc.DistributedOptimizer(torch.optim.SGD, iter([]), lr=0.1)
        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, (rpc.RRef(p) for p in [w]), lr=0.1)
        with autograd.context() as context:
            autograd.backward(context, [w * 1])
        for number in (context, context + 1, "context"):
            for use in (optimizer.step, autograd.get_gradients):
                with pytest.raises(CommError, match="no autograd context"):
                    use(number)
        assert w.item() == 1.0
        rpc.shutdown(timeout=20.0)

    run_ranks(program, 1)
