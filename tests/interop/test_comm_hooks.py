"""Codecs as DDP's communication hooks, on two ranks that have a gloo group of torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.interop import comm_hooks

Result = list[torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 1))


def train(ddp: DistributedDataParallel, steps: int, samples: int = 8) -> Result:
    """The last step's gradients, and the weights in the end."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        points = torch.randn(samples, 16, generator=generator)
        optimizer.zero_grad()
        (ddp(points) - points.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None] + [p.detach() for p in ddp.parameters()]


def hooked(comm: un.Communicator, codec: Any, cap_mb: float = 25) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=cap_mb)
    ddp.register_comm_hook(None, comm_hooks.averaging(codec, comm))
    return ddp


def fails(comm: un.Communicator) -> str:
    class Broken(un.compression.int8):
        def average(self, *args: Any) -> None:
            raise ValueError("no luck today")

    try:
        train(hooked(comm, Broken), 1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def closed(comm: un.Communicator) -> str:
    inner = comm.dup()
    ddp = hooked(inner, "bf16")
    inner.close()
    try:
        train(ddp, 1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def programs(comm: un.Communicator, store: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    feedback = un.compression.error_feedback
    ways: dict[str, Callable[[], Any]] = {
        "plain 1": lambda: train(DistributedDataParallel(model()), 1),
        "fp16 1": lambda: train(hooked(comm, un.compression.fp16), 1),
        "int8 buckets 1": lambda: train(hooked(comm, "int8", cap_mb=0.001), 1),
        "plain one sample": lambda: train(DistributedDataParallel(model()), 1, samples=1),
        "powersgd one sample": lambda: train(hooked(comm, un.compression.powersgd(rank=2)), 1, samples=1),
        "plain 60": lambda: train(DistributedDataParallel(model()), 60),
        "onebit 60": lambda: train(hooked(comm, feedback(un.compression.onebit), cap_mb=0.001), 60),
        "fails": lambda: fails(comm),
        "closed": lambda: closed(comm),
    }
    try:
        return {name: way() for name, way in ways.items()}
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store: Path = tmp_path_factory.mktemp("hooks") / "store"
    ranks: list[dict[str, Any]] = un.launch(programs, 2, "gloo", (str(store),), timeout=30)
    return ranks


def away(found: list[dict[str, Any]], name: str, other: str) -> float:
    """Return the relative difference of gradients."""
    a, b = (torch.cat([t.flatten() for t in found[0][way][:6]]) for way in (name, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ["fp16 1", "int8 buckets 1", "powersgd one sample", "onebit 60"])
def test_ranks_agree(found: list[dict[str, Any]], name: str) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found[0][name], found[1][name], strict=True))


def test_gradients_are_the_means(found: list[dict[str, Any]]) -> None:
    assert 0 < away(found, "fp16 1", "plain 1") < 1e-3
    assert 1e-4 < away(found, "int8 buckets 1", "plain 1") < 5e-2


def test_shapes_equal_those_of_the_parameters(found: list[dict[str, Any]]) -> None:
    # Of one sample a rank, each matrix of gradients is a sum of two products: powersgd of rank 2 loses nothing.
    assert away(found, "powersgd one sample", "plain one sample") < 1e-4


def test_training_with_feedback_converges(found: list[dict[str, Any]]) -> None:
    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    near, plain = (torch.cat([t.flatten() for t in found[0][way][6:]]) for way in ("onebit 60", "plain 60"))
    assert (near - plain).norm() < (plain - start).norm() / 2


def test_error_is_raised_by_backward(found: list[dict[str, Any]]) -> None:
    assert all("no luck today" in rank["fails"] for rank in found)
    assert all("keep it open as long as DDP trains" in rank["closed"] for rank in found)


def test_unknown_name_is_rejected_immediately() -> None:
    with un.init() as comm, pytest.raises(ValueError, match="unknown codec 'int9'; known: bf16"):
        comm_hooks.averaging("int9", comm)
