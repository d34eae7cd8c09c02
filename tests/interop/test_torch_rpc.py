"""Programs written for torch's RPC, with another import: the same names, the same promises."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch_rpc_ranks import echo, of

import unisono.interop.torch_rpc as rpc
from unisono.interop.torch_rpc import DistributedOptimizer, RemoteModule, dist_autograd


class Box:
    """Values that torch sends by pickle."""

    def __init__(self, content: int) -> None:
        self.content = content

    def plus(self, more: int = 0) -> int:
        return self.content + more


def nested(to: str, count: int) -> int:
    other = rpc.get_worker_info().name
    return count if count == 0 else 1 + rpc.rpc_sync(to, nested, args=(other, count - 1))


def fetched(ref: rpc.RRef[int]) -> int:
    return ref.to_here() + 1


@rpc.functions.async_execution
def added_elsewhere(to: str, x: torch.Tensor, y: float, z: float) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + z)


def random_tensor() -> torch.Tensor:
    return torch.rand((3, 3), requires_grad=True)


class Doubling:
    @staticmethod
    @rpc.functions.async_execution
    def static(value: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(2 * value)
        return future

    @classmethod
    def of_class(cls, value: int) -> str:
        return f"{cls.__name__} {value}"


# -- calls and references --------------------------------------------------------------------------
def calls() -> dict[str, Any]:
    box = rpc.remote("worker1", Box, args=(5,))
    return {
        "builtin": rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)).tolist(),
        "by rank": rpc.rpc_sync(1, min, args=(1, 2)),
        "by info": rpc.rpc_sync(rpc.get_worker_info("worker1"), max, args=(1, 2)),
        "self": rpc.rpc_sync("worker0", echo, kwargs={"value": 7}),
        "future": rpc.rpc_async("worker1", echo, (8,)).wait(),
        "all": torch.futures.wait_all([rpc.rpc_async("worker1", echo, (k,)) for k in range(3)]),
        "then": rpc.rpc_async("worker1", echo, (8,)).then(lambda future: future.wait() + 1).wait(),
        "pickled": rpc.rpc_sync("worker1", echo, (Box(4),)).content,
        "bound": rpc.rpc_sync("worker1", Box(3).plus, (4,)),
        "nested": rpc.rpc_sync("worker1", nested, ("worker0", 5)),
        "reference": rpc.remote("worker1", echo, (9,)).to_here(),
        "methods": [box.rpc_sync().plus(1), box.rpc_async().plus(2).wait(), box.remote().plus(more=3).to_here()],
        "owner": [box.owner().name, box.owner_name(), box.is_owner(), isinstance(box, rpc.RRef)],
        "own": rpc.rpc_sync("worker1", fetched, (rpc.RRef(10),)),
        "chained": rpc.rpc_sync("worker1", added_elsewhere, ("worker0", torch.ones(2), 1, 1)).tolist(),
        "static": rpc.rpc_sync("worker1", Doubling.static, (4,)),
        "class": rpc.rpc_sync("worker1", Doubling.of_class, (4,)),
        "for ever": rpc.rpc_sync("worker1", echo, (1,), timeout=0) + box.rpc_sync(timeout=0).plus(),
    }


def test_calls_and_references(tmp_path: Path) -> None:
    assert of(calls, tmp_path) == {
        "builtin": [4.0, 4.0],
        "by rank": 1,
        "by info": 2,
        "self": 7,
        "future": 8,
        "all": [0, 1, 2],
        "then": 9,
        "pickled": 4,
        "bound": 7,
        "nested": 5,
        "reference": 9,
        "methods": [6, 7, 8],
        "owner": ["worker1", "worker1", False, True],
        "own": 11,
        "chained": [3.0, 3.0],
        "static": 8,
        "class": "Doubling 4",
        "for ever": 6,
    }


# -- training --------------------------------------------------------------------------------------
def trained() -> list[list[float]]:
    with dist_autograd.context() as number:
        first, second = (rpc.remote("worker1", random_tensor) for _ in range(2))
        before = first.to_here().detach().clone()
        dist_autograd.backward(number, [(first.to_here() + second.to_here()).sum()])
        DistributedOptimizer(optim.SGD, [first, second], lr=0.05).step(number)
        moved = (first.to_here().detach() - before).flatten().tolist()
    local = torch.ones((), requires_grad=True)
    ref = rpc.RRef(local * 3)
    ref.backward()
    with dist_autograd.context() as number:
        rpc.RRef(local * 5).backward(number)
        kept = dist_autograd.get_gradients(number)[local]
    return [moved, [local.grad.item(), kept.item()]]


def test_gradients_and_optimizer_steps(tmp_path: Path) -> None:
    moved, kept = of(trained, tmp_path)
    assert moved == pytest.approx([-0.05] * 9)
    assert kept == [3.0, 5.0]


def refused(module: RemoteModule) -> str:
    with pytest.raises(ValueError, match="not supported for RemoteModule") as caught:
        module.parameters()
    return str(caught.value)


def run_there(module: RemoteModule, given: torch.Tensor) -> torch.Tensor:
    return module(given)


class Guarded(nn.Linear):
    """A module that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


def modes() -> list[bool]:
    module, found = RemoteModule("worker1", Guarded), []
    for change in (module.eval, module.train):
        assert change() is module
        found.append(rpc.rpc_sync("worker1", is_training, (module.get_module_rref(),)))
    return found


def is_training(ref: rpc.RRef[nn.Module]) -> bool:
    return ref.local_value().training


def test_remote_module_train_mode_is_set_on_its_owner(tmp_path: Path) -> None:
    assert of(modes, tmp_path) == [False, True]


def remote_module() -> dict[str, Any]:
    module = RemoteModule("worker1/cpu", nn.Linear, args=(3, 2), kwargs={"bias": False})
    given = torch.ones(4, 3)
    with dist_autograd.context() as number:
        out = module(given)
        dist_autograd.backward(number, [out.sum()])
        before = [ref.to_here().detach().clone() for ref in module.remote_parameters()]
        DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0).step(number)
    after = [ref.to_here().detach() for ref in module.remote_parameters()]
    # It is run where it is, whatever rank is named.
    again = RemoteModule.init_from_module_rref("rank:0", module.get_module_rref())
    with pytest.raises(ValueError, match="subclass"):
        RemoteModule("worker1", echo)  # type: ignore[arg-type]  # wrong or narrower on purpose
    return {
        "shape": list(out.shape),
        "moved": (after[0] - before[0]).flatten().tolist(),
        "async": bool(torch.equal(module.forward_async(given).wait(), again(given))),
        "passed on": bool(torch.equal(rpc.rpc_sync("worker1", run_there, (module, given)), module(given))),
        "mode": [module.eval() is module, module.get_module_rref().to_here().training],
        "refused": refused(module),
    }


def test_remote_module(tmp_path: Path) -> None:
    found = of(remote_module, tmp_path)
    assert found["shape"] == [4, 2]
    assert found["moved"] == pytest.approx([-4.0] * 6)
    assert found["async"]
    assert found["passed on"]
    assert found["mode"] == [True, False]
    assert "parameters" in found["refused"]


def test_every_public_name_of_torch_exists() -> None:
    wanted = {
        "BackendType", "RRef", "RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo", "functions",
        "get_worker_info", "init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown", "is_available", "constants",
    }  # fmt: skip
    assert wanted <= set(rpc.__all__)
