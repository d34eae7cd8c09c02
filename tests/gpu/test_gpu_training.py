"""Models on GPUs: averaged gradients are those of one process with all samples, by the averager and by torch's DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_devices import ALL, BACKWARD, CPU, GPU, NCCL, PAIRS, Place, listed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.compression import Codec
from unisono.testing.gradients import check_averages, check_shares

CODECS = ("bf16", "fp16", "int4", "int8", "onebit", "powersgd", "randomk", "topk")
STEPS, SAMPLES, WIDTH = 3, 8, 12
SLOW = [pytest.mark.soak]
TRAINED = listed(CPU, *BACKWARD)
CUDA_PAIRS = PAIRS if GPU == "cuda" else ()
"""Torch's own backends carry no other device."""

Weights = list[torch.Tensor]


def model_on(device: torch.device) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.to(device)


def samples(rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64, generator=generator).to(device)


def train(model: nn.Module, batches: torch.Tensor) -> Weights:
    """The weights after some steps, on the CPU. Torch's optimizers would import its compiler, which takes seconds."""
    for batch in batches:
        model.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return [parameter.detach().cpu() for parameter in model.parameters()]


def alone(size: int) -> Weights:
    cpu = torch.device("cpu")
    return train(model_on(cpu), torch.cat([samples(rank, cpu) for rank in range(size)], 1))


def check(found: list[Weights], size: int, tolerance: float = 1e-9) -> None:
    for rank, weights in enumerate(found):
        for mine, first, wanted in zip(weights, found[0], alone(size), strict=True):
            assert torch.equal(mine, first), f"rank {rank} has other bits than rank 0"
            assert torch.allclose(mine, wanted, tolerance, tolerance), (mine, wanted)


@pytest.mark.parametrize("place", TRAINED)
def test_averager_on_gpu(place: Place) -> None:
    def program(comm: un.Communicator) -> Weights:
        model = model_on(comm.device)
        un.GradientAverager(model, comm, bucket_cap_mb=0.001)
        return train(model, samples(comm.rank, comm.device))

    check(place.run(program), place.size)


@pytest.mark.gpu
def test_thread_ranks_that_share_a_device_are_refused() -> None:
    """Torch runs the backward passes of both in one thread, in which one would wait for the other."""

    def program(comm: un.Communicator) -> None:
        un.GradientAverager(model_on(comm.device), comm)

    with pytest.raises(ValueError, match=f"ranks 0 and 1 are threads of one process with parameters on {GPU}:0"):
        un.launch(program, 2, "thread", device=f"{GPU}:0")


@pytest.mark.parametrize("place", ALL)
def test_gradients_and_parameters_in_one_call(place: Place) -> None:
    def program(comm: un.Communicator) -> None:
        check_averages(un.average_gradients, comm)
        check_shares(un.broadcast_parameters, comm)

    place.run(program)


@pytest.mark.parametrize("place", TRAINED)
def test_codecs_on_gpu(place: Place) -> None:
    """All ranks hold equal, finite values. The conformance checks of codecs cover the loss."""

    def program(comm: un.Communicator, codec: str) -> Weights:
        model = model_on(comm.device)
        un.GradientAverager(model, comm, compression=codec)
        return train(model, samples(comm.rank, comm.device))

    for codec in CODECS:
        found = place.run(program, codec)
        assert all(weight.isfinite().all() for weight in found[0]), codec
        for weights in found:
            assert all(map(torch.equal, weights, found[0])), f"ranks hold different weights after {codec}"


def in_ddp(comm: un.Communicator, backend: str, store: str, codec: type[Codec] | None) -> Weights:
    import unisono.interop

    dist.init_process_group(backend, init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    try:
        ddp = DistributedDataParallel(model_on(comm.device))
        if codec is not None:
            ddp.register_comm_hook(None, unisono.interop.comm_hooks.averaging(codec, comm))
        return train(ddp, samples(comm.rank, comm.device))
    finally:
        dist.destroy_process_group()


def backend_of(place: Place) -> str:
    """Torch's name of it: tensors on GPUs have a backend of torch's beside unisono."""
    return "unisono" if place.device == "cpu" else f"cpu:unisono,cuda:{'nccl' if place.backend == 'nccl' else 'gloo'}"


@pytest.mark.parametrize("place", listed(CPU, *CUDA_PAIRS, *NCCL, on_cpu=SLOW))
def test_ddp_on_gpu(place: Place, tmp_path: Path) -> None:
    check(place.run(in_ddp, backend_of(place), str(tmp_path / "store"), None), place.size)


@pytest.mark.parametrize("place", listed(CPU, *CUDA_PAIRS, on_cpu=SLOW))
def test_ddp_with_a_codec(place: Place, tmp_path: Path) -> None:
    codec = un.compression.bf16
    check(place.run(in_ddp, backend_of(place), str(tmp_path / "store"), codec), place.size, tolerance=0.02)
