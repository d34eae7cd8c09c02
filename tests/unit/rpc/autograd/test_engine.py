"""Backward passes across ranks: gradients of random graphs, contexts, passes and ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from rpc_functions import add
from rpc_graphs import (
    OPS,
    N,
    Step,
    begin,
    call,
    chosen,
    expected,
    gradients,
    loss_of,
    own_parameters,
    start_values,
    times,
)

import unisono as un
from unisono.errors import CommError
from unisono.rpc import autograd
from unisono.testing import pool, run_ranks

rpc = un.rpc


def program(comm: un.Communicator, plans: list[list[Step]]) -> Any:
    rpc.init(comm, timeout=50.0)
    begin(comm.rank)
    comm.barrier()
    results = []
    if comm.rank == 0:
        for steps in plans:
            with autograd.context() as context:
                values = leaves = start_values()
                for step in steps:
                    values = values + call(step, chosen(values, step))
                autograd.backward(context, [loss_of(values)])
                mine = autograd.get_gradients(context)
                grads = [[mine.get(leaf) for leaf in leaves]]
                grads += [rpc.rpc_sync(rank, gradients, (context,)) for rank in range(comm.size)]
                results.append(grads)
                assert all(parameter.grad is None for parameter in own_parameters())
    agent = rpc.context.current_agent()
    rpc.shutdown(timeout=50.0)
    return results, len(agent.contexts)


def compare(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            # What gets no gradient here may be a zero there: a path whose factor is not there at all.
            assert (mine is None) == (other is None) or not (mine if other is None else other).any()
            if mine is not None and other is not None:
                assert torch.allclose(mine, other, rtol=1e-6, atol=1e-6)


def steps_of(size: int) -> st.SearchStrategy[list[Step]]:
    ranks = st.integers(0, size - 1)
    step = st.tuples(
        st.lists(ranks, min_size=1, max_size=4).map(tuple),
        st.sampled_from(OPS),
        st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple),
        st.sampled_from(["sync", "async", "remote"]),
    )
    return st.lists(step, min_size=1, max_size=5)


plans_of = st.integers(2, 4).flatmap(
    lambda size: st.tuples(st.just(size), st.lists(steps_of(size), min_size=1, max_size=3))
)


@settings(max_examples=12, phases=[Phase.generate])
@given(plans_of)
def test_random_graphs(case: tuple[int, list[list[Step]]]) -> None:
    size, plans = case
    ends = run_ranks(program, size, "thread", plans)
    for found, steps in zip(ends[0][0], plans, strict=True):
        compare(found, expected(steps, size))
    assert not ends[0][1], "a context outlived its end"


@pytest.mark.soak
@given(plans_of)
def test_many_random_graphs(case: tuple[int, list[list[Step]]]) -> None:
    size, plans = case
    for found, steps in zip(run_ranks(program, size, "thread", plans)[0][0], plans, strict=True):
        compare(found, expected(steps, size))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_random_graphs_between_processes(backend: str) -> None:
    plans: list[list[Step]] = [
        [((1, 2, 0), "shared", (0, 1), "sync"), ((2, 1), "mix", (2, 0, 1), "remote"), ((1,), "drop", (3, 4), "async")],
        [((1, 0, 1, 2), "in place", (0, 1), "sync"), ((0, 1), "detach", (2, 3), "async")],
    ]
    for found, steps in zip(pool(backend).run(program, plans, size=3)[0][0], plans, strict=True):
        compare(found, expected(steps, 3))


@rpc.expose
@rpc.async_execution
def there_and_back(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The callback makes a remote call, too."""
    return rpc.rpc_async(0, add, (value,)).then(lambda first: rpc.rpc_sync(0, add, (3 * first.value(),)))


def test_callbacks_run_in_the_context_of_their_call() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=50.0)
        if comm.rank == 0:
            leaf = torch.ones(4, requires_grad=True)
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync(1, there_and_back, (leaf,)).sum()])
                assert autograd.get_gradients(context)[leaf].tolist() == [3.0] * 4
        rpc.shutdown(timeout=50.0)

    run_ranks(program, 2)


@rpc.expose
def doubled(value: torch.Tensor) -> torch.Tensor:
    value *= 2
    return value.pow(2).sum()


@pytest.mark.parametrize("length", [3, 5000])
def test_received_tensors_may_be_changed_in_place(length: int) -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=50.0)
        if comm.rank == 0:
            leaf = torch.arange(length, dtype=torch.float64).requires_grad_()
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync(1, doubled, (leaf,))])
                assert torch.equal(autograd.get_gradients(context)[leaf], 8 * leaf)
        rpc.shutdown(timeout=50.0)

    run_ranks(program, 2)


