"""Random programs to record: each rank runs `program(comm, folder, seed)`, and returns all that it has computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono as un
from unisono.core.work import wait_any
from unisono.sharding import ShardedModel, ShardedOptimizer

__all__ = ["apart", "equal", "flipped", "model_of", "plain", "program", "weights"]

WIDTH = 6


def model_of(width: int = WIDTH) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def averager(comm: un.Communicator, plan: random.Random) -> Any:
    """Gradients are accumulated over some passes, with dropout."""
    model = model_of()
    passes = plan.randint(1, 3)
    handle = un.GradientAverager(model, comm, bucket_cap_mb=plan.choice([1e-4, 25]))
    for _ in range(plan.randint(1, 3)):
        for index in range(passes):
            loss = model(torch.randn(4, WIDTH)).square().mean() / passes
            if index + 1 < passes:
                with handle.no_sync():
                    loss.backward()
            else:
                loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    handle.remove()
    return weights(model)


def sharded_model(comm: un.Communicator, plan: random.Random) -> Any:
    model = model_of()
    sharded = ShardedModel(model, comm)
    optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01, elementwise=True)
    for _ in range(plan.randint(1, 3)):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    sharded.remove()
    return weights(model)


def sharded_optimizer(comm: un.Communicator, plan: random.Random) -> Any:
    model = model_of()
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, model, comm, lr=0.01, elementwise=True, shard_gradients=True, bucket_cap_mb=1e-3
    )
    for _ in range(plan.randint(1, 3)):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    return weights(model)


def messages(comm: un.Communicator, plan: random.Random) -> Any:
    """A ring of messages, some of them in flight while others are awaited."""
    tag = plan.randrange(3)
    mine = torch.randn(plan.randint(0, 9))
    received = torch.empty_like(mine)
    works = [comm.irecv(received, (comm.rank - 1) % comm.size, tag), comm.isend(mine, (comm.rank + 1) % comm.size, tag)]
    polls = 0
    while not works[0].is_completed():
        polls += 1
    for work in works:
        work.wait()
    return received, polls


def any_source(comm: un.Communicator, plan: random.Random) -> Any:
    """The first rank takes what comes; the order is that of time."""
    count = plan.randint(1, 4)
    if comm.rank > 0:
        for _ in range(count):
            comm.send(torch.randn(3), 0, 9)
        comm.barrier()
        return None
    found = []
    for _ in range(count * (comm.size - 1)):
        place = torch.empty(3)
        found.append((comm.recv(place, None, 9), place, comm.iprobe(tag=9)))
    comm.barrier()
    return found


def first_of(comm: un.Communicator, plan: random.Random) -> Any:
    """The first rank learns which of several messages was the first."""
    if comm.rank > 0:
        comm.send(torch.randn(2), 0, 5)
        comm.barrier()
        return None
    places = [torch.empty(2) for _ in range(comm.size - 1)]
    works = [comm.irecv(place, rank, 5) for rank, place in enumerate(places, 1)]
    first = wait_any(works)
    for work in works:
        work.wait()
    comm.barrier()
    return first, places


def objects(comm: un.Communicator, plan: random.Random) -> Any:
    everything = comm.all_gather_object({"rank": comm.rank, "noise": random.random(), "list": [1] * plan.randint(0, 5)})
    return everything, comm.broadcast_object(everything if comm.rank == 0 else None, 0)


def asynchronous(comm: un.Communicator, plan: random.Random) -> Any:
    tensors = [torch.randn(plan.choice([1, 50, 5000])) for _ in range(plan.randint(1, 4))]
    works = [comm.all_reduce(tensor, plan.choice(["sum", "avg", "max"]), async_op=True) for tensor in tensors]
    ended = [work.is_completed() for work in works]
    for work in works:
        work.wait()
    return tensors, ended


def collectives(comm: un.Communicator, plan: random.Random) -> Any:
    results: list[Any] = []
    for _ in range(plan.randint(1, 4)):
        x = torch.randn(comm.size * plan.choice([1, 3]), dtype=plan.choice([torch.float32, torch.float64]))
        kind = plan.randrange(4)
        if kind == 0:
            comm.all_reduce(x, algorithm=plan.choice([None, "ring"]))
        elif kind == 1:
            comm.broadcast(x, plan.randrange(comm.size))
        elif kind == 2:
            part = x.new_empty(x.numel() // comm.size)
            comm.reduce_scatter_single(part, x)
            x = part
        else:
            x = torch.cat(comm.all_gather_v(x[: plan.randint(0, 2) + comm.rank % 2]))
        results.append(x)
    return results


def subgroups(comm: un.Communicator, plan: random.Random) -> Any:
    with comm.split(comm.rank % 2, key=plan.choice([0, -comm.rank])) as part:
        x = torch.randn(4)
        part.all_reduce(x)
        comm.agree(plan.random(), "a number")
        comm.barrier()
        return part.rank, x


PARTS: list[Callable[[un.Communicator, random.Random], Any]] = [
    averager,
    sharded_model,
    sharded_optimizer,
    messages,
    any_source,
    first_of,
    objects,
    asynchronous,
    collectives,
    subgroups,
]


def program(comm: un.Communicator, folder: Path, seed: int) -> list[Any]:
    """Parts in a random order that is the same on all ranks; each rank's numbers are its own."""
    torch.manual_seed(1000 * seed + comm.rank)
    random.seed(1000 * seed + comm.rank)
    plan = random.Random(seed)
    with un.record(folder, comm):
        return [part(comm, plan) for part in plan.choices(PARTS, k=plan.randint(2, 5))]


def flipped(comm: un.Communicator, folder: Path, step: int | None) -> int:
    """Train; before one step the lowest bit of a weight of rank 1 changes. Returns the steps that were made."""
    torch.manual_seed(comm.rank)
    with un.record(folder, comm):
        model = model_of()
        un.GradientAverager(model, comm)
        for index in range(5):
            if index == step and comm.rank == 1:
                first = next(model.parameters()).data.view(torch.int32)
                first[0, 0] ^= 1 << 20
            model.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
    return 5


def apart(comm: un.Communicator, run: Callable[..., Any], *args: Any) -> Any:
    """Run a program on a communicator of its own, so that those of programs before do not matter."""
    with comm.dup() as own:
        return run(own, *args)


def plain(comm: un.Communicator, folder: Path | None) -> list[torch.Tensor]:
    """Sums of rounded numbers, on the fast path where there is one and none is recorded."""
    generator = torch.Generator().manual_seed(comm.rank)
    if folder is not None:
        un.record(folder, comm)
    tensors = [torch.randn(count, generator=generator) for count in (1, 7, 1000, 100_003)]
    for tensor in tensors:
        comm.all_reduce(tensor)
    return tensors


def equal(one: Any, other: Any) -> bool:
    """Return whether two results have the same bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)
