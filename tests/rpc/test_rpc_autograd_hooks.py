"""Hooks of leaves run once in a backward pass over ranks, with the sum, as in a local one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.rpc import autograd
from unisono.testing import pool, run_ranks

rpc = un.rpc

MODELS: dict[int, nn.Module] = {}
RAISING: dict[int, list[bool]] = {}
"""The model of each rank, and whether a hook of it raises."""


def made() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=numbers))
    return model


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def grads(model: nn.Module, gradients: dict[torch.Tensor, torch.Tensor]) -> list[torch.Tensor | None]:
    return [gradients.get(p) for p in model.parameters()]


def alone(*numbers: int, scale: float = 1.0) -> list[torch.Tensor]:
    """The gradients of one process for these batches."""
    model = made()
    for number in numbers:
        (model(batch(number)).square().mean() * scale).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def close(found: list[torch.Tensor | None], wanted: list[torch.Tensor]) -> bool:
    return all(a is not None and torch.allclose(a, b, 0, 1e-12) for a, b in zip(found, wanted, strict=True))


@rpc.expose
def forward(rank: int, number: int, anchor: torch.Tensor) -> torch.Tensor:
    """A loss; with the anchor it belongs to the caller's graph."""
    loss: torch.Tensor = MODELS[rank](batch(number)).square().mean()
    return loss + 0.0 * anchor


@rpc.expose
def found(rank: int, context: int) -> list[torch.Tensor | None]:
    return grads(MODELS[rank], autograd.get_gradients(context))


@rpc.expose
def behave(rank: int) -> None:
    RAISING[rank][0] = False


def losses(calls: list[tuple[int, int]]) -> torch.Tensor:
    anchor = torch.zeros((), dtype=torch.float64, requires_grad=True)
    futures = [rpc.rpc_async(rank, forward, (rank, number, anchor)) for rank, number in calls]
    return torch.stack([future.wait() for future in futures]).sum()


def serve(comm: un.Communicator, make: Callable[[], nn.Module] = made) -> nn.Module:
    """A model that the other ranks may call."""
    rpc.init(comm)
    MODELS[comm.rank] = make()
    return MODELS[comm.rank]


def on_rank_0(comm: un.Communicator, program: Callable[[], Any]) -> Any:
    comm.barrier()
    result = program() if comm.rank == 0 else None
    rpc.shutdown()
    return result


