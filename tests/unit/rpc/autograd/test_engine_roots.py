"""Roots of a distributed backward pass: losses of its own context, also by reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rpc_functions import echo
from rpc_graphs import N, begin, gradients, times

import unisono as un
from unisono.rpc import autograd
from unisono.testing import run_ranks

rpc = un.rpc


def test_root_from_another_context() -> None:
    """Each context numbers its messages from 0: gradients would reach another one of the same number."""

    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=20.0)
        begin(comm.rank)
        comm.barrier()
        if comm.rank == 0:
            x = torch.ones(N, dtype=torch.float64, requires_grad=True)
            with autograd.context() as outer:
                loss = rpc.rpc_sync(1, times, (x,)).sum()
                with autograd.context() as inner:
                    own = rpc.rpc_sync(1, times, (3 * x,)).sum()
                    for roots in ([loss], [own, loss]):
                        with pytest.raises(RuntimeError, match="from rank 1 was received in another autograd context"):
                            autograd.backward(inner, roots)
                    assert not autograd.get_gradients(inner)
                    autograd.backward(inner, iter([own]))  # type: ignore[arg-type]  # narrower than it need be
                autograd.backward(outer, [loss])
                assert x in autograd.get_gradients(outer)
        rpc.shutdown(timeout=20.0)

    run_ranks(program, 2)


def test_gradients_of_received_tensors_belong_to_one_pass() -> None:
    """A pass keeps none for later, and takes none from a plain backward() of torch."""

    def program(comm: un.Communicator) -> Any:
        rpc.init(comm, timeout=20.0)
        comm.barrier()
        result = None
        if comm.rank == 0:
            x = torch.ones(N, dtype=torch.float64, requires_grad=True)
            with autograd.context() as context:
                received = rpc.rpc_sync(1, echo, (x,))
                received.sum().backward(retain_graph=True)
                autograd.backward(context, [received.sum()])
                (record,) = autograd.engine.find(context).received.values()
                result = autograd.get_gradients(context)[x].tolist(), record.found, x.grad
        rpc.shutdown(timeout=20.0)
        return result

    assert run_ranks(program, 2)[0] == ([1.0] * N, {}, None)


def test_reference_to_a_non_scalar_is_no_root() -> None:
    def program(comm: un.Communicator) -> None:
        rpc.init(comm, timeout=20.0)
        begin(comm.rank)
        comm.barrier()
        if comm.rank == 0:
            x = torch.ones(N, dtype=torch.float64)
            with autograd.context() as context, pytest.raises(ValueError, match="one element"):
                rpc.remote(1, times, (x,)).backward(context)
        rpc.shutdown(timeout=20.0)

    run_ranks(program, 2)


def test_reference_can_be_the_root() -> None:
    def program(comm: un.Communicator) -> Any:
        rpc.init(comm)
        begin(comm.rank)
        comm.barrier()
        result = None
        if comm.rank == 0:
            with autograd.context() as context:
                loss = rpc.remote(1, times, (torch.ones(N, dtype=torch.float64),)).remote().sum()
                loss.backward(context)
                result = rpc.rpc_sync(1, gradients, (context,))[0].tolist()
        rpc.shutdown()
        return result

    assert run_ranks(program, 2)[0] == [1.0] * N
