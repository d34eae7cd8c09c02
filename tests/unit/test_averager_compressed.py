"""Hooks that average by a codec: what it remembers belongs to parameters, whoever uses them when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from averaged_models import Branches, batches, made
from torch import nn

import unisono as un


def flat(parts: Sequence[torch.Tensor | None], like: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([torch.zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(parts, like, strict=True)])


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("name", ["onebit", "topk"])
def test_what_an_unused_parameter_is_owed_waits(name: str, find_unused: bool) -> None:
    given = batches(2, 9)

    def program(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = made(Branches)
        parameters = list(model.parameters())
        codec = un.compression.error_feedback(name)
        averager = un.GradientAverager(model, comm, compression=codec, find_unused=find_unused)
        used, mine = torch.zeros(2, sum(p.numel() for p in parameters), dtype=torch.float64)
        for step, batch in enumerate(given[comm.rank]):
            model.zero_grad()
            loss = model(batch, step % 3 == 0).square().sum()
            mine += flat(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True), parameters)
            loss.backward()
            used += flat([p.grad for p in parameters], parameters)
        order = [name for bucket in averager.buckets for name in bucket]
        assert len(averager.buckets) == 1
        owed = averager.state_dict()["codecs"][0]["residual"]
        pieces = dict(zip(order, owed.split([model.get_parameter(name).numel() for name in order]), strict=True))
        return used, mine, torch.cat([pieces[name] for name, _ in model.named_parameters()])

    (used, one, owed), (_, two, other) = un.launch(program, 2, "thread")
    torch.testing.assert_close(used + (owed + other) / 2, (one + two) / 2, rtol=0, atol=1e-10)
