"""Models and optimizers: in place, as if training had never stopped; and only into what they fit."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import unisono as un
from unisono.checkpoint import RNG, StateError


class Pair(NamedTuple):
    first: Any
    second: Any


class Holder:
    """An object that keeps one value."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def trained(optimizer: type[torch.optim.Optimizer], steps: int, **options: Any) -> dict[str, Any]:
    """A model with all that belongs to its training."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer(model.parameters(), lr=0.1, **options)}
    state["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(state["optimizer"], [2, 3])
    state["average"] = torch.optim.swa_utils.AveragedModel(model)
    state["scaler"] = torch.amp.GradScaler("cpu")
    state |= {"rng": RNG(), "generator": torch.Generator().manual_seed(steps), "losses": [], "best": 0.0}
    for _ in range(steps):
        train(state)
    return state


def train(state: dict[str, Any]) -> None:
    loss = state["model"](torch.randn(8, 6)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["average"].update_parameters(state["model"])
    state["losses"].append(loss.item() + random.random() + float(torch.rand(1, generator=state["generator"])))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_training_resumes_exactly(tmp_path: Path, optimizer: Any, options: Any) -> None:
    state = trained(optimizer, 4, **options)
    un.checkpoint.save(tmp_path, state)
    for _ in range(3):
        train(state)
    for fresh in (trained(optimizer, 0, **options), trained(optimizer, 2, **options)):
        weight = fresh["model"][0].weight
        assert un.checkpoint.load(tmp_path, fresh) is fresh
        assert fresh["model"][0].weight is weight
        for _ in range(3):
            train(fresh)
        assert fresh["losses"] == state["losses"]
        for name, tensor in state["model"].state_dict().items():
            assert torch.equal(fresh["model"].state_dict()[name], tensor), name
        for name, tensor in state["average"].state_dict().items():
            assert torch.equal(fresh["average"].state_dict()[name], tensor), name


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_lbfgs_and_tied_weights(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 2])).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = make()
    step(model, optimizer)
    un.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, restored = make()
    un.checkpoint.load(tmp_path, {"model": other, "optimizer": restored})
    for both in ((model, optimizer), (other, restored)):
        step(*both)
    assert torch.equal(model[0].weight, other[0].weight)
    assert other[0].weight is other[1].weight


def test_wrong_model_changes_nothing(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"net": nn.Linear(3, 2), "step": 9})
    wrong = nn.Sequential(nn.Linear(3, 2))
    before = wrong[0].weight.clone()
    with pytest.raises(
        StateError, match=r"has 'net.bias', 'net.weight'|has 'net.weight', 'net.bias', which the state lacks"
    ):
        un.checkpoint.load(tmp_path, {"net": wrong})
    with pytest.raises(StateError, match=r"'net.weight' has shape \(2, 3\) in it, \(4, 3\) here"):
        un.checkpoint.load(tmp_path, {"net": nn.Linear(3, 4)})
    with pytest.raises(StateError, match="lacks 'optimizer', which the state has"):
        un.checkpoint.load(tmp_path, {"optimizer": torch.optim.SGD(wrong.parameters())})
    assert torch.equal(wrong[0].weight, before)
    target = {"net": nn.Linear(3, 2, bias=False), "step": 0}
    assert un.checkpoint.load(tmp_path, target, strict=False)["step"] == 9
    partial = {"step": 0}
    assert un.checkpoint.load(tmp_path, partial) == {"step": 9}


def test_optimizer_with_other_groups(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    un.checkpoint.save(tmp_path, {"optimizer": torch.optim.Adam(net.parameters())})
    other = torch.optim.Adam([{"params": [net.weight]}, {"params": [net.bias]}])
    with pytest.raises(StateError, match=r"groups of \[2\] parameters in it, of \[1, 1\] here"):
        un.checkpoint.load(tmp_path, {"optimizer": other})


def test_dtypes_are_converted_and_meta_modules_filled(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    un.checkpoint.save(tmp_path, net)
    double = un.checkpoint.load(tmp_path, nn.Linear(3, 2, dtype=torch.float64))
    assert torch.equal(double.weight, net.weight.double())
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    assert torch.equal(un.checkpoint.load(tmp_path, empty).weight, net.weight)
    assert isinstance(empty.weight, nn.Parameter)


def test_map_location(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"w": torch.ones(2)})
    asked = []

    def function(storage: Any, location: str) -> Any:
        asked.append(location)
        return storage

    for where in (None, "cpu", torch.device("cpu"), {"cuda:0": "cuda:1"}, function, lambda storage, location: None):
        assert un.checkpoint.load(tmp_path, map_location=where)["w"].device.type == "cpu"
    assert asked == ["cpu"]
    assert un.checkpoint.load(tmp_path, map_location="meta")["w"].is_meta
    assert un.checkpoint.load(tmp_path, map_location={"cpu": "meta"})["w"].is_meta


@pytest.mark.parametrize("where", [5, True, [], {"cpu": 5}, "nowhere", {"cpu": "nowhere"}], ids=str)
def test_invalid_map_location(tmp_path: Path, where: Any) -> None:
    """This includes states whose tensors exist already, so that none is created."""
    un.checkpoint.save(tmp_path, {"w": torch.ones(2)})
    for state in (None, {"w": torch.zeros(2)}):
        with pytest.raises((TypeError, ValueError), match=r"^map_location"):
            un.checkpoint.load(tmp_path, state, map_location=where)
        assert state is None or not state["w"].any()


@pytest.mark.parametrize("path", [None, 5, b"here", {"w": 1}], ids=str)
def test_invalid_path(path: Any) -> None:
    for call in (lambda: un.checkpoint.save(path, {}), lambda: un.checkpoint.load(path)):
        with pytest.raises(TypeError, match=r"a path must be a str, a pathlib\.Path or a storage, not a"):
            call()
    for use in (un.checkpoint.latest, un.checkpoint.verify, un.checkpoint.Checkpointer):
        with pytest.raises(TypeError, match="a path must be"):
            use(path)


class Adaptive(nn.Module):
    """Keeps more than tensors of known shapes, as modules with quantization do."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "before"),
    [
        (torch.arange(5, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)),
        (torch.arange(5), torch.zeros(5)),
        (torch.arange(5), {"amax": torch.zeros(2)}),
        ({"amax": torch.ones(3), "steps": 7}, {}),
        ([1, 2], None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_may_have_any_form(tmp_path: Path, saved: Any, before: Any, strict: bool, nested: bool) -> None:
    def wrapped(extra: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Adaptive(extra)) if nested else Adaptive(extra)

    model = wrapped(before)
    un.checkpoint.save(tmp_path, {"model": wrapped(saved)})
    un.checkpoint.load(tmp_path, {"model": model}, strict=strict)
    adaptive: Any = model[1] if isinstance(model, nn.Sequential) else model
    torch.testing.assert_close(adaptive.extra, saved)


@pytest.mark.parametrize("there", [(0, 0), [0, 0], Pair(0, 0), None])
@pytest.mark.parametrize("saved", [Pair([1], 2), ([1], 2), [[1], 2]], ids=["named", "tuple", "list"])
def test_objects_get_sequences_of_the_saved_type(tmp_path: Path, saved: Any, there: Any) -> None:
    """The type of the object's present value does not count."""
    holder = Holder(there)
    un.checkpoint.save(tmp_path, {"holder": Holder(saved)})
    un.checkpoint.load(tmp_path, {"holder": holder})
    assert (type(holder.kept), holder.kept) == (type(saved), saved)


@pytest.mark.parametrize("there", [defaultdict(int, k=1), OrderedDict(k=1), {"k": 1}])
@pytest.mark.parametrize("saved", [defaultdict(list, k=[2]), OrderedDict(k=[2])])
def test_objects_get_dicts_of_the_saved_type(tmp_path: Path, saved: Any, there: Any) -> None:
    holder = Holder(there)
    un.checkpoint.save(tmp_path, {"holder": Holder(saved)})
    un.checkpoint.load(tmp_path, {"holder": holder})
    assert (type(holder.kept), holder.kept) == (type(saved), saved)
    assert getattr(holder.kept, "default_factory", None) is getattr(saved, "default_factory", None)
