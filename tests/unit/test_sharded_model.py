"""ShardedModel: equal to one process with all ranks' samples, whatever the model does; and never read while freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_models import MODELS, batch, loss_of, made, trained
from torch import nn

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
