"""Routes calls through torch's own kernels, for the hooks that torch calls there since 2.14.

The kernel of an operator, such as `c10d::allreduce_`, calls a C++ group's hooks around its backend's method. A Python
group is called directly, so its hooks would never run. They are registered instead with the C++ group that represents
ours in the dispatcher. From then on our calls are made on that group, whose backend forwards them to ours.
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
    """A call that an operator will make in the end."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.work: Any = None


class _Calls(threading.local):
    """A thread's calls whose operators have begun; a stack, because a hook may itself make a call."""

    def __init__(self) -> None:
        self.begun: list[_Call] = []


_calls = _Calls()


class Carrier(Backend):
    """Backend of a C++ group: each of its methods makes the call that this thread has begun."""

    def getBackendName(self) -> str:  # noqa: N802
        return "unisono"

    @classmethod
    def take(cls, name: str) -> None:
        """Add a method of this name."""
        setattr(cls, name, cls._make)

    def _make(self, *args: Any) -> Any:
        begun = _calls.begun[-1]
        begun.work = begun.call(*args)
        return begun.work


def between_hooks(operator: Callable[[], Any], method: Callable[..., Any], group: object, *_: object) -> Any:
    """Call a torch operator, which calls hooks and, through a `Carrier`, our method.

    Args:
        operator: Method of a C++ group with a `Carrier`, with its arguments.
        method: Method of our group, called with the arguments that the operator passes on.
        group: Our group.
    """
    begun = _Call(partial(method, group))
    _calls.begun.append(begun)
    try:
        ended = operator()
    finally:
        _calls.begun.pop()
    # C++ returns a work that can only wait for ours, so return ours. For a fake tensor there is none.
    return ended if begun.work is None else begun.work


def with_backend(made: dist.ProcessGroup) -> None:
    """Give a C++ group without a backend one for the CPU, which makes the calls begun by `between_hooks`."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    # A group with a default backend reads its rank from that.
    carrier = Carrier(made.rank(), made.size())
    made._set_default_backend(kind)
    made._register_backend(torch.device("cpu"), kind, carrier)


def with_own_attach(group_class: type[Any]) -> None:
    """Redirect torch's C++ hooks that attach themselves to our group to the C++ group that has its hooks."""
    for name in ("FlightRecorderHook", "NanCheckHook"):
        if kind := getattr(torch._C._distributed_c10d, name, None):
            kind.attach = staticmethod(_attach_to(group_class, kind.attach))


def _attach_to(group_class: type[Any], attach: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(attach)
    def attach_to(pg: Any) -> Any:
        return attach(pg.others.hooked() if isinstance(pg, group_class) else pg)

    return attach_to
