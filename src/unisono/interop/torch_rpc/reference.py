"""Remote references with torch's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from unisono import rpc
from unisono.core.types import Timeout
from unisono.interop.torch_rpc.constants import UNSET_RPC_TIMEOUT, ArgumentError, as_runtime_error, seconds
from unisono.interop.torch_rpc.dist_autograd import checked

__all__ = ["PyRRef", "RRef"]

T = TypeVar("T")


class RRef(rpc.RRef[T]):
    """A remote reference: other ranks can use the object, which stays on its owner's rank.

    Args:
        value: An object on this rank.
        type_hint: Rejected, because torch uses it only for TorchScript modules, which are not supported.
    """

    __slots__ = ()

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None:
            raise ArgumentError("type_hint is for modules of TorchScript, which are not supported")
        super().__init__(value)

    def __reduce__(self) -> Any:
        try:
            return super().__reduce__()
        except TypeError as error:
            raise RuntimeError(str(error)) from error

    def to_here(self, timeout: Timeout | None = UNSET_RPC_TIMEOUT) -> T:
        return super().to_here(seconds(timeout))

    def rpc_sync(self, timeout: Timeout | None = UNSET_RPC_TIMEOUT) -> Any:
        return super().rpc_sync(seconds(timeout))

    def rpc_async(self, timeout: Timeout | None = UNSET_RPC_TIMEOUT) -> Any:
        return super().rpc_async(seconds(timeout))

    def remote(self, timeout: Timeout | None = UNSET_RPC_TIMEOUT) -> Any:
        return _Remote(self, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Back-propagate from the referenced tensor, within a distributed autograd context if one is given."""
        if self.is_owner() and not isinstance(self.local_value(), torch.Tensor):
            raise RuntimeError(f"backward() needs a tensor, not a {type(self.local_value()).__name__}")
        if dist_autograd_ctx_id != -1:
            with as_runtime_error():
                return super().backward(checked(dist_autograd_ctx_id), retain_graph)
        if not self.is_owner():
            raise RuntimeError("without a context, only the tensor's owner can back-propagate from it")
        cast(Any, self.local_value()).backward(retain_graph=retain_graph)


class _Remote:
    """Calls a remote object's methods and keeps the results remote. Like torch, first checks that the method exists."""

    def __init__(self, rref: RRef[Any], timeout: Timeout | None) -> None:
        self._rref = rref
        self._timeout = seconds(timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            rpc.rpc_sync(self._rref.owner(), _look_up, (self._rref, name), timeout=self._timeout)
            return getattr(rpc.RRef.remote(self._rref, self._timeout), name)(*args, **kwargs)

        return method


def _look_up(rref: rpc.RRef[Any], name: str) -> None:
    getattr(rref.local_value(), name)


PyRRef = RRef
