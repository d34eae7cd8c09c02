"""ShardedModel refuses what it would compute wrongly, on every rank, and never reads what is freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_models import on_two, simple
from torch import nn

import unisono as un
from unisono.errors import AbortedError
from unisono.sharding import ShardedModel
from unisono.testing import run_ranks

ACTIONS: dict[str, Any] = {
    "sum": lambda model: model[0].weight.sum(),
    "linear": lambda model: nn.functional.linear(torch.ones(1, 3), model[0].weight),
    "stack": lambda model: torch.stack([p.flatten()[0] for p in model.parameters()]),
    "data": lambda model: model[0].weight.data,
    "numpy": lambda model: model[0].weight.detach().numpy(),
    "state_dict": lambda model: model.state_dict(),
    "to": lambda model: model.to(torch.float64),
    "share_memory": lambda model: model.share_memory(),
    "item": lambda model: float(model[3].bias),
    "grad": lambda model: model[0].weight.grad,
    "zero_grad": lambda model: model.zero_grad(),
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "torch optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_freed_parameter_is_not_read(action: str, when: str) -> None:
    def program(comm: un.Communicator) -> str:
        model, _, optimizer = simple(comm)
        if when == "after":
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        weight = model[0].weight
        assert (weight.shape, weight.dtype, weight.requires_grad, weight.numel()) == ((4, 3), torch.float32, True, 12)
        with pytest.raises(RuntimeError) as caught:
            ACTIONS[action](model)
        return str(caught.value)

    for message in un.launch(program, 1, "thread"):
        assert "its model is sharded" in message
        assert "'0.weight'" in message or "'3.bias'" in message


def test_ranks_that_use_other_units_or_parameters_raise() -> None:
    def program(comm: un.Communicator) -> list[str]:
        model, _, _ = simple(comm)
        caught = []
        for modules in ([model[0], model[1 + comm.rank], model[3]], [model[0], model[3]] if comm.rank else [model[0]]):
            with pytest.raises(un.CommError) as error:
                nn.Sequential(*modules)(torch.ones(1, 3)).sum().backward()
            caught.append(type(error.value).__name__)
        for p in (model[1].weight, model[2].weight):
            p.requires_grad_(p is model[1].weight or comm.rank == 0)
        with pytest.raises(un.errors.MismatchError, match=r"only some ranks have a gradient of '2.weight'"):
            model(torch.ones(1, 3)).sum().backward()
        return caught

    assert all("MismatchError" in caught[0] for caught in on_two(program))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_on_one_rank_ends_on_all(where: str) -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, _ = simple(comm)
        failing = comm.rank == 1

        def fail(*_: Any) -> None:
            if failing:
                raise KeyError("data")

        model[2].register_forward_hook(
            lambda _m, _given, out: fail() if where == "forward" else out.register_hook(fail) and None
        )
        x = torch.full((1, 3), 1.0 + comm.rank)
        with pytest.raises(KeyError if failing else un.errors.AbortedError):
            model(x).sum().backward()
        assert all(type(p).__name__ == "FreedParameter" for p in model.parameters())
        failing = False
        model(x).sum().backward()
        found = sharded.clip_grad_norm_(1e9)
        another, again, _ = simple(comm)
        another(x).sum().backward()
        return torch.equal(found, again.clip_grad_norm_(1e9))

    assert on_two(program) == [True, True]


def test_ranks_with_other_options_raise() -> None:
    def program(comm: un.Communicator) -> bool:
        model, sharded, optimizer = simple(comm)
        kept = [shard.local.clone() for shard in sharded.state_dict().values()]
        other = sharded.optimizer(torch.optim.Adam if comm.rank else torch.optim.SGD, lr=0.5, elementwise=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        optimizer.param_groups[0]["lr"] += comm.rank
        with pytest.raises(RuntimeError, match="GradScaler finds no infinity"):
            scaler.step(optimizer)
        for wrong in (optimizer, other):
            with pytest.raises(un.errors.MismatchError, match="ranks differ in 'options of the groups', at "):
                wrong.step()
        same = [torch.equal(shard.local, old) for shard, old in zip(sharded.state_dict().values(), kept, strict=True)]
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        return all(same)

    assert on_two(program) == [True, True]


def test_averager_and_sharded_model_refuse_each_other() -> None:
    def program(comm: un.Communicator) -> list[str]:
        model = nn.Linear(2, 1)
        caught = []
        averager = un.GradientAverager(model, comm)
        with pytest.raises(ValueError, match="averaged by another GradientAverager") as error:
            ShardedModel(model, comm)
        caught.append(str(error.value))
        averager.remove()
        sharded = ShardedModel(model, comm)
        for make in (un.GradientAverager, ShardedModel):
            with pytest.raises(ValueError, match="sharded by another ShardedModel"):
                make(model, comm)
        sharded.remove()
        un.GradientAverager(model, comm).remove()
        return caught

    assert len(on_two(program)) == 2


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        (nn.ReLU(), {}, ValueError, "no parameters"),
        ([nn.Parameter(torch.ones(1))], {}, TypeError, "must be a module"),
        (nn.LazyLinear(2), {}, ValueError, "uninitialized"),
        (nn.Linear(1, 1), {"units": [nn.Conv1d]}, ValueError, "no module of the model is a unit"),
    ],
)
def test_unfit_models(model: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    def program(comm: un.Communicator) -> None:
        with pytest.raises(error, match=match):
            ShardedModel(model, comm, **options)

    un.launch(program, 1, "thread")


@pytest.mark.soak
def test_torch_compile_of_the_model_raises() -> None:
    def program(comm: un.Communicator) -> None:
        model, _, _ = simple(comm)
        with pytest.raises(RuntimeError, match=r"torch.compile cannot trace a ShardedModel's hooks"):
            torch.compile(model, backend="eager")(torch.ones(1, 3))

    un.launch(program, 1, "thread")


@pytest.mark.parametrize("how", ["replaced", "added"])
def test_parameters_that_are_not_sharded_are_named(how: str) -> None:
    def program(comm: un.Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ShardedModel(model, comm)
        model(torch.ones(1, 2)).sum().backward()
        model.append(nn.Linear(2, 2).requires_grad_(False))
        if comm.rank == 0 and how == "replaced":
            model[0].weight = nn.Parameter(torch.ones(2, 2))
        if comm.rank == 0 and how == "added":
            model.insert(0, nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()

    first, second = run_ranks(program, 2, on_failure="continue")
    assert isinstance(first, RuntimeError)
    assert "later, so its gradient is not averaged. Call remove(), and shard the changed model" in str(first)
    assert isinstance(second, AbortedError)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_model_is_refused_whole() -> None:
    model = torch.jit.script(nn.Linear(2, 1))

    def program(comm: un.Communicator) -> None:
        with pytest.raises(ValueError, match="a ScriptModule takes no hooks"):
            ShardedModel(model, comm)
        # Nothing was freed.
        model(torch.ones(1, 2))

    run_ranks(program, 1)
