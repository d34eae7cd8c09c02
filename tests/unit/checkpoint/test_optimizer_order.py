"""States of optimizers go to the parameters of the same names, whatever their order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import short
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import unisono as un
from unisono.checkpoint import StateError


class Twins(nn.Module):
    """Layers of equal shapes, so that a state of the wrong one would load; `order` is that of their creation."""

    def __init__(self, order: Sequence[str] = "abc") -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(2, 2, bias=False))
            nn.init.ones_(self.get_parameter(f"{name}.weight"))


def number_of(name: str) -> float:
    return float("abcdefgh".index(name.split(".")[-2]) + 1)


def stepped(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """One step, in which each parameter has a gradient that tells its name."""
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, number_of(name))
    optimizer.step()
    return optimizer


def momenta(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    return {
        name: float(optimizer.state[parameter]["momentum_buffer"].flatten()[0])
        for name, parameter in model.named_parameters()
    }


def expected(model: nn.Module) -> dict[str, float]:
    return {name: number_of(name) for name, _ in model.named_parameters()}


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def named(model: nn.Module) -> list[Any]:
    return list(model.named_parameters())


def plain(model: nn.Module) -> list[Any]:
    return list(model.parameters())


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("turn", [1, 2])
def test_named_parameters_in_another_order(tmp_path: Path, beside: bool, turn: int) -> None:
    model = Twins()
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, momentum(named(model)))})
    pairs = named(model)
    other = momentum(pairs[turn:] + pairs[:turn])
    un.checkpoint.load(tmp_path, {"optimizer": other} | ({"model": model} if beside else {}))
    assert momenta(model, other) == expected(model)
    assert other.param_groups[0]["param_names"] == [name for name, _ in pairs[turn:] + pairs[:turn]]


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_unnamed_parameters_by_the_model_beside_them(tmp_path: Path, first: str) -> None:
    model = Twins()
    state = {"model": model, "optimizer": stepped(model, momentum(plain(model)))}
    un.checkpoint.save(tmp_path, state if first == "model" else dict(reversed(state.items())))
    fresh = Twins("cab")
    restored = momentum(plain(fresh))
    un.checkpoint.load(tmp_path, {"optimizer": restored, "model": fresh})
    assert momenta(fresh, restored) == expected(fresh)
    assert torch.equal(fresh.a.weight, model.a.weight)


@pytest.mark.parametrize(("save", "load"), [(named, plain), (plain, named)])
def test_names_on_one_side_and_a_model_on_the_other(tmp_path: Path, save: Any, load: Any) -> None:
    """Wrapped models, too: their names begin with `module.`."""
    for wrapped in (False, True):
        model, fresh = (
            nn.ModuleDict({"module": Twins(order)}) if wrapped else Twins(order) for order in ("abc", "bca")
        )
        un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, momentum(save(model)))})
        restored = momentum(load(fresh))
        un.checkpoint.load(tmp_path, {"model": fresh, "optimizer": restored})
        assert momenta(fresh, restored) == expected(fresh)


def test_wrappers_do_not_count_in_names(tmp_path: Path) -> None:
    model = Twins()
    wrapped = [(f"module.{name}", parameter) for name, parameter in model.named_parameters()]
    un.checkpoint.save(tmp_path, {"optimizer": stepped(model, momentum(wrapped))})
    restored = momentum(reversed(named(model)))
    un.checkpoint.load(tmp_path, {"optimizer": restored})
    assert momenta(model, restored) == expected(model)


def test_many_parameters_in_another_order(tmp_path: Path) -> None:
    model = nn.ModuleList(Twins("abc") for _ in range(40))
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, momentum(plain(model)))})
    restored = momentum(reversed(plain(model)))
    un.checkpoint.load(tmp_path, {"model": model, "optimizer": restored})
    assert momenta(model, restored) == expected(model)


def test_groups_in_another_order(tmp_path: Path) -> None:
    model = Twins()
    a, b, c = plain(model)
    saved = SGD([{"params": [a], "lr": 1.0}, {"params": [b, c], "lr": 2.0}], momentum=0.9)
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, saved)})
    restored = SGD([{"params": [c, b]}, {"params": [a]}], lr=5.0, momentum=0.9)
    un.checkpoint.load(tmp_path, {"model": model, "optimizer": restored})
    assert momenta(model, restored) == expected(model)
    assert [group["lr"] for group in restored.param_groups] == [2.0, 1.0]
    mixed = SGD([{"params": [c]}, {"params": [a, b]}], lr=5.0, momentum=0.9)
    with pytest.raises(StateError, match="'optimizer' has other parameters in a group here"):
        un.checkpoint.load(tmp_path, {"model": model, "optimizer": mixed})


def test_tied_parameters_have_one_name(tmp_path: Path) -> None:
    def tied(order: str) -> Twins:
        model = Twins(order)
        model.b.weight = model.a.weight
        return model

    model, fresh = tied("abc"), tied("cba")
    for save in (plain, named):
        un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, momentum(save(model)))})
        restored = momentum(plain(fresh))
        un.checkpoint.load(tmp_path, {"model": fresh, "optimizer": restored})
        assert momenta(fresh, restored) == {"c.weight": 3.0, "b.weight": 1.0}


def test_order_with_a_warning_where_names_are_unknown(tmp_path: Path) -> None:
    model = Twins()
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, momentum(plain(model)))})
    restored = momentum(plain(model))
    with pytest.warns(UserWarning, match=r"'optimizer' have no names.*: 0 and 1, both of shape \(2, 2\), could be"):
        un.checkpoint.load(tmp_path, {"optimizer": restored})
    assert momenta(model, restored) == expected(model)


def test_no_warning_where_nothing_could_be_swapped(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3)})
    un.checkpoint.save(tmp_path / "one", {"optimizer": stepped(model, momentum(plain(model)))})
    un.checkpoint.save(tmp_path / "two", {"optimizer": SGD(Twins().parameters(), lr=0.5)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        un.checkpoint.load(tmp_path / "one", {"optimizer": momentum(plain(model))})
        un.checkpoint.load(tmp_path / "two", {"optimizer": SGD(Twins().parameters(), lr=0.1)})


def test_order_with_other_shapes_is_an_error(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3)})
    un.checkpoint.save(tmp_path, {"optimizer": stepped(model, momentum(plain(model)))})
    with pytest.raises(StateError, match=r"'optimizer' has shape \(3, 2\) of parameter 0 in it, \(3,\) here"):
        un.checkpoint.load(tmp_path, {"optimizer": momentum(reversed(plain(model)))})


@pytest.mark.parametrize("names", [named, plain])
def test_other_parameters_are_an_error(tmp_path: Path, names: Any) -> None:
    model = Twins()
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": stepped(model, momentum(names(model)[:2]))})
    with pytest.raises(StateError, match=r"'optimizer' has other parameters in it than here: .*a.weight'.*c.weight'"):
        un.checkpoint.load(tmp_path, {"model": model, "optimizer": momentum(names(model)[1:])})


def test_lbfgs_in_another_order_is_an_error(tmp_path: Path) -> None:
    model = Twins()
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": torch.optim.LBFGS(named(model))})
    with pytest.raises(StateError, match="another order in it, which LBFGS cannot change"):
        un.checkpoint.load(tmp_path, {"model": model, "optimizer": torch.optim.LBFGS(reversed(named(model)))})


def test_names_go_before_numbers_on_all_ranks() -> None:
    def program(comm: un.Communicator) -> bool:
        model = Twins("abc" if comm.rank == 1 else "cab")
        optimizer = momentum(plain(model))
        if comm.rank == 1:
            stepped(model, optimizer)
        un.checkpoint.sync({"model": model, "optimizer": optimizer}, comm, src=1)
        return momenta(model, optimizer) == expected(model)

    assert all(un.launch(program, 3, "thread"))


SHARDED = ["plain", "one", "two", "three"]


def trained(kind: str, model: nn.Module, comm: un.Communicator, parameters: Any) -> tuple[Any, Any]:
    """A model and its optimizer, as a checkpoint takes them: plain, or sharded as ZeRO-1, 2 or 3."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    if kind == "plain":
        return model, SGD(parameters, **options)
    if kind == "three":
        sharded = un.sharding.ShardedModel(model, comm)
        return sharded, sharded.optimizer(SGD, parameters, elementwise=True, **options)
    stage = {"shard_gradients": kind == "two", "elementwise": True}
    return model, un.sharding.ShardedOptimizer(SGD, parameters, comm, **stage, **options)


