"""Hooks of leaves run once in a backward pass over ranks, with the sum, as in a local one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from rpc_models import RAISING, Watch, alone, batch, behave, close, found, losses, on_rank_0, serve

import unisono as un
from unisono.rpc import autograd
from unisono.testing import pool, run_ranks


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


rpc = un.rpc


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
