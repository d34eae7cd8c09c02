"""Data-parallel models and sparse gradients in a backward pass over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rpc_models import MODELS, alone, batch, close, found, losses, made, on_rank_0, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.rpc import autograd
from unisono.testing import pool, run_ranks

rpc = un.rpc


@pytest.mark.parametrize(
    "calls",
    [pytest.param([(1, 0), (2, 1)], marks=pytest.mark.soak), [(1, 0), (1, 1), (2, 2), (2, 3)]],
    ids=["one call", "two calls"],
)
def test_ddp_models_agree_after_a_distributed_pass(calls: list[tuple[int, int]], tmp_path: Any) -> None:
    def program(comm: un.Communicator, path: str) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
        group = dist.new_group([1, 2])
        model = serve(comm, lambda: DistributedDataParallel(made(), process_group=group) if comm.rank else made())

        def train() -> list[list[torch.Tensor | None]]:
            with autograd.context() as context:
                autograd.backward(context, [losses(calls)])
                return [rpc.rpc_sync(rank, found, (rank, context)) for rank in (1, 2)]

        result = on_rank_0(comm, train)
        assert all(p.grad is None for p in model.parameters())
        comm.barrier()
        dist.destroy_process_group()
        return result

    wanted = alone(*(number for _, number in calls), scale=0.5)
    first, second = pool("shm", 3).run(program, str(tmp_path / "store"))[0]
    assert close(first, wanted)
    assert close(second, wanted)


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_averager_works_in_distributed_and_local_passes(backend: str) -> None:
    def program(comm: un.Communicator) -> Any:
        model, local = serve(comm), None
        part = comm.split(0 if comm.rank == 0 else 1)
        un.GradientAverager(model, part)
        comm.barrier()

        def train() -> list[list[torch.Tensor | None]]:
            with autograd.context() as context:
                autograd.backward(context, [losses([(1, 0), (1, 1), (2, 2), (2, 3)])])
                return [rpc.rpc_sync(rank, found, (rank, context)) for rank in (1, 2)]

        result = train() if comm.rank == 0 else None
        comm.barrier()
        if comm.rank:
            assert all(p.grad is None for p in model.parameters())
            model(batch(comm.rank)).square().mean().backward()
            local = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        rpc.shutdown()
        return result, local

    (remote, _), *others = pool(backend, 3).run(program)
    for each in remote:
        assert close(each, alone(0, 1, 2, 3, scale=0.5))
    for _, local in others:
        assert close(local, alone(1, 2, scale=0.5))


def test_sparse_gradients_are_accumulated_sparsely() -> None:
    def program(comm: un.Communicator) -> Any:
        kinds: list[torch.layout] = []
        weight = next(serve(comm, lambda: nn.Embedding(6, 2, sparse=True).double()).parameters())
        weight.register_hook(lambda grad: kinds.append(grad.layout))

        def train() -> torch.Tensor:
            anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
            with autograd.context() as context:
                total = rpc.rpc_sync(1, looked_up, (1, anchor)) + rpc.rpc_sync(1, looked_up, (1, anchor))
                autograd.backward(context, [total])
                (gradient,) = rpc.rpc_sync(1, found_dense, (1, context))
                return gradient

        return on_rank_0(comm, train), kinds

    (gradient, _), (_, kinds) = run_ranks(program, 2)
    assert gradient.tolist() == [[0, 0], [2, 2], [0, 0], [4, 4], [0, 0], [0, 0]]
    assert kinds == [torch.sparse_coo]


@rpc.expose
def looked_up(rank: int, anchor: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = MODELS[rank](torch.tensor([1, 3, 3])).sum()
    return loss + anchor


@rpc.expose
def found_dense(rank: int, context: int) -> list[torch.Tensor]:
    return [grad.to_dense() for grad in autograd.get_gradients(context).values()]
