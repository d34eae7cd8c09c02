"""Calls that pass torch's own kernels, for hooks that torch calls there: since torch 2.14.

The kernel of an operator, `c10d::allreduce_` say, calls the hooks of a C++ group around the method of its backend. A
group written in Python is called directly, so its hooks would never be. They are registered instead with the C++ group
that stands for ours in the dispatcher. From then on our calls are made on that one, whose backend makes them on ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

__all__ = ["Carrier", "between_hooks", "with_backend", "with_own_attach"]


class _Call:
    """A call that an operator is to make in the end."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.work: Any = None


class _Calls(threading.local):
    """Of a thread, the calls whose operators have begun: a hook may itself make one."""

    def __init__(self) -> None:
        self.begun: list[_Call] = []


_calls = _Calls()


class Carrier(Backend):
    """Backend of a C++ group: each of its methods makes the call that this thread has begun."""

    def getBackendName(self) -> str:  # noqa: N802
        return "unisono"

    @classmethod
    def take(cls, name: str) -> None:
        """Have a method by this name."""
        setattr(cls, name, cls._make)

    def _make(self, *args: Any) -> Any:
        begun = _calls.begun[-1]
        begun.work = begun.call(*args)
        return begun.work


def between_hooks(operator: Callable[[], Any], method: Callable[..., Any], group: object, *_: object) -> Any:
    """Call an operator of torch's, which calls hooks and, by a `Carrier`, a method of ours.

    Args:
        operator: Method, with its arguments, of a C++ group that has a `Carrier`.
        method: Method of our group, which gets the arguments that the operator hands on.
        group: Our group.
    """
    begun = _Call(partial(method, group))
    _calls.begun.append(begun)
    try:
        ended = operator()
    finally:
        _calls.begun.pop()
    # C++ returns a work that knows no more than how to wait for ours. Nothing has been made for a fake tensor.
    return ended if begun.work is None else begun.work


def with_backend(made: dist.ProcessGroup) -> None:
    """Give a C++ group without a backend one for the CPU, which makes calls that have begun `between_hooks`."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    # A group with a default backend asks that for its rank.
    carrier = Carrier(made.rank(), made.size())
    made._set_default_backend(kind)
    made._register_backend(torch.device("cpu"), kind, carrier)


def with_own_attach(group_class: type[Any]) -> None:
    """Let torch's hooks that attach themselves to a group of ours, in C++, attach to the one that has its hooks."""
    for name in ("FlightRecorderHook", "NanCheckHook"):
        if kind := getattr(torch._C._distributed_c10d, name, None):
            kind.attach = staticmethod(_attach_to(group_class, kind.attach))


def _attach_to(group_class: type[Any], attach: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(attach)
    def attach_to(pg: Any) -> Any:
        return attach(pg.others.hooked() if isinstance(pg, group_class) else pg)

    return attach_to
