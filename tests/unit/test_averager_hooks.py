"""Hooks that run in C are of use, and change nothing."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from averaged_models import TINY, batches, gradients, made, same, wanted_of
from torch import nn

import unisono as un
from unisono.compiled import part
from unisono.testing import pool

LAYERS = 4


class Turned(nn.Module):
    """The last layer comes first, so gradients come in another order than is expected of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(LAYERS)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            batch = torch.tanh(layer(batch))
        return batch


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_only_the_first_hook_of_a_pass_needs_python(backend: str) -> None:
    given = batches(2, 4)

    def program(comm: un.Communicator) -> tuple[list[int], list[list[torch.Tensor | None]]]:
        arrived, counts, found = un.GradientAverager._arrived, [], []

        def counting(self: un.GradientAverager, index: int, parameter: torch.Tensor) -> None:
            counts[-1] += 1
            arrived(self, index, parameter)

        with patch.object(un.GradientAverager, "_arrived", counting):
            model = made(Turned)
            averager = un.GradientAverager(model, comm, **TINY)
            for step, batch in enumerate(given[comm.rank]):
                counts.append(0)
                # The third step's gradients are averaged with the fourth's.
                if step != 3:
                    model.zero_grad()
                loss = model(batch).square().mean()
                if step == 2:
                    with averager.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                found.append(gradients(model))
            averager.remove()
        return counts, found

    # Where buckets travel while others fill, the first pass tells in which order gradients come.
    first = LAYERS if backend == "gloo" or part("Hook") is None else 1
    later = LAYERS if part("Hook") is None else 1
    wanted = [wanted_of(Turned, [given[rank][step] for rank in range(2)]) for step in range(4)]
    for counts, found in pool(backend, 3).run(program, size=2):
        assert counts == [first, later, LAYERS, later]
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])
        assert same(found[3], [a + b for a, b in zip(wanted[2], wanted[3], strict=True)])
