"""Ranks of a `Checkout`, run by path: they use only public functions, so that any version of unisono works.

python -P _checkout_ranks.py ADDRESS RANKS BACKEND

Without a backend, the process is no rank. Where the environment gives it a rank, it is that one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unisono as un

__all__ = ["rank"]

Repeat = Callable[[], object]
WIDTH = 64


def rank(comm: un.Communicator | None, address: str) -> None:
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


def _seconds(comm: un.Communicator | None, repeat: Repeat, calls: int) -> float:
    meet = _nothing if comm is None else comm.barrier
    meet()
    began = time.perf_counter()
    for _ in range(calls):
        repeat()
    seconds = (time.perf_counter() - began) / calls
    meet()
    return seconds


def collective(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """Create the tensors of a case, and use each once; they are zeroed afterwards, so that no sum grows."""
    dtype = getattr(torch, case["dtype"])
    numel = max(1, case["nbytes"] // dtype.itemsize)
    if case["name"] not in ("all_reduce", "message"):
        # The others have a part for each rank.
        numel += -numel % comm.size
    make = comm.empty if case["registered"] else torch.empty
    tensors = [make(numel, dtype=dtype) for _ in range(case["tensors"])]
    calls = [_bound(comm, case["name"], tensor) for tensor in tensors]
    for tensor, call in zip(tensors, calls, strict=True):
        tensor.fill_(comm.rank + 1)
        call()
        if case["name"] == "all_reduce":
            assert bool((tensor == comm.size * (comm.size + 1) // 2).all()), "a sum is wrong"
        tensor.zero_()
    following = cycle(calls)

    def repeat() -> None:
        next(following)()

    return repeat


def _bound(comm: un.Communicator, name: str, whole: torch.Tensor) -> Repeat:
    part = whole.new_zeros(len(whole) // comm.size)
    match name:
        case "all_gather":
            return partial(comm.all_gather_single, whole, part)
        case "reduce_scatter":
            return partial(comm.reduce_scatter_single, part, whole)
        case "all_to_all":
            return partial(comm.all_to_all_single, torch.zeros_like(whole), whole)
        case "gather" | "scatter":
            return partial(getattr(comm, name), part, list(whole.split(len(part))) if comm.rank == 0 else None, 0)
        case "broadcast" | "reduce":
            return partial(getattr(comm, name), whole, 0)
        case "message":
            other = 1 - comm.rank
            first, second = (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send)
            return (lambda: (first(whole, other), second(whole, other))) if comm.rank < 2 else _nothing
        case "barrier":
            return comm.barrier
    return partial(getattr(comm, name), whole)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))


def averager(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
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


def sharded(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
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


def torch_all_reduce(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """An all_reduce of 8 bytes by torch's own function, on backend "unisono"."""
    _join(comm, case)
    tensor = torch.zeros(2)
    return partial(dist.all_reduce, tensor)


def torch_ddp(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """Forward, backward and step of the small model in torch's DDP, on backend "unisono"."""
    _join(comm, case)
    return _torch_step(comm, nn.parallel.DistributedDataParallel(_model()))


def torch_fsdp2(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """The same in torch's FSDP2, each layer sharded."""
    from torch.distributed.fsdp import fully_shard

    _join(comm, case)
    model = _model()
    mesh = init_device_mesh("cpu", (comm.size,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return _torch_step(comm, model)


def _join(comm: un.Communicator, case: dict[str, Any]) -> None:
    if not dist.is_initialized():
        dist.init_process_group(
            "unisono", init_method=f"file://{case['folder']}/torch", rank=comm.rank, world_size=comm.size
        )


def _torch_step(comm: un.Communicator, model: nn.Module) -> Repeat:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
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


def rpc_sync(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """A remote call of rank 0 to rank 1."""
    agent = _agent(comm)
    return (lambda: agent.rpc_sync("worker1", _square, (3,))) if comm.rank == 0 else _nothing


def rpc_tensor(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """The same, with an argument of 1 MiB."""
    agent = _agent(comm)
    tensor = torch.ones(1 << 18)
    return (lambda: agent.rpc_sync("worker1", _numel, (tensor,))) if comm.rank == 0 else _nothing


def rpc_in_flight(comm: un.Communicator, case: dict[str, Any]) -> Repeat:
    """1,000 remote calls at once."""
    agent = _agent(comm)

    def repeat() -> None:
        torch.futures.wait_all([agent.rpc_async("worker1", _square, (3,)) for _ in range(1000)])

    return repeat if comm.rank == 0 else _nothing


@cache
def _agent(comm: un.Communicator) -> un.rpc.Agent:
    agent = un.rpc.init(comm.dup(), f"worker{comm.rank}")
    assert agent.rpc_sync("worker1", _square, (3,)) == 9, "a result is wrong"
    return agent


@un.rpc.expose
def _square(number: int) -> int:
    return number * number


@un.rpc.expose
def _numel(tensor: torch.Tensor) -> int:
    return tensor.numel()


def pool_map(_comm: None, case: dict[str, Any]) -> Repeat:
    """`map` of 2,000 tasks of 20 us on two workers."""
    pool = _pool()
    return lambda: list(pool.map(_compute, [20e-6] * 2000))


def pool_submit(_comm: None, case: dict[str, Any]) -> Repeat:
    """500 single tasks that do nothing, all submitted before the first result is awaited."""
    pool = _pool()
    return lambda: [future.result() for future in [pool.submit(_nothing) for _ in range(500)]]


@cache
def _pool() -> un.Pool:
    return un.Pool(2)


def _compute(seconds: float) -> None:
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def launch(_comm: None, case: dict[str, Any]) -> Repeat:
    """A launch of two ranks that sum 8 bytes, in a process that has launched before."""
    return lambda: un.launch(_total, 2)


def _total(comm: un.Communicator) -> float:
    tensor = torch.ones(2)
    comm.all_reduce(tensor)
    return tensor.sum().item()


PROGRAMS: dict[str, Callable[[Any, dict[str, Any]], Repeat]] = {
    program.__name__: program
    for program in (
        collective,
        averager,
        sharded,
        torch_all_reduce,
        torch_ddp,
        torch_fsdp2,
        checkpoint_save,
        checkpoint_load,
        rpc_sync,
        rpc_tensor,
        rpc_in_flight,
        pool_map,
        pool_submit,
        launch,
    )
}


def _answer(link: Any, value: object) -> None:
    link.write(json.dumps(value) + "\n")
    link.flush()


def main(address: str, ranks: str, backend: str) -> None:
    if not backend:
        rank(None, address)
    elif "RANK" in os.environ:
        torch.set_num_threads(1)
        with un.init(backend) as comm:
            rank(comm, address)
    else:
        un.launch(rank, int(ranks), backend, (address,), threads=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