class Watch:
    """Gradients that the hooks of a parameter see."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.tensor_hook: list[torch.Tensor] = []
        self.post_hook: list[torch.Tensor] = []
        parameter.register_hook(self.tensor_hook.append)
        parameter.register_post_accumulate_grad_hook(self._after)

    def _after(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.post_hook.append(parameter.grad.clone())


@pytest.mark.parametrize("passes", [1, 2])
def test_hooks_receive_the_sum_of_all_messages_once_per_pass(passes: int) -> None:
    def program(comm: un.Communicator) -> Any:
        model = serve(comm)
        watches = [Watch(p) for p in model.parameters()]
        mine = torch.ones_like(next(model.parameters()))
        next(model.parameters()).grad = mine

        def train() -> list[torch.Tensor | None]:
            with autograd.context() as context:
                loss = losses([(1, 0), (1, 1), (1, 2)])
                for number in range(passes):
                    autograd.backward(context, [loss], retain_graph=number + 1 < passes)
                return rpc.rpc_sync(1, found, (1, context))

        result = on_rank_0(comm, train)
        kept = [p.grad for p in model.parameters()]
        assert kept[0] is mine
        assert kept[1:] == [None] * 3
        return result, [(w.tensor_hook, w.post_hook) for w in watches]

    (gradients, _), (_, seen) = run_ranks(program, 2)
    wanted = alone(0, 1, 2)
    assert close(gradients, [passes * grad for grad in wanted])
    for (by_tensor_hook, by_post_hook), grad in zip(seen, wanted, strict=True):
        assert len(by_tensor_hook) == len(by_post_hook) == passes
        assert close([*by_tensor_hook, *by_post_hook], [grad] * 2 * passes)


def test_hook_result_replaces_the_gradient() -> None:
    def program(comm: un.Communicator) -> Any:
        model = serve(comm)
        for p in model.parameters():
            p.register_hook(lambda grad: 10 * grad)

        def train() -> list[torch.Tensor | None]:
            with autograd.context() as context:
                autograd.backward(context, [losses([(1, 0), (1, 1)])])
                return rpc.rpc_sync(1, found, (1, context))

        return on_rank_0(comm, train)

    assert close(run_ranks(program, 2)[0], [10 * grad for grad in alone(0, 1)])


@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
def test_failed_pass_keeps_grads_and_hooks(kind: str) -> None:
    def program(comm: un.Communicator) -> Any:
        model = serve(comm)
        first, *_, last = model.parameters()
        last.grad = mine = torch.full_like(last, 7.0)
        raising = [comm.rank == 1]

        def hook(_: torch.Tensor) -> None:
            if raising[0]:
                raise KeyError("planned")

        if kind == "tensor":
            first.register_hook(hook)
        else:
            first.register_post_accumulate_grad_hook(hook)
        watch = Watch(last)

        def train() -> list[torch.Tensor | None]:
            with autograd.context() as context:
                loss = losses([(1, 0)])
                with pytest.raises(KeyError, match="planned"):
                    autograd.backward(context, [loss])
            rpc.rpc_sync(1, behave, (1,))
            with autograd.context() as context:
                autograd.backward(context, [losses([(1, 1)])])
                return rpc.rpc_sync(1, found, (1, context))

        RAISING[comm.rank] = raising
        result = on_rank_0(comm, train)
        assert last.grad is mine
        assert (last.grad == 7.0).all()
        return result, len(watch.tensor_hook)

    (gradients, _), (_, seen) = run_ranks(program, 2)
    assert close(gradients, alone(1))
    assert seen in (1, 2)


@pytest.mark.parametrize("calls", [[(1, 0), (2, 1)], [(1, 0), (1, 1), (2, 2), (2, 3)]], ids=["one call", "two calls"])
def test_ddp_models_agree_after_a_distributed_pass(calls: list[tuple[int, int]], tmp_path: Any) -> None:
    def program(comm: un.Communicator, path: str) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
        group = dist.new_group([1, 2])
        serve(comm, lambda: DistributedDataParallel(made(), process_group=group) if comm.rank else made())

        def train() -> list[list[torch.Tensor | None]]:
            with autograd.context() as context:
                autograd.backward(context, [losses(calls)])
                return [rpc.rpc_sync(rank, found, (rank, context)) for rank in (1, 2)]

        result = on_rank_0(comm, train)
        assert all(p.grad is None for p in MODELS[comm.rank].parameters())
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


def test_concurrent_contexts_are_separate_on_shared_parameters() -> None:
    def program(comm: un.Communicator) -> Any:
        model = serve(comm)
        watch = Watch(next(model.parameters()))
        results: list[Any] = [None] * 8

        def train(number: int) -> None:
            with autograd.context() as context:
                autograd.backward(context, [losses([(1, number), (1, number + 1)])])
                results[number] = rpc.rpc_sync(1, found, (1, context))

        comm.barrier()
        if comm.rank == 0:
            threads = [threading.Thread(target=train, args=(number,)) for number in range(len(results))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        rpc.shutdown()
        assert all(p.grad is None for p in model.parameters())
        return results, len(watch.post_hook)

    (results, _), (_, seen) = pool("shm", 3).run(program, size=2)
    assert seen == len(results)
    for number, result in enumerate(results):
        assert close(result, alone(number, number + 1))


def test_concurrent_local_backward_is_correct() -> None:
    def program(comm: un.Communicator) -> Any:
        model = serve(comm)
        # A Sequential's item is any module, whose weight is any attribute.
        model[0].weight.register_hook(lambda grad: 3 * grad)  # type: ignore[operator,union-attr]
        rounds = 60

        def train() -> list[list[torch.Tensor | None]]:
            results = []
            for _ in range(rounds):
                with autograd.context() as context:
                    autograd.backward(context, [losses([(1, 0), (1, 1)])])
                    results.append(rpc.rpc_sync(1, found, (1, context)))
            return results

        def train_locally() -> None:
            for _ in range(rounds):
                model(batch(9)).square().mean().backward()

        comm.barrier()
        result = train() if comm.rank == 0 else train_locally()
        rpc.shutdown()
        return result, [p.grad for p in model.parameters()], rounds

    (results, _, rounds), (_, local, _) = run_ranks(program, 2)

    def tripled(numbers: tuple[int, ...], times: int = 1) -> list[torch.Tensor]:
        first, *others = alone(*numbers)
        return [3 * times * first, *(times * other for other in others)]

    assert len(results) == rounds
    assert all(close(result, tripled((0, 1))) for result in results)
    assert all(torch.allclose(a, b, 1e-10) for a, b in zip(local, tripled((9,), rounds), strict=True))


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
