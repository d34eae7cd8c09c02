"""Hooks that average by a codec: its state belongs to parameters, whichever ranks use them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from averaged_models import Branches, batches, made
from torch import nn

import unisono as un
from unisono.compression import Codec


def flat(parts: Sequence[torch.Tensor | None], like: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([torch.zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(parts, like, strict=True)])


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("name", ["onebit", "topk"])
def test_residual_of_an_unused_parameter_is_kept(name: str, find_unused: bool) -> None:
    given = batches(2, 9)

    def program(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = made(Branches)
        parameters = list(model.parameters())
        codec = un.compression.error_feedback(name)
        averager = un.GradientAverager(model, comm, compression=codec, find_unused_parameters=find_unused)
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


@pytest.mark.parametrize("codec", [None, un.compression.error_feedback("onebit")])
def test_codec_state_of_other_buckets_is_rejected(codec: Codec | None) -> None:
    def program(comm: un.Communicator) -> str:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        states = []
        for cap in (0.00055, 0.0006):
            averager = un.GradientAverager(model, comm, compression=codec, bucket_cap_mb=cap)
            for state in states:
                try:
                    averager.load_state_dict(state)
                except ValueError as error:
                    return str(error)
            model(torch.ones(1, 8)).sum().backward()
            states.append(averager.state_dict())
            averager.remove()
        return str(states[1]["steps"])

    for said in un.launch(program, 2, "thread"):
        if codec is None:
            assert said == "2"
        else:
            assert "a bucket is '3.bias' to '2.weight' in the state, '3.bias' to '1.bias' in the averager" in said
