"""Routes calls through torch's own kernels, which have run a group's hooks since torch 2.14.

The kernel of an operator, such as `c10d::allreduce_`, runs a C++ group's hooks before and after the backend's method. A
Python group is called directly, so its own hooks would never run; hooks are registered with the C++ group that
represents the Python group in the dispatcher. Once a hook is registered, calls are made on the C++ group, whose backend
forwards them to the Python group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from unisono.interop.dispatched_calls import CALLS

__all__ = ["Carrier", "with_backend", "with_own_attach"]


class Carrier(Backend):
    """Backend that forwards every method to one of our groups."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        # Keep only a weak reference: the group refers to this object, and a reference cycle would keep both alive after
        # their last use.
        self._group_ref = weakref.ref(group)

    def getBackendName(self) -> str:  # noqa: N802
        return "unisono"

    @classmethod
    def take(cls, name: str) -> None:
        """Add a method called `name`, which forwards to our group's method of the same name."""

        def make(self: Carrier, *args: Any) -> Any:
            return CALLS.make(self._group_ref(), name, args)

        setattr(cls, name, make)


def with_backend(made: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Give a C++ group that has no backend a CPU backend that forwards calls to one of our groups."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    # A group with a default backend reads its rank from that backend.
    carrier = Carrier(group)
    made._set_default_backend(kind)
    made._register_backend(torch.device("cpu"), kind, carrier)


def with_own_attach(group_class: type[Any]) -> None:
    """Patch torch's own hooks, so that attaching one to our group attaches it to the C++ group that runs hooks."""
    for name in ("FlightRecorderHook", "NanCheckHook"):
        if kind := getattr(torch._C._distributed_c10d, name, None):
            kind.attach = staticmethod(_attach_to(group_class, kind.attach))


def _attach_to(group_class: type[Any], attach: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(attach)
    def attach_to(pg: Any) -> Any:
        return attach(pg.others.hooked() if isinstance(pg, group_class) else pg)

    return attach_to
