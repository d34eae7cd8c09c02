"""`torch.distributed.nn.RemoteModule`: a handle to a module on another rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from unisono import rpc
from unisono.interop.torch_rpc.api import remote
from unisono.interop.torch_rpc.reference import RRef

__all__ = ["RemoteModule"]


class RemoteModule(nn.Module):
    """A module that is created on another rank and runs there. Gradients flow through distributed autograd.

    Args:
        remote_device: Rank and device: "worker1", "worker1/cpu", "rank:1/cuda:0". Default device: "cpu".
        module_cls: The module's class.
        args, kwargs: Arguments for the module's constructor.
        _module_interface_cls: Torch's argument for TorchScript, which is not supported.

    Attributes:
        on: Name of the rank.
        device: Device of the module on its rank.
        module_rref: Reference to the module.
    """

    is_scriptable = False

    def __init__(
        self,
        remote_device: str,
        module_cls: type[nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
            raise ValueError(f"Expect `module_cls` to be a subclass of `nn.Module`, not {module_cls!r}")
        if _module_interface_cls is not None:
            raise ValueError("modules with a TorchScript interface are not supported; leave _module_interface_cls out")
        self._live(remote_device)
        self.module_rref: rpc.RRef[Any] = remote(
            self.on, _made, (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        )
        # Wait for the module, so that an error in its constructor is raised here.
        rpc.rpc_sync(self.on, _known, (self.module_rref,))

    def _live(self, remote_device: str) -> None:
        worker, _, device = remote_device.partition("/")
        name = int(worker[5:]) if worker.startswith("rank:") else worker
        self.on: str = rpc.get_worker_info(name).name
        self.device: str = str(torch.device(device or "cpu"))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: rpc.RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Return a `RemoteModule` for a module that already exists on another rank."""
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made._live(remote_device)
        made.module_rref = module_rref
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `forward` on its rank, and return the result."""
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Run `forward` on the module's rank, but return a future immediately."""
        return rpc.rpc_async(self.module_rref.owner(), _forward, (self.module_rref, self.device, args, kwargs))

    def remote_parameters(self, recurse: bool = True) -> list[rpc.RRef[nn.Parameter]]:
        """Return references to the module's parameters, for `DistributedOptimizer`."""
        return list(rpc.rpc_sync(self.module_rref.owner(), _parameters, (self.module_rref, recurse)))

    def get_module_rref(self) -> rpc.RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Set the module to training mode, or to evaluation mode if `mode` is false."""
        rpc.rpc_sync(self.module_rref.owner(), _set_mode, (self.module_rref, mode))
        return self

    def eval(self) -> Self:
        """Set the module to evaluation mode."""
        return self.train(False)

    def __getattribute__(self, name: str) -> Any:
        if name in _UNSUPPORTED:
            return _unsupported(name)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"<RemoteModule on {self.on}/{self.device}>"

    def __reduce__(self) -> Any:
        return RemoteModule.init_from_module_rref, (f"{self.on}/{self.device}", self.module_rref)


# Module methods that do not work when called from another rank.
_UNSUPPORTED = (
    frozenset(name for name, value in vars(nn.Module).items() if callable(value) and name[0] != "_")
    - vars(RemoteModule).keys()
)


def _unsupported(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule: the module is on another rank")

    return refuse


def _made(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> nn.Module:
    return cls(*args, **kwargs).to(device)


def _known(ref: rpc.RRef[nn.Module]) -> None:
    ref.local_value()


def _set_mode(ref: rpc.RRef[nn.Module], mode: bool) -> None:
    # Don't return the result of `train`: it is the module itself, which must not be sent to the caller.
    ref.local_value().train(mode)


def _forward(ref: rpc.RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    named = {name: arg.to(device) if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()}
    return ref.local_value()(*moved, **named)


def _parameters(ref: rpc.RRef[nn.Module], recurse: bool) -> list[rpc.RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in ref.local_value().parameters(recurse)]
