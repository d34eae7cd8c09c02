"""ShardedModel: equal to one process with all ranks' samples, whatever the model does; and never read while freed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from live_storages import LiveStorages
from sharded_models import MODELS, Transformer, batch, loss_of, made, trained
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import unisono as un
from unisono.sharding import ShardedModel
from unisono.testing import pool


STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    # Running statistics are of the samples of one rank.
    far = {k: (found[k] - v).abs().max().item() for k, v in wanted.items() if v.numel() and k not in STATISTICS}
    far = {k: v for k, v in far.items() if v > 1e-12}
    assert not far, far
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_that_of_one_process(name: str, ranks: int) -> None:
    def program(comm: un.Communicator) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = made(name)
        before = list(model.parameters())
        strides = [p.stride() for p in before]
        sharded = ShardedModel(model, comm)
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01, eps=1e-3)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, step))
            loss.backward()
            sharded.clip_grad_norm_(0.5)
            optimizer.step()
            losses.append(sum(comm.all_gather_object(loss.item())) / comm.size)
        sharded.remove()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert [p.stride() for p in model.parameters()] == strides
        return losses, model.state_dict()

    losses, wanted = trained(name, ranks)
    for found_losses, found in un.launch(program, ranks, "sim"):
        assert torch.allclose(torch.tensor(found_losses), torch.tensor(losses), rtol=1e-12, atol=0)
        assert close(found, wanted)


def test_memory_by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(call: Any) -> Any:
        def without_mode(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return call(*args, **options)

        return without_mode

    # A transport of threads holds tensors of other ranks.
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast"):
        monkeypatch.setattr(un.Communicator, name, unseen(getattr(un.Communicator, name)))

    def program(comm: un.Communicator) -> list[float]:
        model = Transformer(width=64, depth=4, words=60)
        n, u = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
        r, w, p = n - 4 * u, 4 * 64 * 64, comm.size
        words = torch.zeros(1, 1, dtype=torch.int64)
        with LiveStorages(model.parameters()) as live:
            sharded = ShardedModel(model, comm)
            ratios = [live.now() / 4 / (n / p)]
            optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(2):
                live.restart()
                loss = model(words).sum()
                ratios.append(live.peak / 4 / (n / p + r + u))
                live.restart()
                loss.backward()
                ratios.append(live.peak / 4 / (2 * n / p + (2 - 1 / p) * (r + u) + 2 * w))
                optimizer.step()
                optimizer.zero_grad()
            del loss
            ratios.append(live.now() / 4 / (n / p))
        return ratios

    for ranks in (1, 2, 4):
        for ratios in un.launch(program, ranks, "thread"):
            assert all(0.95 < ratio < 1.05 for ratio in ratios), ratios


def simple(comm: un.Communicator, **options: Any) -> tuple[nn.Module, ShardedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    sharded = ShardedModel(model, comm, **options)
    return model, sharded, sharded.optimizer(torch.optim.SGD, lr=0.5)


def on_two(program: Any, backend: str = "sim") -> list[Any]:
    return un.launch(program, 2, backend)


ACTIONS: dict[str, Any] = {
    "sum": lambda model: model[0].weight.sum(),
    "linear": lambda model: nn.functional.linear(torch.ones(1, 3), model[0].weight),
    "stack": lambda model: torch.stack([p.flatten()[0] for p in model.parameters()]),
    "data": lambda model: model[0].weight.data,
    "numpy": lambda model: model[0].weight.detach().numpy(),
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": copy.deepcopy,
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
