"""Torch's own backends for a group's tensors on devices other than the CPU, as in "cpu:unisono,cuda:nccl"."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.core.tracing import profiler
from unisono.errors import CommError, UnavailableError
from unisono.interop.call_forms import CallForms
from unisono.interop.dispatched_calls import CALLS, first_tensor, pass_on, take_calls
from unisono.interop.error_texts import add_torch_words
from unisono.interop.hooked_calls import Carrier, with_backend
from unisono.interop.options import modes
from unisono.transports.torch.process_groups import backend_plugin

__all__ = ["DeviceBackends", "by_device"]

R = TypeVar("R")

_PLAIN: Any = torch.Tensor.__torch_dispatch__
"""`__torch_dispatch__` of a tensor class that does not handle operators itself."""
_PYTHON = torch._C.DispatchKey.Python
_excluded: Callable[[torch._C.DispatchKey], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded

_OPTIONS = tuple(kind for name, kind in vars(dist.distributed_c10d).items() if name.endswith("Options"))

# Names of process group methods in older versions of torch, by current name.
_OLDER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


class DeviceBackends:
    """Torch process groups of a unisono group's ranks, one for each device type except the CPU, created on first use.

    If one backend of a group is a Python process group, torch drops the group's other backends, so `DeviceBackends`
    creates and keeps those backends.

    Args:
        group: The unisono group, which is also the key under which torch stores the backend configuration.
        store: Store used only by this group.
        timeout: Timeout of operations on the created groups.
        options: The user's options for the created groups, or None.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, timeout: timedelta, options: object) -> None:
        # Keep only a weak reference: the group refers to this object, and a reference cycle would keep both alive after
        # their last use.
        self._group_ref = weakref.ref(group)
        self._store = store
        self._timeout = timeout
        self._options = options
        self._made: dict[str, dist.ProcessGroup] = {}
        self.has_hooks: bool = False

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        assert group is not None
        return group

    @property
    def known(self) -> bool:
        """Return whether torch has set the group's configuration, which it does after creating the group."""
        return self._group in dist.distributed_c10d._world.pg_backend_config

    def names(self) -> dict[str, str]:
        """Return the backend of each device type except the CPU.

        Until torch has set the group's configuration, torch's default backends are returned.
        """
        if not self.known:
            return {kind: name for kind, name in dist.Backend.default_device_backend_map.items() if kind != "cpu"}
        pairs = (pair.split(":") for pair in dist.get_backend_config(self._group).split(","))
        return {kind: name for kind, name in pairs if kind != "cpu"}

    def of(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group for a device.

        Raises `ValueError` if no backend is configured for the device, and `UnavailableError` if hooks are registered,
        because a call on a device's group would not run them.
        """
        kind = device.type
        if self.has_hooks:
            # The hooks are registered on the group `through`, so a call on a device's group would not run them.
            raise UnavailableError(f"a group with hooks carries tensors on the CPU alone, not on {device}")
        if kind not in self._made:
            names = self.names()
            if kind not in names:
                raise ValueError(
                    f"the tensor is on {device}, but this group carries {', '.join(['cpu', *names])}; "
                    f"name a backend for it too, as in init_process_group('cpu:unisono,cuda:nccl')"
                )
            self._made[kind] = self._make(kind, names[kind])
        return self._made[kind]

    @cached_property
    def through(self) -> dist.ProcessGroup:
        """A C++ group of the same ranks. Its methods call torch's operators, which in turn call the unisono group."""
        group = self._group
        made = self._named(dist.ProcessGroup(self._store, group.rank(), group.size()))
        take_calls(made, group)
        return made

    def hooked(self) -> Any:
        """Send all later calls through the C++ group `through`, so that its hooks run, and return it; see `Carrier`.

        Raises `UnavailableError` before torch 2.14.
        """
        if not hasattr(self.through, "register_pre_hook"):
            raise UnavailableError(f"hooks of process groups need torch 2.14; this is {torch.__version__}")
        if not self.has_hooks:
            with_backend(self.through, self._group)
            pass_on(self.through)
            # Set the group's name again, so that the new backend also receives it: torch's flight recorder reads the
            # name from the backend.
            self._named(self.through)
            self.has_hooks = True
        return self.through

    def _named(self, made: dist.ProcessGroup) -> dist.ProcessGroup:
        made._set_group_name(self._group.group_name)
        made._set_group_desc(self._group.group_desc)
        return made

    def _make(self, kind: str, name: str) -> dist.ProcessGroup:
        store = dist.PrefixStore(f"{kind}/", self._store)
        rank = self._group.rank()
        size = self._group.size()
        backend_type = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
        backend = self._backend(name, store, rank, size)
        if isinstance(backend, dist.ProcessGroup):
            # The plug-in returned a Python process group, which can be used directly.
            return backend
        made = dist.ProcessGroup(store, rank, size)
        made._set_default_backend(backend_type)
        made._register_backend(torch.device(kind), backend_type, backend)
        return self._named(made)

    def _backend(self, name: str, store: dist.Store, rank: int, size: int) -> Any:
        if name == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
        if name == "nccl":
            options = self._options
            if not isinstance(options, dist.ProcessGroupNCCL.Options):
                options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        plugin = backend_plugin(name)
        if plugin is None:
            raise UnavailableError(f"backend {name!r} cannot be combined with 'unisono'; nccl, gloo and plug-ins can")
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, self._timeout)
        backend_options = dist.distributed_c10d._DistributedBackendOptions()
        backend_options.store = store
        backend_options.group_rank = rank
        backend_options.group_size = size
        backend_options.timeout = self._timeout
        return plugin.creator_fn(backend_options, self._options)

    def shutdown(self) -> None:
        """Shut down the groups of all devices except the CPU."""
        for made in self._made.values():
            made.shutdown()

    def abort(self) -> None:
        """Abort the groups of all devices except the CPU."""
        for made in self._made.values():
            made.abort()


