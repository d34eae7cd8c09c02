"""Random graphs of differentiable collectives, run by ranks and by one process that holds all ranks' tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import unisono as un
from unisono import autograd as ag

WIDTH = 2
Rows = list[torch.Tensor]
"""One tensor a rank."""


def _reduced(xs: Rows, op: str) -> torch.Tensor:
    stacked = torch.stack(xs)
    by = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    return by[op](stacked, 0)


def _rooted(y: torch.Tensor, root: int, size: int) -> Rows:
    return [y if r == root else torch.zeros_like(y) for r in range(size)]


def _exchanged(xs: Rows, splits: Sequence[Sequence[int]]) -> Rows:
    parts = [x.split(list(sizes)) for x, sizes in zip(xs, splits, strict=True)]
    return [torch.cat([row[r] for row in parts]) for r in range(len(xs))]


def _columns(splits: Sequence[Sequence[int]], rank: int) -> list[int]:
    return [row[rank] for row in splits]


BY_RANKS: dict[str, Callable[[torch.Tensor, un.Communicator, Any], torch.Tensor]] = {
    "all_reduce": ag.all_reduce,
    "reduce": lambda x, comm, a: ag.reduce(x, comm, *a),
    "broadcast": ag.broadcast,
    "all_gather": lambda x, comm, _: torch.cat(ag.all_gather(x, comm)),
    "all_gather_v": lambda x, comm, rows: torch.cat(ag.all_gather_v(x[: rows[comm.rank]], comm)),
    "reduce_scatter": lambda x, comm, op: ag.reduce_scatter(x.unbind(), comm, op),
    "reduce_scatter of parts": lambda x, comm, sizes: ag.reduce_scatter(x.split(sizes), comm),
    "all_to_all": lambda x, comm, _: torch.stack(ag.all_to_all(x.unbind(), comm)),
    "all_to_all_v": lambda x, comm, splits: torch.cat(ag.all_to_all_v(x.split(splits[comm.rank]), comm)),
    "all_to_all_single": lambda x, comm, splits: ag.all_to_all_single(
        x, comm, _columns(splits, comm.rank), splits[comm.rank]
    ),
    "gather": lambda x, comm, root: torch.cat(ag.gather(x, comm, root)),
    "scatter": lambda x, comm, root: ag.scatter(x.unbind(), comm, root),
    "send": lambda x, comm, way: _messages(x, comm, *way),
}
"""What each rank calls, with an argument that is the same on all ranks."""

BY_ONE: dict[str, Callable[[Rows, Any], Rows]] = {
    "all_reduce": lambda xs, op: [_reduced(xs, op)] * len(xs),
    "reduce": lambda xs, a: _rooted(_reduced(xs, a[1]), a[0], len(xs)),
    "broadcast": lambda xs, root: [xs[root]] * len(xs),
    "all_gather": lambda xs, _: [torch.cat(xs)] * len(xs),
    "all_gather_v": lambda xs, rows: [torch.cat([x[:n] for x, n in zip(xs, rows, strict=True)])] * len(xs),
    "reduce_scatter": lambda xs, op: list(_reduced(xs, op).unbind()),
    "reduce_scatter of parts": lambda xs, sizes: list(_reduced(xs, "sum").split(sizes)),
    "all_to_all": lambda xs, _: list(torch.stack(xs, 1).unbind()),
    "all_to_all_v": _exchanged,
    "all_to_all_single": _exchanged,
    "gather": lambda xs, root: _rooted(torch.cat(xs), root, len(xs)),
    "scatter": lambda xs, root: list(xs[root].unbind()),
    "send": lambda xs, way: [xs[way[0]] if r == way[1] else 0 * x for r, x in enumerate(xs)],
}
"""The same on the tensors of all ranks, by torch's own functions."""


def _messages(x: torch.Tensor, comm: un.Communicator, src: int, dst: int) -> torch.Tensor:
    """Return what `src` sends on `dst`, and zeros on the other ranks."""
    if comm.rank == src:
        return 0 * x + ag.send(x, comm, dst).sum()
    return ag.recv(x, comm, src) if comm.rank == dst else 0 * x


