"""Optimizer for parameters on several ranks; the owner of a parameter updates it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from unisono.rpc.autograd import get_gradients
from unisono.rpc.autograd.engine import current_contexts
from unisono.rpc.client import remote
from unisono.rpc.exported import expose
from unisono.rpc.rref import RRef
from unisono.serialization.classes import class_of

__all__ = ["DistributedOptimizer", "LocalOptimizer"]


@expose
class LocalOptimizer:
    """One rank's part of a `DistributedOptimizer`: a torch optimizer for local parameters.

    Args:
        name: Module and name of the optimizer's class, which must already be imported on this rank.
        params: References to parameters of this rank.
        args, kwargs: Arguments for the optimizer.
    """

    def __init__(self, name: str, params: list[RRef[Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._params = [parameter for ref in params for parameter in _parameters(ref.local_value())]
        self._optimizer = _class_of(name)(self._params, *args, **kwargs)

    def ready(self) -> bool:
        """Return True. If the constructor failed, calling this method raises the constructor's error."""
        return True

    def step(self, context: int) -> None:
        """Do one optimizer step with the gradients of a context, then restore `.grad`."""
        gradients = get_gradients(context)
        # Ranks that train asynchronously may run optimizer steps at the same time, so `swapped` reserves the parameters
        # for this thread.
        with current_contexts().leaves.swapped(self._params, gradients):
            self._optimizer.step()


def _parameters(value: Any) -> list[torch.Tensor]:
    return list(value.parameters()) if isinstance(value, torch.nn.Module) else [value]


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class with the given name. Raises ValueError if none has been imported."""
    found = class_of(name)
    if found is None or not issubclass(found, torch.optim.Optimizer):
        raise ValueError(f"{name.replace(':', '.')} is not an optimizer imported on this rank")
    return found


def _needs_more(cls: type[torch.optim.Optimizer]) -> bool:
    """Return whether the `step` of an optimizer class has required arguments."""
    _, *further = inspect.signature(cls.step).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in further)


class DistributedOptimizer:
    """A torch optimizer for parameters on many ranks, stepped with the gradients of an autograd context.

    The constructor creates one optimizer on each rank that owns some of the parameters. Steps of several trainers on
    the same parameters are serialized.

    Args:
        optimizer_class: Any subclass of `torch.optim.Optimizer` that needs only gradients for a step, as all of torch's
            optimizers except `LBFGS` do. The class must also be imported on the owners.
        params_rref: References to parameters or modules. All parameters of a module are optimized.
        args, kwargs: Arguments for the optimizer, sent like the arguments of calls.

    Example:
        >>> def program(comm):
        ...     un.rpc.init(comm)
        ...     w = torch.nn.Parameter(torch.tensor(3.0))
        ...     optimizer = un.rpc.DistributedOptimizer(torch.optim.SGD, [un.rpc.RRef(w)], lr=0.5)
        ...     with un.rpc.autograd.context() as ctx:
        ...         un.rpc.autograd.backward(ctx, [w * w])
        ...         optimizer.step(ctx)
        ...     un.rpc.shutdown()
        ...     return w.item()
        >>> un.launch(program, 1, "thread")
        [0.0]
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params_rref: Iterable[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
            raise TypeError(f"optimizer_class must be a class of torch optimizers, not {optimizer_class!r}")
        if _needs_more(optimizer_class):
            raise TypeError(
                f"{optimizer_class.__name__}.step cannot be called with gradients only, which are all that a "
                "context has: it needs a closure to recompute the loss"
            )
        params_rref = list(params_rref) if isinstance(params_rref, Iterable) else [params_rref]
        if not params_rref:
            raise ValueError("there are no parameters to optimize")
        for ref in params_rref:
            if not isinstance(ref, RRef):
                raise TypeError(f"params_rref must be references to parameters (RRefs), not a {type(ref).__name__}")
        owners: dict[int, list[RRef[Any]]] = {}
        for ref in params_rref:
            owners.setdefault(ref.owner().id, []).append(ref)
        name = f"{optimizer_class.__module__}:{optimizer_class.__qualname__}"
        self.remote_optimizers: list[RRef[LocalOptimizer]] = [
            remote(owner, LocalOptimizer, (name, refs, args, kwargs)) for owner, refs in owners.items()
        ]
        for optimizer in self.remote_optimizers:
            # Report invalid arguments now.
            optimizer.rpc_sync().ready()

    def step(self, context_id: int) -> None:
        """Do one optimizer step on every rank that owns parameters; return when all ranks are done.

        Args:
            context_id: ID of the autograd context whose gradients are applied.

        Raises:
            CommError: The context has ended, and its gradients have been discarded.
            PeerLostError: One of the ranks has died; the other ranks have taken the step.
        """
        current_contexts().ongoing(context_id)
        steps = [optimizer.rpc_async().step(context_id) for optimizer in self.remote_optimizers]
        torch.futures.wait_all(steps)
