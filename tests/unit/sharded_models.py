"""Models for tests of sharded training, and their training without sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.checkpoint import checkpoint

import unisono as un
from unisono.sharding import ShardedModel

__all__ = ["MODELS", "Transformer", "batch", "loss_of", "made", "on_two", "simple", "trained", "trained_equally"]


class Block(nn.Module):
    """Transformer block with attention of torch, which uses a child's weight itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Language model; `how` is "plain", "reentrant" or "checkpoint"."""

    def __init__(self, how: str = "plain", *, width: int = 8, depth: int = 2, words: int = 11, tied: bool = True):
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x) if self.how == "plain" else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(self.norm(x))


def frozen() -> nn.Module:
    """Frozen whole blocks, and single frozen weights in front of trained ones."""
    model = Transformer(depth=3)
    model.blocks[1].requires_grad_(False)
    for block in (model.blocks[0], model.blocks[2]):
        block.attention.in_proj_weight.requires_grad_(False)
        block.mlp[0].weight.requires_grad_(False)
        block.second.requires_grad_(False)
    return model


class Odd(nn.Module):
    """Shared module, module called twice, unused module, empty and tiny parameters, buffers, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        shared = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(6, 6), shared)])
        self.twice, self.unused = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)

    def forward(self, words: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        x = self.embedding(words)
        for _ in range(2):
            for layer in self.layers:
                x = self.twice(layer(x)) * self.scale
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return {"logits": [self.head(relu(x)) + self.empty.sum()]}


class Convolutions(nn.Module):
    """Image model in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, (1, 3)))
        self.head = nn.Linear(3, 11)
        self.to(memory_format=torch.channels_last)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        images = words.double()[:, None, None, :].expand(-1, -1, 2, -1) / 10
        x = self.features(images.contiguous(memory_format=torch.channels_last))
        return self.head(x.flatten(2).transpose(1, 2)).expand(-1, -1, -1).repeat(1, 5, 1)[:, :5]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "untied": lambda: Transformer(tied=False),
    "reentrant": lambda: Transformer("reentrant"),
    "checkpoint": lambda: Transformer("checkpoint"),
    "frozen": frozen,
    "odd": Odd,
    "convolutions": Convolutions,
    "small": lambda: nn.Sequential(nn.Embedding(11, 1), nn.Linear(1, 11)),
}


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    out = model(words)
    logits = out["logits"][0] if isinstance(out, dict) else out
    return cross_entropy(logits.flatten(0, 1), words.roll(1, 1).flatten())


def trained(name: str, ranks: int, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of a model that one process trains with the batches of all ranks."""
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            loss = loss_of(model, batch(rank, step)) / ranks
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def trained_equally(model: nn.Module, given: torch.Tensor) -> bool:
    """Return whether two sharded ranks train a model as one process does."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            losses.append(model(given * (1 + step)).square().mean())
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses).detach()

    def program(comm: un.Communicator) -> torch.Tensor:
        mine = copy.deepcopy(model)
        return run(mine, ShardedModel(mine, comm).optimizer(torch.optim.SGD, lr=0.01, elementwise=True))

    found = un.launch(program, 2, "sim")
    wanted = run(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return all(torch.allclose(each, wanted, rtol=1e-12, atol=0) for each in found)


def simple(comm: un.Communicator, **options: Any) -> tuple[nn.Module, ShardedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    sharded = ShardedModel(model, comm, **options)
    return model, sharded, sharded.optimizer(torch.optim.SGD, lr=0.5, elementwise=True)


def on_two(program: Any, backend: str = "sim") -> list[Any]:
    return un.launch(program, 2, backend)