def argument(name: str, size: int, chance: random.Random) -> Any:
    """Return a random argument of one collective."""
    rank = chance.randrange(size)
    splits = [sorted(chance.choices(range(size + 1), k=size - 1)) for _ in range(size)]
    cut = [[b - a for a, b in zip([0, *s], [*s, size], strict=True)] for s in splits]
    return {
        "all_reduce": chance.choice(["sum", "avg", "product", "min", "max"]),
        "reduce": (rank, chance.choice(["sum", "avg"])),
        "broadcast": rank,
        "all_gather_v": [chance.randint(0, size) for _ in range(size)],
        "reduce_scatter": chance.choice(["sum", "avg"]),
        "reduce_scatter of parts": cut[0],
        "all_to_all_v": cut,
        "all_to_all_single": cut,
        "gather": rank,
        "scatter": rank,
        "send": (rank, (rank + chance.randrange(1, size)) % size),
    }.get(name)


def graph(seed: int, size: int) -> list[tuple[str, Any, int, int]]:
    """Return the steps of a graph: a collective, its argument, and the values that it combines."""
    chance = random.Random(seed)
    names = [chance.choice(list(BY_RANKS)) for _ in range(chance.randint(2, 6))]
    return [
        (name, argument(name, size, chance), chance.randrange(2 + i), chance.randrange(2 + i))
        for i, name in enumerate(names)
    ]


def leaves(seed: int, size: int, rank: int) -> Rows:
    """Return a rank's inputs. Some elements are equal on several ranks, and some are zero."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(-2, 3, (2, size, WIDTH), generator=generator).double() / 2
    return [t.clone().requires_grad_() for t in values]


def fit(y: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor of a value's shape, no larger, in which each element depends on all of `y`."""
    n = y.numel()
    weights = torch.cos(torch.arange(size * WIDTH * n, dtype=torch.float64)).view(size * WIDTH, n)
    return (weights.to(y.dtype) @ y.reshape(-1) / max(n, 1)).view(size, WIDTH)


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return an operation of one rank on two values."""
    return torch.tanh(a) + a * b / 2


def loss(values: Rows, rank: int) -> torch.Tensor:
    """Return a rank's loss, which depends on all its values."""
    return sum((torch.sin(v * (1 + rank + i)).sum() for i, v in enumerate(values)), torch.zeros(()))


def run_by_ranks(comm: un.Communicator, seed: int) -> list[torch.Tensor]:
    """Return this rank's first gradients, and the gradients of the sum of their squares."""
    inputs = leaves(seed, comm.size, comm.rank)
    values = list(inputs)
    for name, given, i, j in graph(seed, comm.size):
        values.append(fit(BY_RANKS[name](combine(values[i], values[j]), comm, given), comm.size))
    first = torch.autograd.grad(loss(values, comm.rank), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)
    return [t.detach() for t in (*first, *second)]


def run_by_one(seed: int, size: int) -> list[list[torch.Tensor]]:
    """Return the same of every rank, computed without communication."""
    inputs = [leaves(seed, size, r) for r in range(size)]
    values = [list(row) for row in inputs]
    for name, given, i, j in graph(seed, size):
        results = BY_ONE[name]([combine(row[i], row[j]) for row in values], given)
        for row, y in zip(values, results, strict=True):
            row.append(fit(y, size))
    flat = [t for row in inputs for t in row]
    first = torch.autograd.grad(sum(loss(row, r) for r, row in enumerate(values)), flat, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), flat)
    pairs = zip(first, second, strict=True)
    found = [t.detach() for pair in pairs for t in pair]
    return [[*found[4 * r : 4 * r + 4 : 2], *found[4 * r + 1 : 4 * r + 4 : 2]] for r in range(size)]


def check_graphs(size: int, seeds: Sequence[int], backend: str = "thread") -> None:
    """Assert that ranks and one process compute the same gradients of each graph."""
    found = un.launch(lambda comm: [run_by_ranks(comm, seed) for seed in seeds], size, backend, timeout=20)
    for number, seed in enumerate(seeds):
        for rank, wanted in enumerate(run_by_one(seed, size)):
            for mine, other in zip(found[rank][number], wanted, strict=True):
                text = f"graph {seed} on rank {rank} of {size}: {graph(seed, size)}"
                torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11, msg=lambda m, t=text: f"{t}\n{m}")
