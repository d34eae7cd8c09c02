"""Models for the tests of averaging, and what one process makes of all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Model = Callable[[], nn.Module]
TINY = {"bucket_cap_mb": 0.002, "first_bucket_mb": 0.0005}
"""So that a few numbers need several buckets."""


def made(make: Model, seed: int = 0) -> nn.Module:
    """The same model in each thread: the global generator belongs to all of them."""
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def batches(size: int, count: int, samples: int = 3, width: int = 6, seed: int = 1) -> list[list[torch.Tensor]]:
    """For each rank `count` batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(samples, width, generator=generator, dtype=torch.float64) for _ in range(count)]
        for _ in range(size)
    ]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().to_dense().clone() for p in model.parameters()]


def stepped(model: nn.Module, given: list[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    """The gradients after each batch's backward pass."""
    steps = []
    for batch in given:
        model.zero_grad()
        model(batch).square().mean().backward()
        steps.append(gradients(model))
    return steps


def same(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, 0, 1e-10))
        for a, b in zip(found, wanted, strict=True)
    )


class Net(nn.Module):
    """A stack whose forward can checkpoint, share and skip layers."""

    def __init__(self, *, reentrant: bool | None = None, shared: bool = False, skip: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 6)
        self.unused = nn.Linear(2, 2)
        self.reentrant, self.shared, self.skip = reentrant, shared, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = (lambda t: self.b(torch.tanh(self.b(t)))) if self.shared else self.b
        if self.reentrant is None:
            hidden = middle(torch.tanh(self.a(x)))
        else:
            x = x.clone().requires_grad_()
            hidden = checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=self.reentrant)
            hidden = checkpoint(middle, hidden, use_reentrant=self.reentrant)
            if self.shared:
                hidden = checkpoint(middle, hidden, use_reentrant=self.reentrant)
        out: torch.Tensor = self.c(torch.tanh(hidden))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x.view(-1, 3, 2))[0])
        return out


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 2), nn.Linear(8, 3)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.conv(x.view(-1, 1, 2, 3))).flatten(1))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.into = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.into(x.view(-1, 3, 2)))
        return out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(3))

    def double(self) -> Complex:
        self.bias.data = self.bias.data.double()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() + self.bias


class Branches(nn.Module):
    """Uses one of its branches, by the sign of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        branch = self.left if left else self.right
        out: torch.Tensor = branch(self.trunk(x))
        return out


MODELS: dict[str, Model] = {
    "plain": Net,
    "convolution, channels last": Convolutional,
    "recurrent": Recurrent,
    "attention": Attention,
    "complex and real": Complex,
    "checkpointed": lambda: Net(reentrant=False),
    "checkpointed, re-entrant": lambda: Net(reentrant=True),
    "shared": lambda: Net(shared=True),
    "shared and checkpointed, re-entrant": lambda: Net(reentrant=True, shared=True),
}


def wanted_of(make: Model, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """One process, all samples."""
    model = made(make)
    model(torch.cat(given)).square().mean().backward()
    return gradients(model)
