"""Backward passes of several ranks, one of which waits in a hook for another one."""

from __future__ import annotations

import threading

import torch

import unisono as un
from unisono.rpc import autograd
from unisono.testing import run_ranks

rpc = un.rpc

OTHER = torch.tensor(3.0, requires_grad=True)
BEGUN, PASSED = threading.Event(), threading.Event()


@rpc.expose
def times_other(value: torch.Tensor) -> torch.Tensor:
    return value * OTHER


@rpc.expose
def wait_until_begun() -> bool:
    return BEGUN.wait(60.0)


@rpc.expose
def tell_passed() -> None:
    PASSED.set()


def program(comm: un.Communicator) -> float:
    rpc.init(comm, timeout=60.0)
    comm.barrier()
    leaf = torch.tensor(2.0, requires_grad=True)

    def wait(_: torch.Tensor) -> None:
        # As a hook that averages gradients waits for the other rank's.
        BEGUN.set()
        assert PASSED.wait(60.0)

    with autograd.context() as context:
        if comm.rank == 0:
            leaf.register_post_accumulate_grad_hook(wait)
            autograd.backward(context, [leaf * 5])
        else:
            assert rpc.rpc_sync(0, wait_until_begun)
            autograd.backward(context, [rpc.rpc_sync(0, times_other, (leaf,))])
            rpc.rpc_sync(0, tell_passed)
        gradient = autograd.get_gradients(context)[leaf].item()
    rpc.shutdown(timeout=60.0)
    return gradient


def test_pass_continues_while_a_hook_waits() -> None:
    assert run_ranks(program, 2) == [5.0, 3.0]
