"""Programs written for torch's RPC, with another import: the same names, the same promises."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import unisono as un
import unisono.interop.torch_rpc as rpc
from unisono.interop.torch_rpc import DistributedOptimizer, RemoteModule, dist_autograd

Program = Callable[[], Any]


class Box:
    """What torch sends by pickle."""

    def __init__(self, content: int) -> None:
        self.content = content

    def plus(self, more: int = 0) -> int:
        return self.content + more


def echo(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("expected error")


def nested(to: str, count: int) -> int:
    other = rpc.get_worker_info().name
    return count if count == 0 else 1 + rpc.rpc_sync(to, nested, args=(other, count - 1))


def fetched(ref: rpc.RRef[int]) -> int:
    return ref.to_here() + 1


def slow() -> int:
    time.sleep(0.5)
    return 1


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


def _inside(comm: un.Communicator, program: Program, path: str) -> Any:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=20, init_method=f"file://{path}")
    rpc.init_rpc(f"worker{comm.rank}", rank=comm.rank, world_size=comm.size, rpc_backend_options=options)
    found = program() if comm.rank == 0 else None
    rpc.shutdown()
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker0", echo, args=(1,))
    return found


def of(program: Program, folder: Path, size: int = 2) -> Any:
    return un.launch(_inside, size, "shm", (program, str(folder / "store")), timeout=30)[0]


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


def errors() -> dict[str, str]:
    found = {}
    attempts: dict[str, Callable[[], object]] = {
        "sync": lambda: rpc.rpc_sync("worker1", fail),
        "async": lambda: rpc.rpc_async("worker1", fail).wait(),
        "remote": lambda: rpc.remote("worker1", fail).to_here(),
        "late": lambda: rpc.rpc_sync("worker1", slow, timeout=0.05),
        "nobody": lambda: rpc.rpc_sync("worker7", echo, (1,)),
        # Wrong or narrower on purpose.
        "no function": lambda: rpc.rpc_sync("worker1", "echo"),  # type: ignore[arg-type]
        "not the owner": lambda: rpc.remote("worker1", echo, (1,)).local_value(),
        "no context": lambda: dist_autograd.get_gradients(12345),
        "no roots": lambda: _in_context(lambda number: dist_autograd.backward(number, [])),
        "no history": lambda: _in_context(lambda number: dist_autograd.backward(number, [torch.ones(())])),
        "twice": lambda: rpc.init_rpc("again", rank=0, world_size=1),
        "no such name": lambda: rpc.get_worker_info("worker7"),
        "negative timeout": lambda: rpc.RpcBackendOptions(rpc_timeout=-1.0),
        "no workers": lambda: rpc.TensorPipeRpcBackendOptions(num_worker_threads=0),
        "type hint": lambda: rpc.RRef(1, int),
        "pickled": lambda: pickle.dumps(rpc.RRef(1)),
        "no tensor": lambda: rpc.RRef(1).backward(),
        "nested": lambda: _in_context(lambda _: _in_context(lambda _: None)),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            found[name] = " ".join(kind.__name__ for kind in type(error).__mro__[:-2]) + ": " + str(error)
    return found


def _in_context(action: Callable[[int], object]) -> None:
    with dist_autograd.context() as number:
        action(number)


def test_errors_are_of_the_classes_that_torch_raises(tmp_path: Path) -> None:
    found = of(errors, tmp_path)
    for name in ("sync", "async", "remote"):
        assert "ValueError" in found[name]
        assert "expected error" in found[name]
    for name in (
        "late",
        "not the owner",
        "no context",
        "no roots",
        "no history",
        "twice",
        "pickled",
        "no tensor",
        "nested",
    ):
        assert "RuntimeError" in found[name], name
    for name in ("nobody", "no such name", "negative timeout", "no workers", "type hint"):
        assert "RuntimeError ValueError" in found[name], name
    assert "worker1" in found["nobody"]
    assert found["no function"].startswith("TypeError")


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


def test_gradients_and_steps(tmp_path: Path) -> None:
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


def test_the_mode_of_a_remote_module_is_set_where_it_is(tmp_path: Path) -> None:
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
    again = RemoteModule.init_from_module_rref("rank:1", module.get_module_rref())
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


def test_every_public_name_of_torch_is_there() -> None:
    wanted = {
        "BackendType", "RRef", "RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo", "functions",
        "get_worker_info", "init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown", "is_available", "constants",
    }  # fmt: skip
    assert wanted <= set(rpc.__all__)
