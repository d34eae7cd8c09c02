"""Ranks of a `Checkout`, run by path: they use only public functions, so that any version of unisono works.

python -P _checkout_ranks.py ADDRESS RANKS BACKEND
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono as un

__all__ = ["rank"]

Repeat = Callable[[], object]
WIDTH = 64


def rank(comm: un.Communicator, address: str) -> None:
    """Take samples until the peer closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as link:
            _answer(link, un.__file__)
            current = ""
            repeat: Repeat = _nothing
            for line in link:
                case = json.loads(line)
                if line != current:
                    # Free the old tensors first: those of two cases may not fit into memory.
                    repeat = _nothing
                    current = line
                    repeat = PROGRAMS[case["program"]](comm, case | {"folder": str(Path(address).parent)})
                _answer(link, _seconds(comm, repeat, case["calls"]))


def _nothing() -> None:
    pass


def _seconds(comm: un.Communicator, repeat: Repeat, calls: int) -> float:
    comm.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        repeat()
    seconds = (time.perf_counter() - began) / calls
    comm.barrier()
    return seconds


def all_reduce(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """Create the tensors of a case, and reduce each once; they are zeroed afterwards, so that no sum grows."""
    dtype = getattr(torch, case["dtype"])
    numel = max(1, case["nbytes"] // dtype.itemsize)
    make = comm.empty if case["registered"] else torch.empty
    tensors = [make(numel, dtype=dtype) for _ in range(case["tensors"])]
    for tensor in tensors:
        tensor.fill_(comm.rank + 1)
        comm.all_reduce(tensor)
        assert bool((tensor == comm.size * (comm.size + 1) // 2).all()), "a sum is wrong"
        tensor.zero_()
    following = cycle(tensors)
    return lambda: comm.all_reduce(next(following))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))


def averager(comm: un.Communicator, _case: dict[str, Any]) -> Repeat:
    """Forward and backward of a small model, whose time is mostly the averager's."""
    model = _model()
    un.GradientAverager(model, comm)
    data = torch.full((4, WIDTH), 1.0 + comm.rank)

    def step() -> None:
        model.zero_grad()
        model(data).sum().backward()

    step()
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad.clone()
        comm.all_reduce(mean, "avg")
        assert torch.equal(mean, parameter.grad), "gradients differ"
    return step


def sharded(comm: un.Communicator, _case: dict[str, Any]) -> Repeat:
    """A step of a small `ShardedModel` with SGD."""
    model = _model()
    optimizer = un.sharding.ShardedModel(model, comm).optimizer(torch.optim.SGD, lr=1e-6)
    data = torch.full((4, WIDTH), 1.0 + comm.rank)

    def step() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    step()
    return step


def checkpoint_save(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """A checkpoint of a small model and its optimizer, saved again and again."""
    state, path = _saved(comm, case)
    return lambda: un.checkpoint.save(path, state, comm)


def checkpoint_load(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """The same, loaded."""
    state, path = _saved(comm, case)
    return lambda: un.checkpoint.load(path, state, comm)


def _saved(comm: un.Communicator, case: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    path = Path(case["folder"]) / "checkpoint"
    un.checkpoint.save(path, state, comm)
    return state, path


def rpc_sync(comm: un.Communicator, _case: dict[str, Any]) -> Repeat:
    """A remote call of rank 0 to rank 1."""
    agent = un.rpc.init(comm.dup(), f"worker{comm.rank}")
    assert agent.rpc_sync("worker1", _square, (3,)) == 9, "a result is wrong"
    return (lambda: agent.rpc_sync("worker1", _square, (3,))) if comm.rank == 0 else _nothing


@un.rpc.expose
def _square(number: int) -> int:
    return number * number


PROGRAMS = {
    program.__name__: program for program in (all_reduce, averager, sharded, checkpoint_save, checkpoint_load, rpc_sync)
}


def _answer(link: Any, value: object) -> None:
    link.write(json.dumps(value) + "\n")
    link.flush()


if __name__ == "__main__":
    un.launch(rank, int(sys.argv[2]), sys.argv[3], (sys.argv[1],), threads=1)
