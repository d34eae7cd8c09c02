"""Calls between hosts with addresses of their own: the same program as everywhere, and a rank that is killed."""

from __future__ import annotations

import time
from typing import Any

import torch

import unisono as un
from unisono.errors import PeerLostError
from unisono.testing.namespaced_ranks import HostRanks, Network, send_signal

rpc = un.rpc
SOON_S = 5.0


@rpc.expose
def add(x: Any, y: Any = 1) -> Any:
    return x + y


@rpc.expose
def nap(seconds: float) -> None:
    time.sleep(seconds)


def program(comm: un.Communicator) -> Any:
    rpc.init(comm)
    peer = (comm.rank + 1) % comm.size
    total = rpc.rpc_sync(peer, add, (torch.ones(300_000),)).sum().item()
    values = torch.futures.wait_all([rpc.rpc_async(peer, add, (i,)) for i in range(200)])
    kept = rpc.remote(peer, add, (torch.zeros(3),))
    weight = torch.ones(3, requires_grad=True)
    with rpc.autograd.context() as context:
        rpc.autograd.backward(context, [rpc.rpc_sync(peer, add, (weight, weight)).sum()])
        gradient = rpc.autograd.get_gradients(context)[weight].tolist()
    found = total, values == list(range(1, 201)), kept.to_here().tolist(), gradient
    del kept
    rpc.shutdown(timeout=30.0)
    return found


def test_same_program_on_two_hosts(network: Network) -> None:
    for hosts in ((1, 1), (2, 1)):
        with HostRanks(network, hosts, program) as ranks:
            assert ranks.results() == [(600_000.0, True, [1.0] * 3, [2.0] * 3)] * sum(hosts)


def calls_the_last(comm: un.Communicator) -> Any:
    rpc.init(comm)
    result = None
    future = rpc.rpc_async(2, nap, (600.0,), timeout=600.0) if comm.rank == 0 else None
    send_signal()
    if future is not None:
        try:
            future.wait()
        except PeerLostError as error:
            result = error.peer, rpc.rpc_sync(1, add, (1,))
    rpc.shutdown(timeout=30.0)
    return result


def test_killed_rank_of_another_host_fails_its_caller(network: Network) -> None:
    with HostRanks(network, (2, 1), calls_the_last) as ranks:
        ranks.wait_for_word()
        ranks.kill(2)
        killed = time.monotonic()
        assert ranks.results()[:2] == [(2, 2), None]
        assert time.monotonic() - killed < SOON_S