def saved_and_loaded(comm: un.Communicator, path: str, save: str, load: str) -> Any:
    model = Twins()
    target, optimizer = trained(save, model, comm, list(model.parameters()))
    x = torch.ones(1, 2)
    (model.a(x) + 2 * model.b(x) + 3 * model.c(x)).sum().backward()
    optimizer.step()
    un.checkpoint.save(path, {"model": target, "optimizer": optimizer}, comm)
    fresh = Twins("cba")
    target, restored = trained(load, fresh, comm, [fresh.b.weight, fresh.c.weight, fresh.a.weight])
    un.checkpoint.load(path, {"model": target, "optimizer": restored}, comm)
    un.checkpoint.save(path, {"optimizer": restored}, comm)
    state = un.checkpoint.load(path, None, comm)["optimizer"]["state"]
    return [float(state[number]["momentum_buffer"].flatten()[0]) for number in range(3)]


# Each kind saves once and loads once: what lies between is a file.
@short("save, load", product(SHARDED, SHARDED), list(zip(SHARDED, SHARDED[1:] + SHARDED[:1], strict=True)))
def test_sharded_optimizers_go_by_names(tmp_path: Path, save: str, load: str) -> None:
    found = un.launch(saved_and_loaded, 2, "thread", (str(tmp_path / "c"), save, load))
    assert found == [[2.0, 3.0, 1.0]] * 2


def test_state_of_an_older_version_has_no_names(tmp_path: Path) -> None:
    """Written before optimizers were saved with the names of the tensors beside them."""
    model = Twins()
    optimizer = stepped(model, Adam(plain(model)))
    un.checkpoint.save(tmp_path, {"optimizer": optimizer.state_dict()})
    restored = Adam(plain(model))
    with pytest.warns(UserWarning, match="could be swapped"):
        un.checkpoint.load(tmp_path, {"optimizer": restored})
    for parameter in model.parameters():
        torch.testing.assert_close(restored.state[parameter], optimizer.state[parameter])
