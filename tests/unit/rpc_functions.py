"""Functions that ranks call remotely in tests, and programs around them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

import unisono as un

__all__ = [
    "BACKENDS",
    "RAN",
    "OddError",
    "Point",
    "add",
    "bounce",
    "census",
    "echo",
    "hold",
    "later",
    "not_a_future",
    "on_rank_0",
    "raises",
    "release",
    "served",
    "unexposed",
]


rpc = un.rpc
BACKENDS = ["thread", "shm", "gloo"]


@rpc.expose
@dataclasses.dataclass
class Point:
    x: int
    tensor: torch.Tensor


class OddError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@rpc.expose
def echo(value: Any = None, **further: Any) -> Any:
    return (value, further) if further else value


@rpc.expose
def add(x: Any, y: Any = 1) -> Any:
    return x + y


@rpc.expose
def raises(error: str) -> None:
    if error == "odd":
        raise OddError(7)
    if error == "exit":
        raise SystemExit(3)
    {}[error]


@rpc.expose
def hold(key: str) -> bool:
    """Wait until the function is released; return whether it was."""
    return HELD.setdefault(key, threading.Event()).wait(60.0)


@rpc.expose
def release(key: str) -> None:
    HELD.setdefault(key, threading.Event()).set()


@rpc.expose
def census() -> int:
    """Return the number of objects that the called rank keeps for others."""
    return len(rpc.context.current_agent().references.ledger)


@rpc.expose
def bounce(depth: int) -> int:
    """Call back and forth, from inside of what was called."""
    if not depth:
        return 0
    peer = 1 - rpc.get_worker_info().id
    return int(rpc.rpc_sync(peer, bounce, (depth - 1,))) + 1


@rpc.expose
@rpc.async_execution
def later(value: Any, peer: int) -> torch.futures.Future[Any]:
    return rpc.rpc_async(peer, add, (value,)).then(lambda future: future.wait() * 2)


@rpc.expose
@rpc.async_execution
def not_a_future() -> int:
    return 3


def unexposed() -> None:
    RAN.append(1)


RAN: list[int] = []
HELD: dict[str, threading.Event] = {}


def served(program: Callable[[un.Communicator], Any], **options: Any) -> Callable[[un.Communicator], Any]:
    """A program between init and shutdown. It passes for a part of the program's module, which goes along to ranks."""

    @functools.wraps(program)
    def run(comm: un.Communicator) -> Any:
        rpc.init(comm, f"worker{comm.rank}", **{"timeout": 20.0, **options})
        result = program(comm)
        rpc.shutdown(timeout=20.0)
        return result

    return run


def on_rank_0(program: Callable[[], Any], **options: Any) -> Callable[[un.Communicator], Any]:
    @functools.wraps(program)
    def alone(comm: un.Communicator) -> Any:
        return program() if comm.rank == 0 else None

    return served(alone, **options)
