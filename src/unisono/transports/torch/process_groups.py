"""Torch process groups whose rendezvous uses the control plane's store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.control.torch_store import ControlStore
from unisono.core.control import ControlPlane
from unisono.core.failure import error_of
from unisono.core.group import Group
from unisono.core.threads import DaemonThreadPool
from unisono.core.transport import Options
from unisono.errors import UnavailableError
from unisono.transports.torch.gloo_sockets import Sockets

__all__ = ["backend_of", "backend_plugin", "gloo_options"]

_LOOK_EVERY_S = 0.02
_threads = DaemonThreadPool("unisono torch rendezvous")


def gloo_options(timeout: timedelta, device: Any) -> Any:
    """Return options for a gloo group with two threads. `device` is from `ProcessGroupGloo.create_device`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's annotations
    options._timeout = timeout
    options._devices = [device]
    options._threads = 2
    return options


def backend_plugin(name: str) -> Any:
    """Return torch's entry for a backend that another package registered under this name, or None."""
    return dist.Backend._plugins.get(name.upper())


def backend_of(
    group: Group, control: ControlPlane, store: ControlStore, options: Options, sockets: Sockets, *, lazy: bool
) -> Any:
    """Create a torch process group.

    Args:
        group: The ranks of the process group.
        control: Control plane, which reports ranks that are lost during the rendezvous.
        store: Store for the rendezvous.
        options: Options, as passed to `connect`.
        sockets: Recorder of gloo's sockets.
        lazy: Whether gloo connects each pair of ranks only on first use.

    Raises:
        RuntimeError: Not all ranks joined; the error is torch's own.
    """
    timeout = timedelta(seconds=options.timeout_s)
    if options.backend == "gloo":
        if not dist.is_gloo_available():
            raise UnavailableError("this build of torch has no gloo; use backend='thread', or another build of torch")
        settings = gloo_options(timeout, sockets.listening(lambda: _gloo_device(options.address, lazy)))
        return _met(group, control, lambda: dist.ProcessGroupGloo(store, group.rank, group.size, settings))
    if options.backend == "nccl":
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise UnavailableError("nccl needs a build of torch with CUDA and a GPU for each rank; use backend='gloo'")
        torch.cuda.set_device(options.device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, group.rank, group.size, nccl)
    creator = backend_plugin(options.backend)
    if creator is None:
        raise UnavailableError(f"this build of torch has no backend {options.backend!r}; use 'gloo' or 'thread'")
    return creator.creator_fn(store, group.rank, group.size, timeout)


def _gloo_device(address: str, lazy: bool) -> Any:
    create = dist.ProcessGroupGloo.create_device
    try:
        return create(hostname=address, lazy_init=lazy)
    except TypeError:
        # Older builds of torch lack `lazy_init`, and connect all ranks immediately.
        return create(hostname=address)


def _met(group: Group, control: ControlPlane, make: Callable[[], Any]) -> Any:
    """Run `make` in a thread; return its result. Abandons the thread if a rank dies, which gloo would not notice."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    _threads.run(run)
    while not wait([made], _LOOK_EVERY_S).done:
        cause = control.first_cause(group)
        if cause is not None:
            raise error_of(cause, group)
    return made.result()
