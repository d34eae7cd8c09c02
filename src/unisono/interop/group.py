"""Process group that torch sees: its identity, capabilities and lifetime."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from unisono.communicator import Communicator
from unisono.control.process_exit import close_at_exit
from unisono.core.threads import spawn_thread
from unisono.interop.collectives import Collectives
from unisono.interop.device_backends import DeviceBackends
from unisono.interop.from_store import meet
from unisono.interop.options import GroupOptions, UnisonoWork, together
from unisono.interop.serial_queue import Progress, SerialQueue

__all__ = ["Leaving", "UnisonoGroup"]


class UnisonoGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """Torch process group over a unisono communicator. Torch creates it; see `register`.

    Callable from any thread, as autograd's threads do. Python callers, and torch's C++ code, look up
    methods by name; some names are used by only one of the two.

    Objects that outlive it, such as a work, must not hold it: a dropped group leaves the other ranks immediately.

    Args:
        store: Torch's store, for this group alone.
        rank, size: In this group.
        timeout: Timeout of joining, and default of every operation.
        group_options: The options that the user requested.
        others_options: The user's options for the backends of other devices.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        group_options: GroupOptions,
        *,
        others_options: object = None,
    ) -> None:
        # Of torch's two constructors, the one that it documents is not for classes written in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._timeout_s = timeout.total_seconds()
        # C++ holds only its part of a store, which fails without the Python part, if there is one.
        self._store = store
        self._name = self._desc = "undefined"
        self._batch: list[UnisonoWork] | None = None
        self._barriers = self._communicators = 0
        self.others = DeviceBackends(self, store, timeout, others_options)
        self._connection = meet(store, rank, size, self._timeout_s, group_options)
        label = f"unisono {self._connection.group.name} rank {rank}"
        self._queue = SerialQueue(label)
        self._progress = Progress(f"{label} messages")
        self._leaving = Leaving(self._queue, self._progress, self._connection.comm)
        self._dropped = weakref.finalize(self, self._leaving.drop)
        # The end of the process closes what is open then.
        self._dropped.atexit = False

    # -- identity ------------------------------------------------------------------------------
    def getBackendName(self) -> str:  # noqa: N802
        return "unisono"

    def _get_backend_name(self) -> str:
        # Torch's ShardedTensor queries this to locate its tensors: on the CPU for this name alone.
        return "unisono" if self.others.names() else "gloo"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    # -- what it carries -----------------------------------------------------------------------
    @property
    def _device_types(self) -> list[torch.device]:
        # Torch takes a new group with devices for one that is written in C++.
        return [torch.device(kind) for kind in ("cpu", *self.others.names())] if self.others.known else []

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type not in self.others.names():
            raise RuntimeError(f"this group has no backend for {device.type}")
        return self.others.of(device)._get_backend(device)

    # Methods that torch calls on a backend, which this group is for tensors on the CPU.
    supports_coalescing = supports_splitting = supports_time_estimate = supports_reconfigure = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the communicator counts its calls itself."""

    # -- several calls as one ------------------------------------------------------------------
    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._batch = []
        else:
            self.others.of(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type != "cpu":
            return self.others.of(device)._end_coalescing(device)
        works = self._batch or []
        self._batch = None
        return together(works)

    # -- beside it -----------------------------------------------------------------------------
    def make_communicator(
        self, timeout_s: float, chunk_bytes: int, check: Literal["auto", "full", "off"]
    ) -> Communicator:
        """Return a communicator of the same ranks for `Communicator.from_group`, independent of this group. Collective.

        Args:
            timeout_s: Of joining, and default of every operation.
            chunk_bytes, check: As for `unisono.init`.
        """
        self._communicators += 1
        store = dist.PrefixStore(f"communicator {self._communicators}", self._store)
        options = GroupOptions(self._connection.comm.backend, check, chunk_bytes)
        comm = meet(store, self.rank(), self.size(), timeout_s, options).comm
        # As every other communicator, it belongs to the first thread that uses it.
        comm.release_thread()
        return comm

    # -- life ----------------------------------------------------------------------------------
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Complete pending operations, and leave, as `dist.destroy_process_group` does. Idempotent."""
        self._dropped.detach()
        self._leaving.leave(self._timeout_s)
        self.others.shutdown()

    def abort(self) -> None:
        """End every wait on every rank, and leave."""
        self._connection.comm.abort("the torch process group was aborted")
        self.others.abort()
        self.shutdown()


_FINISH_WITHIN_S = 30.0
"""Long enough for a collective that others still need, short enough for one that they will never join."""
_AT_EXIT_S = 5.0


class Leaving:
    """The end of a group. It knows nothing of the group, and so outlives it.

    Ranks may be threads of one process: then the end of a rank closes no connection, by which the others would notice.
    So a group that is dropped is left in the background.
    """

    def __init__(self, queue: SerialQueue, progress: Progress, comm: Communicator) -> None:
        self._queue = queue
        self._progress = progress
        self._comm = comm
        self._dropped = False
        self._over = threading.Event()
        close_at_exit(self)

    def leave(self, timeout_s: float = _FINISH_WITHIN_S) -> None:
        """Complete pending operations, and notify the other ranks. Idempotent."""
        try:
            self._queue.finish(min(timeout_s, _FINISH_WITHIN_S))
            self._progress.close()
            self._comm.close()
        finally:
            self._over.set()

    def drop(self) -> None:
        """Leave in the background. Takes no lock: a finalizer calls it."""
        self._dropped = True
        spawn_thread(self.leave, "unisono end of a torch group")

    def on_process_exit(self, error: BaseException | None) -> None:
        """Wait, when the process ends, for a departure in the background."""
        if self._dropped:
            self._over.wait(_AT_EXIT_S)