def test_sparse_tensors_have_a_history() -> None:
    def program(comm: un.Communicator) -> Any:
        rpc.init(comm)
        comm.barrier()
        gradient = None
        if comm.rank == 0:
            leaf = torch.eye(3).to_sparse().requires_grad_()
            with autograd.context() as context:
                doubled = rpc.rpc_sync(1, add, (leaf, leaf))
                autograd.backward(context, [torch.sparse.sum(doubled)])
                gradient = autograd.get_gradients(context)[leaf].to_dense()
        rpc.shutdown()
        return gradient

    assert torch.equal(run_ranks(program, 2)[0], 2 * torch.eye(3))


def test_gradients_of_two_leaves_do_not_share_memory() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=50.0)
        one, other = (torch.ones(3, requires_grad=True) for _ in range(2))
        for sent in (lambda x: x, lambda x: rpc.rpc_sync(0, add, (x,))):
            with autograd.context() as context:
                autograd.backward(context, [sent(one + other).sum()])
                found = autograd.get_gradients(context)
                # As clipping does.
                found[one].mul_(5)
                assert found[one].tolist() == [5.0] * 3
                assert found[other].tolist() == [1.0] * 3
        rpc.shutdown(timeout=50.0)

    run_ranks(program, 1)


def both_at_once(comm: un.Communicator) -> float:
    """Every rank has contexts of its own at the same time, over the same parameters."""
    rpc.init(comm, timeout=50.0)
    begin(comm.rank)
    comm.barrier()
    worst = []

    def one(number: int) -> None:
        factor = torch.full((N,), float(number + comm.rank + 1), dtype=torch.float64)
        peer = (comm.rank + 1) % comm.size
        with autograd.context() as context:
            loss = rpc.rpc_sync(peer, times, (factor,)).sum() + rpc.rpc_sync(comm.rank, times, (factor * 2,)).sum()
            autograd.backward(context, [loss])
            there = rpc.rpc_sync(peer, gradients, (context,))[0]
            here = gradients(context)[0]
            worst.append(max((there - factor).abs().max().item(), (here - 2 * factor).abs().max().item()))

    agent = rpc.context.current_agent()
    threads = [threading.Thread(target=_with, args=(agent, one, k)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 4
    rpc.shutdown(timeout=50.0)
    return max(worst)


def _with(agent: Any, action: Any, number: int) -> None:
    rpc.context.set_agent(agent)
    action(number)


@pytest.mark.parametrize("backend", ["thread", "shm"])
def test_contexts_are_separate(backend: str) -> None:
    assert max(pool(backend).run(both_at_once, size=3)) < 1e-12


def passes(comm: un.Communicator) -> Any:
    rpc.init(comm, timeout=50.0)
    begin(comm.rank)
    comm.barrier()
    results = None
    if comm.rank == 0:
        x = torch.ones(N, dtype=torch.float64, requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(1, times, (x,)).sum()
            autograd.backward(context, [loss], retain_graph=True)
            once = autograd.get_gradients(context)[x]
            autograd.backward(context, [loss])
            twice = autograd.get_gradients(context)[x]
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                autograd.backward(context, [loss])
        results = torch.equal(twice, 2 * once)
        with pytest.raises(CommError, match="no autograd context"):
            autograd.backward(context, [loss])
        with pytest.raises(CommError, match="no autograd context"):
            autograd.get_gradients(context)
        with autograd.context() as context:
            for wrong in ([x], x.sum(), [], [torch.ones(1)], 5, iter(())):
                with pytest.raises(ValueError, match="root"):
                    autograd.backward(context, wrong)  # type: ignore[arg-type]  # wrong or narrower on purpose
            for alien in ([None], [rpc.RRef(x.sum())]):
                with pytest.raises(TypeError, match=r"must be a tensor \(a loss\), not a"):
                    autograd.backward(context, alien)  # type: ignore[arg-type]  # wrong on purpose
            # Nothing crossed any rank.
            autograd.backward(context, [(x * x).sum(), x.sum()])
            assert torch.equal(autograd.get_gradients(context)[x], 2 * x + 1)
        # Without a context nothing is recorded.
        assert not rpc.rpc_sync(1, times, (x,)).requires_grad
    rpc.shutdown(timeout=50.0)
    return results


def test_consecutive_passes() -> None:
    assert run_ranks(passes, 2)[0] is True


def test_lost_rank_ends_the_pass() -> None:
    def program(comm: un.Communicator) -> Any:
        agent = rpc.init(comm)
        begin(comm.rank)
        comm.barrier()
        text = ""
        if comm.rank == 0:
            with autograd.context() as context:
                loss = rpc.rpc_sync(1, times, (torch.ones(N, dtype=torch.float64, requires_grad=True),)).sum()
                comm.barrier()
                started = time.monotonic()
                with pytest.raises(un.errors.PeerLostError) as caught:
                    autograd.backward(context, [loss])
                assert time.monotonic() - started < 10
                text = str(caught.value)
        else:
            comm.barrier()
            agent.close("it is a test")
        agent.shutdown(timeout=50.0)
        return text

    assert "rank 1" in run_ranks(program, 2)[0]
