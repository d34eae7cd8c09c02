"""Modules that adapt what they load, objects that refuse it, and what either leaves behind."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairwise, short
from torch import nn

import unisono as un
from unisono.checkpoint import StateError
from unisono.testing import pool


class Growing(nn.Module):
    """Its buffer takes the size of the loaded one."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(2.0))
        self.register_buffer("seen", torch.arange(float(length)))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *rest)


class Renamed(nn.Module):
    """Once had its weight under another name."""

    def __init__(self, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.arange(6.0).view(2, 3)))
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")


class Turned(nn.Module):
    """Keeps its square weight as the transposed one of what was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).view(3, 3))
        self.register_load_state_dict_pre_hook(self._turn)

    def _turn(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()


class Forgiving(nn.Module):
    """Does not mind that a weight is missing."""

    def __init__(self, names: str = "ab") -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((2,), float(len(names)))))
        self.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())


class Fewer(nn.Module):
    """Drops what it does not know."""

    def __init__(self, names: str = "a") -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((2,), float(len(names)))))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name: state[name] for name in dict(self.named_parameters())}, strict, assign)


class Extra(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "poison":
            raise RuntimeError("no such table")
        self.extra = state


def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, 2))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "buffer that grows": (lambda: Growing(5), Growing),
    "key renamed by a hook": (lambda: Renamed("kernel"), Renamed),
    "value changed by a hook": (Turned, Turned),
    "missing key forgiven": (lambda: Forgiving("a"), Forgiving),
    "extra state": (lambda: Extra({"sizes": (1, 2)}), Extra),
    "old weight norm": (old_weight_norm, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
    "lazy": (lambda: nn.Linear(3, 2), lambda: nn.LazyLinear(2)),
}


def as_torch_loads(saved: nn.Module, target: nn.Module) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file))
    return target.state_dict()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pairwise(kind=KINDS, nested=[True, False], strict=[True, False])
def test_module_loads_as_torch_loads_it(tmp_path: Path, kind: str, nested: bool, strict: bool) -> None:
    def around(module: nn.Module) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), module) if nested else module

    make_saved, make_target = KINDS[kind]
    saved, target = around(make_saved()), around(make_target())
    expected = as_torch_loads(saved, copy.deepcopy(target))
    optimizer = torch.optim.Adam(saved.parameters())
    un.checkpoint.save(tmp_path, {"model": saved, "optimizer": optimizer, "step": 7})
    state = un.checkpoint.load(tmp_path, {"model": target, "step": 0}, strict=strict)
    assert state["step"] == 7
    torch.testing.assert_close(target.state_dict(), expected)


def test_module_with_a_load_of_its_own(tmp_path: Path) -> None:
    saved, target = Fewer("abc"), Fewer("a")
    un.checkpoint.save(tmp_path, {"model": saved})
    un.checkpoint.load(tmp_path, {"model": target})
    assert torch.equal(target.a, saved.a)


@short("backend, ranks", product(["thread", "shm", "gloo"], [2, 3]), [("thread", 3), ("gloo", 2)])
def test_modules_adapt_on_all_ranks(tmp_path: Path, backend: str, ranks: int) -> None:
    found = pool(backend, 3).run(adapted, str(tmp_path / "c"), size=ranks)
    assert found == [([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0])] * ranks


def adapted(comm: un.Communicator, path: str) -> tuple[list[float], list[float]]:
    loaded, sent = Growing(), Growing(3 if comm.rank == 1 else 0)
    un.checkpoint.save(path, {"model": Growing(5)}, comm)
    un.checkpoint.load(path, {"model": loaded}, comm)
    un.checkpoint.sync({"model": sent}, comm, src=1)
    return loaded.seen.tolist(), sent.seen.tolist()


def test_batch_norm_of_old_times(tmp_path: Path) -> None:
    """It counted no batches; torch knows it by the missing version."""
    old = {name: value for name, value in nn.BatchNorm1d(3).state_dict().items() if name != "num_batches_tracked"}
    un.checkpoint.save(tmp_path, {"model": {name: value + 2 for name, value in old.items()}})
    target = nn.BatchNorm1d(3)
    un.checkpoint.load(tmp_path, {"model": target})
    assert target.weight.tolist() == [3, 3, 3]
    assert target.num_batches_tracked == 0
    un.checkpoint.save(tmp_path, {"model": {"weight": torch.ones(3), "bias": torch.ones(3)}})
    with pytest.raises(StateError, match=r"(?s)'model' refuses its state .*running_mean.*\nnothing else was changed"):
        un.checkpoint.load(tmp_path, {"model": target})
    assert target.weight.tolist() == [3, 3, 3]


@pytest.mark.parametrize("make", [Renamed, Forgiving, Growing, Extra])
def test_adaptive_module_that_does_not_fit_is_an_error_before_any_change(tmp_path: Path, make: Any) -> None:
    un.checkpoint.save(tmp_path, {"net": nn.Linear(3, 2), "model": nn.Linear(3, 2)})
    net, model = nn.Linear(3, 2), nn.Sequential(make())
    before = copy.deepcopy([net.state_dict(), model.state_dict()])
    with pytest.raises(StateError, match=r"(?s)'model' refuses its state .*Error: .*\nnothing else was changed"):
        un.checkpoint.load(tmp_path, {"net": net, "model": model})
    torch.testing.assert_close([net.state_dict(), model.state_dict()], before)


def test_tied_parameters_stay_tied_when_filled_from_meta(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(4, 3), nn.Sequential(nn.Linear(3, 4, bias=False)), Extra())
        model[1][0].weight = model[0].weight
        return model

    saved = tied()
    un.checkpoint.save(tmp_path, saved)
    with torch.device("meta"):
        target = tied()
    un.checkpoint.load(tmp_path, target)
    assert target[1][0].weight is target[0].weight
    assert torch.equal(target[0].weight, saved[0].weight)


# -- what refuses its state ----------------------------------------------------------------------
class Counter:
    """Refuses on request; its tensor is its own, not a copy."""

    def __init__(self, value: float, refuses: bool = False, length: int = 1) -> None:
        self.values, self.refuses = torch.full((length,), value), refuses

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise OverflowError("too much")
        self.values.copy_(state["values"])


class Refusing(torch.optim.SGD):
    def load_state_dict(self, state: Any) -> None:
        raise LookupError("of another task")


class RefusingSchedule(torch.optim.lr_scheduler.LambdaLR):
    def load_state_dict(self, state: Any) -> None:
        raise TypeError("of another shape")


REFUSALS: dict[str, Callable[[torch.optim.Optimizer], tuple[Any, Any]]] = {
    "scaler": lambda _: (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")),
    "counter": lambda _: (Counter(5.0), Counter(1.0, refuses=True)),
    "module": lambda _: (Extra("poison"), Extra()),
    "optimizer": lambda o: (o, Refusing(o.param_groups[0]["params"], momentum=0.9)),
    "scheduler": lambda o: (torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0), RefusingSchedule(o, lambda _: 1.0)),
}


def refused(comm: un.Communicator, path: str, kind: str, place: int, by_file: bool) -> Any:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved, target = REFUSALS[kind](optimizer)

    def state(counter: Counter, refusing: Any, step: int) -> dict[str, Any]:
        items = [("model", model), ("optimizer", optimizer), ("counter", counter), ("step", step)]
        items.insert(place, ("refusing", refusing if comm.rank == comm.size - 1 or not by_file else saved))
        return dict(items)

    if by_file:
        un.checkpoint.save(path, state(Counter(7.0), saved, 7), comm)
    nn.init.zeros_(model.weight)
    mine = state(Counter(1.0), target, 0)
    if not by_file and comm.rank == 0:
        mine = state(Counter(7.0), saved, 7)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    call = partial(un.checkpoint.load, path, mine, comm) if by_file else partial(un.checkpoint.sync, mine, comm)
    with pytest.raises(StateError, match=r"'refusing' refuses its state \(.*\)\nnothing else was changed") as caught:
        call()
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()], before)
    assert (float(mine["counter"].values), mine["step"]) == ((7.0, 7) if not by_file and comm.rank == 0 else (1.0, 0))
    # The module refuses on all ranks.
    first = comm.size - 1 if by_file and kind != "module" else 0 if by_file else 1
    return f"rank {first} of {comm.size}" in str(caught.value)


@pairwise(kind=REFUSALS, place=[0, 4], by_file=[True, False])
def test_nothing_is_half_loaded(tmp_path: Path, kind: str, place: int, by_file: bool) -> None:
    assert all(un.launch(refused, 3, "thread", (str(tmp_path / "c"), kind, place, by_file)))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_nothing_is_half_loaded_in_processes(tmp_path: Path, backend: str) -> None:
    assert all(pool(backend, 3).run(refused, str(tmp_path / "c"), "scaler", 4, True, size=2))


def test_large_object_that_refuses_says_what_was_changed(tmp_path: Path) -> None:
    length = (64 << 20) // 4 + 1
    un.checkpoint.save(tmp_path, {"w": torch.ones(2), "large": Counter(5.0, length=length)})
    w = torch.zeros(2)
    with pytest.raises(StateError, match=r"'large' refuses its state .*\nthe state is partly overwritten"):
        un.checkpoint.load(tmp_path, {"w": w, "large": Counter(0.0, True, length)})
    assert w.tolist() == [1, 1]


def test_state_of_an_object_shares_memory_with_a_model(tmp_path: Path) -> None:
    """The object's state is read aside, although its tensor is the model's."""
    model = nn.Linear(2, 2)
    counter = Counter(0.0)
    counter.values = model.bias.detach()
    un.checkpoint.save(tmp_path, {"model": model, "counter": counter})
    expected = model.bias.clone()
    nn.init.zeros_(model.bias)
    counter.refuses = True
    with pytest.raises(StateError, match="nothing else was changed"):
        un.checkpoint.load(tmp_path, {"model": model, "counter": counter})
    assert not model.bias.any()
    counter.refuses = False
    un.checkpoint.load(tmp_path, {"model": model, "counter": counter})
    assert torch.equal(model.bias, expected)
    assert torch.equal(counter.values, expected)


def test_damage_is_found_before_an_object_is_loaded(tmp_path: Path) -> None:
    un.checkpoint.save(tmp_path, {"counter": Counter(5.0), "w": torch.ones(3, dtype=torch.uint8)})
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    counter = Counter(1.0)
    with pytest.raises(un.checkpoint.CorruptError):
        un.checkpoint.load(tmp_path, {"counter": counter, "w": torch.zeros(3, dtype=torch.uint8)})
    assert counter.values == 1
