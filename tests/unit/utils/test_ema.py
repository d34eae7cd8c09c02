"""Averages of parameters, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono as un
from unisono.errors import MismatchError
from unisono.testing import run_ranks
from unisono.utils import EMA


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Conv1d(1, 2, 3), nn.Linear(2, 1, bias=False).double())
    model[2].weight.requires_grad_(False)
    step(model, 0)
    return model


@torch.no_grad()
def step(model: nn.Module, number: int) -> None:
    """Give every parameter and buffer values that are the same on all ranks."""
    source = torch.Generator().manual_seed(number)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, generator=source))
        else:
            tensor.fill_(number)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


def averaged(use_buffers: bool, steps: int) -> list[torch.Tensor]:
    """The values by torch, with whole numbers from the model."""
    model = model_of()
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    for number in range(1, steps + 1):
        step(model, number)
        reference.update_parameters(model)
    pairs = zip(reference.module.state_dict().values(), model.state_dict().values(), strict=True)
    return [one if one.is_floating_point() else other for one, other in pairs]


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_to_the_averaged_model_of_torch(size: int, use_buffers: bool) -> None:
    def program(comm: un.Communicator) -> list[torch.Tensor]:
        model = model_of()
        ema = EMA(model, 0.9, comm if size > 1 else None, use_buffers=use_buffers)
        for number in (1, 2, 3):
            step(model, number)
            ema.update()
        before = values(model)
        with ema.applied():
            found = values(model)
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        assert ema.n_averaged == 3
        return found

    expected = averaged(use_buffers, 3)
    for found in run_ranks(program, size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_each_rank_keeps_its_part_alone() -> None:
    def program(comm: un.Communicator) -> int:
        ema = EMA(nn.Linear(100, 10, bias=False), 0.9, comm)
        (shard,) = ema.state_dict()["average"].values()
        return int(shard.local.untyped_storage().nbytes())

    assert run_ranks(program, 4) == [1000] * 4


def test_half_precision_is_averaged_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    ema = EMA(model, 0.999)
    ema.update()
    nn.init.ones_(model.weight)
    for _ in range(1000):
        ema.update()
    # In bfloat16 it would stop long before.
    assert ema.state_dict()["average"]["weight"].item() == pytest.approx(1 - 0.999**1000, rel=1e-4)
    with ema.applied():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.item() == pytest.approx(1 - 0.999**1000, rel=1e-2)


@pytest.mark.parametrize(("saved", "loaded"), [(3, 2), (1, 3), (2, 1)])
def test_checkpoints_load_on_any_number_of_ranks(tmp_path: Path, saved: int, loaded: int) -> None:
    def run(comm: un.Communicator, first: int, last: int) -> list[torch.Tensor]:
        model = model_of()
        ema = EMA(model, 0.9, comm if comm.size > 1 else None)
        if first > 1:
            un.checkpoint.load(tmp_path, {"ema": ema}, comm)
        for number in range(first, last + 1):
            step(model, number)
            ema.update()
        if first == 1:
            un.checkpoint.save(tmp_path, {"ema": ema}, comm)
        with ema.applied():
            return values(model)

    run_ranks(lambda comm: run(comm, 1, 2), saved)
    for found in run_ranks(lambda comm: run(comm, 3, 4), loaded):
        assert all(torch.equal(a, b) for a, b in zip(found, averaged(False, 4), strict=True))
    assert un.checkpoint.verify(tmp_path).tensors["ema.average.0.weight"].shape == (5, 3)


def test_an_exception_inside_restores_the_parameters() -> None:
    model = nn.Linear(2, 1)
    ema = EMA(model, 0.5)
    nn.init.ones_(model.weight)

    def evaluate() -> None:
        with ema.applied():
            with pytest.raises(RuntimeError, match="update is called inside applied"):
                ema.update()
            with pytest.raises(RuntimeError, match="applied is called inside applied"), ema.applied():
                pass
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert torch.equal(model.weight, torch.ones(1, 2))
    ema.update()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="range"):
        EMA(nn.Linear(1, 1), 1.5)

    def program(comm: un.Communicator) -> None:
        with pytest.raises(MismatchError, match=r"'parameters of EMA', at \['weight'\]: rank 0: 'float32 \(1, 1\)"):
            EMA(nn.Linear(1 + comm.rank, 1), 0.5, comm)
        with pytest.raises(MismatchError, match=r"'settings of EMA', at \['decay'\]: rank 0: 0.5; rank 1: 0.6"):
            EMA(nn.Linear(1, 1), 0.5 + comm.rank / 10, comm)

    run_ranks(program, 2)


def test_state_of_another_model_or_number_of_ranks() -> None:
    states: list[Any] = run_ranks(lambda comm: EMA(nn.Linear(3, 2), 0.5, comm).state_dict(), 2)
    whole = EMA(nn.Linear(3, 2), 0.5).state_dict()

    def program(comm: un.Communicator) -> None:
        ema = EMA(nn.Linear(3, 2), 0.5, comm)
        ema.load_state_dict(whole)
        # Of 8 elements, each rank has 4.
        assert torch.equal(ema.state_dict()["average"]["bias"].local, whole["average"]["bias"][: 2 * comm.rank])
        with pytest.raises(ValueError, match="but this rank has TensorShard"):
            ema.load_state_dict(states[1 - comm.rank])

    run_ranks(program, 2)
    alone = EMA(nn.Linear(3, 2), 0.5)
    with pytest.raises(ValueError, match="this process needs all of it"):
        alone.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"is of shape \[2, 3\], not \[2, 4\]"):
        EMA(nn.Linear(4, 2), 0.5).load_state_dict(whole)
    with pytest.raises(ValueError, match=r"of another model: \['bias'\]"):
        EMA(nn.Linear(3, 2, bias=False), 0.5).load_state_dict(whole)


class Assigning(nn.Module):
    """A forward that assigns its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, value: float) -> None:
        self.mean = torch.full((1,), value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_replaced_tensors_are_followed(ranks: int) -> None:
    def program(comm: un.Communicator) -> list[float]:
        model = Assigning()
        ema = un.utils.EMA(model, 0.5, comm, use_buffers=True)
        for value in (2.0, 6.0):
            model.load_state_dict({"weight": torch.full((1,), value), "mean": torch.zeros(1)}, assign=True)
            model(value)
            ema.update()
        model.load_state_dict({"weight": torch.ones(1), "mean": torch.ones(1)}, assign=True)
        with ema.applied():
            averaged = [t.item() for t in model.state_dict().values()]
        return averaged + [t.item() for t in model.state_dict().values()]

    assert un.launch(program, ranks, "thread") == [[4.0, 4.0, 1.0, 1.0]] * ranks


def test_tensor_of_another_shape_is_refused() -> None:
    model = Assigning()
    ema = un.utils.EMA(model, 0.5)
    model.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"'weight' was of shape \[1\] .* and is of shape \[2\]"):
        ema.update()
    del model.weight
    with pytest.raises(RuntimeError, match=r"'weight' .* is not in the model"):
        ema.update()


def untie(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.ones(2, 2))


def resize(model: nn.Sequential) -> None:
    model[0].weight.data = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.append(nn.Linear(2, 2)), "'2.weight' has no average: it was added"),
        (untie, "'1.weight' has no average: it was added to the model, or untied"),
        (resize, r"'0.weight' was of shape \[2, 2\] when its average began, and is of shape \[3, 2\]"),
    ],
)
def test_changes_of_the_model_that_it_cannot_follow(change: Callable[[nn.Sequential], None], said: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    ema = EMA(model, 0.5)
    ema.update()
    model.register_buffer("mask", torch.ones(1))
    ema.update()
    change(model)
    with pytest.raises(RuntimeError, match=said):
        ema.update()
    with pytest.raises(RuntimeError, match=said), ema.applied():
        pass