_EVENTS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""The profiler event name of each method; gloo uses the same names."""


def by_device(method: Callable[..., R]) -> Callable[..., R]:
    """Wrap a method: accept all `CallForms`, and forward calls on accelerator tensors to the group of their device.

    Calls on CPU tensors appear as events in torch's profiler. An asynchronous call's event ends when the call returns.
    """
    event = f"unisono:{_EVENTS.get(method.__name__, method.__name__)}"
    forms = CallForms(method)
    last = _OPTIONS if forms.optioned else (int,)
    Carrier.take(method.__name__)

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> R:
        # Torch's own functions pass lists and an options object, so their calls skip the translation.
        own: Sequence[Any] = args
        if kwargs or not args or (forms.lists and type(args[0]) is not list) or type(args[-1]) not in last:
            own = forms.arguments(args, kwargs)
        first = first_tensor(own)
        kind = "cpu" if first is None else first.device.type
        handled = first is not None and type(first).__torch_dispatch__ is not _PLAIN
        if kind == "cpu":
            # Under `_DisableTorchDispatch`, modes and subclasses are bypassed.
            seen = self.others.has_hooks or ((handled or modes()) and not _excluded(_PYTHON))
        else:
            # A fake or meta tensor needs no backend, but if the group has a backend for the tensor's device, use that
            # backend.
            seen = (handled or kind == "meta") and kind not in self.others.names()
        if seen and not CALLS.making:
            through = self.others.through
            with CALLS.kept() as works:
                ended: R = getattr(through, _present(through, method.__name__))(*args, **kwargs)
            # If the group has hooks, C++ returns an object that can only wait for our `Work`, so return our `Work`
            # itself. Calls with fake tensors create no `Work`.
            return works[-1] if self.others.has_hooks and works else ended
        if kind == "cpu":
            try:
                if profiler._is_profiler_enabled:
                    entered = torch.autograd._record_function_with_args_enter(event, *_given(own))
                    try:
                        return method(self, *own)
                    finally:
                        torch.autograd._record_function_with_args_exit(entered)
                return method(self, *own)
            except CommError as error:
                add_torch_words(error)
                raise
        assert first is not None
        other = self.others.of(first.device)
        carried: R = getattr(other, _present(other, method.__name__))(*args, **kwargs)
        return carried

    return call


def _present(group: dist.ProcessGroup, name: str) -> str:
    """Return the method's name in the installed version of torch."""
    return name if hasattr(group, name) else _OLDER[name]


def _given(arguments: Sequence[object]) -> list[torch.Tensor]:
    """Return a call's input tensors: the second argument if it holds tensors, else the first."""
    return _tensors(next((part for part in reversed(arguments[:2]) if isinstance(part, torch.Tensor | list)), []))


def _tensors(argument: object) -> list[torch.Tensor]:
    """Return all tensors in an argument."""
    if isinstance(argument, list):
        return [tensor for part in argument for tensor in _tensors(part)]
    return [argument] if isinstance(argument, torch.Tensor) else []
