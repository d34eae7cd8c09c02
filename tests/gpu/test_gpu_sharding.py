"""Sharded training, mixed precision and batch statistics on GPUs equal one process with all samples."""

from __future__ import annotations

import pytest
import torch
from gpu_devices import BACKWARD, GPU, NCCL, Place, listed
from torch import nn

import unisono as un
from unisono.gradients.sync_batch_norm import convert_sync_batchnorm
from unisono.sharding import ShardedModel, ShardedOptimizer

PLACES = listed(*BACKWARD)
STEPS, SAMPLES, WIDTH = 3, 8, 12

Weights = list[torch.Tensor]


def model_on(device: torch.device, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.to(device)


def samples(rank: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64, generator=generator).to(device, dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def alone(size: int) -> Weights:
    cpu = torch.device("cpu")
    model = model_on(cpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    train(model, optimizer, torch.cat([samples(rank, cpu) for rank in range(size)], 1))
    return values(model)


def values(model: nn.Module) -> Weights:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def check(found: list[Weights], size: int) -> None:
    wanted = alone(size)
    for weights in found:
        for mine, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("place", PLACES)
def test_sharded_model_on_gpu(place: Place) -> None:
    def program(comm: un.Communicator) -> Weights:
        model = model_on(comm.device)
        sharded = ShardedModel(model, comm)
        train(model, sharded.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9), samples(comm.rank, comm.device))
        sharded.remove()
        return values(model)

    check(place.run(program), place.size)


@pytest.mark.parametrize("place", listed(*(Place(kind, 4, GPU) for kind in ("shm", "nccl")[: 1 + bool(NCCL)])))
def test_model_sharded_in_pairs_on_gpu(place: Place) -> None:
    """Ranks 0 and 1 hold a shard each, ranks 2 and 3 copies of them."""

    def program(comm: un.Communicator) -> Weights:
        model = model_on(comm.device)
        pair, copies = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        sharded = ShardedModel(model, comm, mesh=(copies, pair))
        train(model, sharded.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9), samples(comm.rank, comm.device))
        sharded.remove()
        return values(model)

    check(place.run(program), place.size)


@pytest.mark.parametrize("gradients", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize("place", PLACES)
def test_sharded_optimizer_on_gpu(place: Place, gradients: bool) -> None:
    def program(comm: un.Communicator) -> Weights:
        model = model_on(comm.device)
        if not gradients:
            un.GradientAverager(model, comm)
        how = {"shard_gradients": True, "bucket_cap_mb": 1e-3} if gradients else {}
        optimizer = ShardedOptimizer(torch.optim.SGD, model, comm, lr=0.05, momentum=0.9, **how)
        train(model, optimizer, samples(comm.rank, comm.device))
        return values(model)

    check(place.run(program), place.size)


@pytest.mark.parametrize("place", PLACES)
def test_mixed_precision_skips_a_step_on_all_ranks(place: Place) -> None:
    """One rank's gradients overflow: averaged, they are not finite anywhere, so that all scalers skip the step."""

    def program(comm: un.Communicator) -> tuple[float, Weights]:
        model = model_on(comm.device, torch.float32)
        un.GradientAverager(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scaler = torch.amp.GradScaler(comm.device.type, init_scale=1024.0)
        for step, batch in enumerate(samples(comm.rank, comm.device, torch.float32)):
            optimizer.zero_grad()
            with torch.autocast(comm.device.type, torch.bfloat16):
                loss = loss_of(model, batch)
            if step == 1 and comm.rank == comm.size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), values(model)

    found = place.run(program)
    for scale, weights in found:
        assert scale == 512.0
        assert all(weight.isfinite().all() for weight in weights)
        assert all(map(torch.equal, weights, found[0][1]))


@pytest.mark.parametrize("place", PLACES)
def test_batch_statistics_are_of_all_ranks(place: Place) -> None:
    def program(comm: un.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        norm = convert_sync_batchnorm(nn.BatchNorm1d(WIDTH).double().to(comm.device), comm)
        batch = samples(comm.rank, comm.device)[0]
        output = norm(batch)
        output.square().sum().backward()
        return output.detach().cpu(), norm.running_var.cpu()

    whole = nn.BatchNorm1d(WIDTH).double()
    cpu = torch.device("cpu")
    wanted = whole(torch.cat([samples(rank, cpu)[0] for rank in range(place.size)]))
    found = place.run(program)
    torch.testing.assert_close(torch.cat([output for output, _ in found]), wanted.detach())
    for _, variance in found:
        torch.testing.assert_close(variance, whole.running_var)


class Branches(nn.ModuleList):
    """Each part of the model runs on a stream of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        home, outputs = torch.accelerator.current_stream(x.device), []
        for branch in self:
            side = torch.Stream(device=x.device)
            side.wait_stream(home)
            with side:
                outputs.append(branch(x))
            home.wait_stream(side)
        return sum(outputs)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("place", listed(Place("thread", 1, GPU)))
def test_several_streams_in_a_step_are_refused(place: Place, kind: str) -> None:
    def program(comm: un.Communicator) -> str:
        model = Branches([nn.Linear(WIDTH, 1) for _ in range(3)]).to(comm.device)
        if kind == "model":
            ShardedModel(model, comm)
        else:
            ShardedOptimizer(torch.optim.SGD, model, comm, shard_gradients=True, lr=0.1)
        try:
            model(torch.ones(1, WIDTH, device=comm.device)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert "several streams in one step" in place.run(program)[0]


@pytest.mark.parametrize("place", PLACES)
def test_sharded_model_trains_on_another_stream(place: Place) -> None:
    def program(comm: un.Communicator) -> Weights:
        model = model_on(comm.device)
        sharded = ShardedModel(model, comm)
        optimizer, batches = sharded.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9), samples(comm.rank, comm.device)
        side = torch.Stream(device=comm.device)
        side.wait_stream(torch.accelerator.current_stream(comm.device))
        with side:
            train(model, optimizer, batches)
            sharded.remove()
            return values(model)

    check(place.run(program), place.size)
