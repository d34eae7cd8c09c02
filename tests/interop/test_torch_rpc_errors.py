"""Errors of programs written for torch's RPC: of the classes that torch raises."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_rpc_ranks import echo, of

import unisono.interop.torch_rpc as rpc
from unisono.interop.torch_rpc import dist_autograd


def fail() -> None:
    raise ValueError("expected error")


RELEASED = threading.Event()


def slow() -> int:
    assert RELEASED.wait(20)
    return 1


def release() -> None:
    RELEASED.set()


def late() -> None:
    """Call what does not answer before the time is up; then let it end."""
    try:
        rpc.rpc_sync("worker1", slow, timeout=0.05)
    finally:
        rpc.rpc_sync("worker1", release)


def errors() -> dict[str, str]:
    found = {}
    attempts: dict[str, Callable[[], object]] = {
        "sync": lambda: rpc.rpc_sync("worker1", fail),
        "async": lambda: rpc.rpc_async("worker1", fail).wait(),
        "remote": lambda: rpc.remote("worker1", fail).to_here(),
        "late": late,
        "nobody": lambda: rpc.rpc_sync("worker7", echo, (1,)),
        # Wrong or narrower on purpose.
        "no method": lambda: rpc.remote("worker1", echo, (1,)).remote().missing(),
        "unsendable": lambda: rpc.rpc_sync("worker1", echo, (torch.futures.Future(),)),
        "unsendable result": lambda: rpc.rpc_sync("worker1", torch.futures.Future),
        "no such context": lambda: rpc.RRef(torch.ones((), requires_grad=True)).backward(100),
        "no function": lambda: rpc.rpc_sync("worker1", "echo"),  # type: ignore[arg-type]  # wrong on purpose
        "not the owner": lambda: rpc.remote("worker1", echo, (1,)).local_value(),
        "no context": lambda: dist_autograd.get_gradients(12345),
        "no roots": lambda: _in_context(lambda number: dist_autograd.backward(number, [])),
        "no list of roots": lambda: _in_context(lambda number: dist_autograd.backward(number, None)),  # type: ignore[arg-type]
        "failing backward": lambda: _in_context(failing_backward),
        "no tensor there": lambda: _in_context(lambda number: rpc.remote("worker1", echo, ("text",)).backward(number)),
        "no future": lambda: rpc.rpc_sync("worker1", no_future),
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


@rpc.functions.async_execution
def no_future() -> int:
    return 1


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        raise KeyError("expected error")


def failing(value: torch.Tensor) -> torch.Tensor:
    return Failing.apply(value).sum()


def failing_backward(number: int) -> None:
    dist_autograd.backward(number, [rpc.rpc_sync("worker1", failing, (torch.ones(2, requires_grad=True),))])


def _in_context(action: Callable[[int], object]) -> None:
    with dist_autograd.context() as number:
        action(number)


def test_errors_have_the_classes_of_torch(tmp_path: Path) -> None:
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
        "unsendable",
        "unsendable result",
        "no such context",
        "failing backward",
        "no tensor there",
        "no future",
    ):
        assert "RuntimeError" in found[name], name
    for name in ("nobody", "no such name", "negative timeout", "no workers", "type hint"):
        assert "RuntimeError ValueError" in found[name], name
    assert "worker1" in found["nobody"]
    assert found["no function"].startswith("TypeError")
    assert found["no list of roots"].startswith("TypeError")
    assert "expected error" in found["failing backward"]
    assert "AttributeError" in found["no method"]
    assert "'int' object has no attribute 'missing'" in found["no method"]


def test_backend_and_options_have_the_classes_of_torch() -> None:
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions())
    with pytest.raises(TypeError, match="must be a member of BackendType"):
        rpc.init_rpc("alone", "TENSORPIPE", rank=0, world_size=1)  # type: ignore[arg-type]  # wrong on purpose
