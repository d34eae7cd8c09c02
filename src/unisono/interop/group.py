"""The process group that torch uses: a torch `ProcessGroup` over a unisono communicator."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from unisono.comm.messages import Messages
from unisono.communicator import Communicator, engine_of
from unisono.control.process_exit import close_at_exit
from unisono.core.flight_recorder import called_at
from unisono.core.threads import spawn_thread
from unisono.core.types import Send, Work
from unisono.errors import UnavailableError
from unisono.interop.device_backends import DeviceBackends, by_device
from unisono.interop.dispatched_calls import take_calls
from unisono.interop.error_texts import torch_words
from unisono.interop.from_store import JoinedGroup, meet
from unisono.interop.hooked_calls import with_own_attach
from unisono.interop.options import (
    GroupOptions,
    UnisonoWork,
    asynchronous,
    limit_s,
    only,
    operation,
    plain,
    together,
    unversioned,
)
from unisono.interop.serial_queue import Progress, SerialQueue
from unisono.transports.torch.from_group import MAKERS

__all__ = ["Leaving", "UnisonoGroup"]

_Tensors = list[torch.Tensor]
_Lists = list[list[torch.Tensor]]

# Hide the base class from type checkers: the methods below override torch's methods, whose annotations have other
# parameter names and optional arguments.
_ProcessGroup: Any = dist.ProcessGroup
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class UnisonoGroup(_ProcessGroup):  # type: ignore[misc]
    """Torch process group that uses a unisono communicator. Created by torch; see `register`.

    Any thread may call the group's methods, including autograd's threads. Python callers and torch's C++ code look up
    methods by name. Some names exist only for Python callers, and some only for C++.

    Objects that may outlive the group, such as `Work`s, must not refer to the group: this rank must leave the group as
    soon as the program drops it.

    Args:
        store: Torch's store, used only by this group.
        rank, size: This process's rank in the group, and the group's size.
        timeout: Timeout for joining, and default timeout of every operation.
        group_options: The options that the user requested.
        others_options: The user's options for the backends of other devices.
        connect: Function that creates a communicator of the ranks: `meet`, or another function if the ranks are already
            connected.
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
        connect: Callable[[dist.Store, int, int, float, GroupOptions], JoinedGroup] = meet,
    ) -> None:
        # Torch's documented constructor does not work for Python subclasses, but this undocumented one does.
        super().__init__(rank, size)
        self._timeout_s = timeout.total_seconds()
        # Keep the store's Python object alive: the group refers only to the C++ object, which fails without the Python
        # object.
        self._store = store
        self._name = self._desc = "undefined"
        self._batch: list[UnisonoWork] | None = None
        self._barriers = self._communicators = self._sequence = 0
        # At debug level DETAIL, report differences between ranks before the call returns, as torch's wrapper around
        # gloo does.
        self._detailed = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self.others: DeviceBackends = DeviceBackends(self, store, timeout, others_options)
        self._connect = connect
        with torch_words():
            self._connection = connect(store, rank, size, self._timeout_s, group_options)
        self._comm = self._connection.comm
        self._messages = Messages(engine_of(self._comm))
        label = f"unisono {self._connection.group.name} rank {rank}"
        self._queue = SerialQueue(label)
        self._progress = Progress(f"{label} messages")
        self._leaving = Leaving(self._queue, self._progress, self._comm)
        self._dropped = weakref.finalize(self, self._leaving.drop)
        # `close_at_exit` closes groups that are still open when the process exits, so the finalizer must not run then.
        self._dropped.atexit = False

    # -- identity ------------------------------------------------------------------------------
    def getBackendName(self) -> str:  # noqa: N802
        return "unisono"

    def _get_backend_name(self) -> str:
        # Torch's ShardedTensor chooses its tensors' device by the backend's name, and only the name "gloo" reliably
        # makes it choose the CPU.
        return "unisono" if self.others.names() else "gloo"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def boxed(self) -> Any:
        """Return the group as the TorchScript object that torch's operators take."""
        take_calls(self, self)
        return super().boxed()

    # -- devices -------------------------------------------------------------------------------
    @property
    def _device_types(self) -> list[torch.device]:
        # While torch creates a group, it treats every group that has devices as a C++ group, so return no devices yet.
        return [torch.device(kind) for kind in ("cpu", *self.others.names())] if self.others.known else []

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type not in self.others.names():
            raise RuntimeError(f"this group has no backend for {device.type}")
        return self.others.of(device)._get_backend(device)

    get_backend: Callable[[UnisonoGroup, torch.device], Any] = _get_backend

    # Torch reads these attributes from a backend, and this group is the backend for CPU tensors.
    supports_coalescing = supports_splitting = supports_time_estimate = supports_reconfigure = False
    supports_window = supports_shrinking = use_pg_for_symm_mem_rendezvous = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a hook before each call with CPU tensors. Raises `UnavailableError` before torch 2.14."""
        self.others.hooked().register_pre_hook(hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a hook after each call with CPU tensors, possibly before the call's work is done."""
        self.others.hooked().register_post_hook(hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self.others.hooked().unregister_pre_hook(hook_id)

    def unregister_post_hook(self, hook_id: int) -> None:
        self.others.hooked().unregister_post_hook(hook_id)

    def register_abort_hook(self, hook_id: int, hook: object) -> None:
        """Raise `UnavailableError`: neither unisono nor gloo supports abort hooks."""
        raise UnavailableError("backend 'unisono' has no abort hooks; a call that times out or fails raises an error")

    def reconfigure(self, opts: object = None) -> None:
        """Raise an `UnavailableError` that names unisono's alternative."""
        raise UnavailableError("backend 'unisono' is not reconfigured; use Communicator.from_group(group).rebuild()")

    get_reconfigure_handle: Callable[[UnisonoGroup], None] = reconfigure

    def new_window(self, tensor: torch.Tensor | None = None) -> None:
        """Raise `UnavailableError`: neither unisono nor gloo supports windows."""
        raise UnavailableError("backend 'unisono' has no windows of torch's; send messages, or use un.rpc")

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers start at 0, as in gloo."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def options(self) -> Any:
        """The options that torch reads from a device's backend: the backend's name and the default timeout."""
        return Backend.Options("unisono", timedelta(seconds=self._timeout_s))

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

    # -- collectives and messages: methods that torch calls, with its names and arguments ----------
    # A call returns immediately if torch requests an asynchronous call, or if torch's C++ code makes the call.
    # Collectives run in the order of the calls. If a collective fails after its call has returned, `wait` and the
    # future raise its error.
    # -- reductions ----------------------------------------------------------------------------
    @by_device
    def allreduce(self, tensors: _Tensors, opts: Any = None) -> UnisonoWork:
        tensor = only(tensors, "all_reduce")
        op = operation(opts)
        call = partial(self._comm.all_reduce, tensor, op)
        if tensor.layout != torch.strided:
            call = partial(_sum_sparse, self._comm, tensor, op)
        elif op == "avg" and tensor.dtype in _INTEGERS:
            call = partial(_truncated_mean, self._comm, tensor)
        return self._do(opts, tensors, call)

    @by_device
    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> UnisonoWork:
        op = operation(opts)
        return self._do(opts, tensors, *(partial(self._comm.all_reduce, plain(t), op) for t in tensors))

    @by_device
    def reduce(self, tensors: _Tensors, opts: Any = None) -> UnisonoWork:
        tensor = only(tensors, "reduce")
        op = operation(opts)
        return self._do(opts, tensors, partial(self._comm.reduce, tensor, opts.rootRank, op))

    @by_device
    def reduce_scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> UnisonoWork:
        only(outputs, "reduce_scatter")
        op = operation(opts)
        parts = _row(inputs)
        return self._do(opts, outputs, partial(self._comm.reduce_scatter, plain(outputs[0]), parts, op))

    @by_device
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> UnisonoWork:
        return self._singles(self._comm.reduce_scatter_single, [output], [input], opts, operation(opts))

    @by_device
    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> UnisonoWork:
        return self._singles(self._comm.reduce_scatter_single, outputs, inputs, opts, operation(opts))

    # Don't delegate to another of torch's methods here, because hooks would then run twice.
    def _singles(
        self, call: Callable[..., object], outputs: _Tensors, inputs: _Tensors, opts: Any, *op: str
    ) -> UnisonoWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._do(opts, outputs, *(partial(call, plain(output), plain(t), *op) for output, t in pairs))

    # -- data movement -------------------------------------------------------------------------
    @by_device
    def broadcast(self, tensors: _Tensors, opts: Any = None) -> UnisonoWork:
        tensor = only(tensors, "broadcast")
        return self._do(opts, tensors, partial(self._comm.broadcast, tensor, opts.rootRank))

    @by_device
    def allgather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> UnisonoWork:
        tensor = only(inputs, "all_gather")
        parts = _row(outputs)
        return self._do(opts, outputs[0], partial(self._comm.all_gather, parts, tensor))

    @by_device
    def allgather_coalesced(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> UnisonoWork:
        """Gather rank r's `inputs[i]` into `outputs[r][i]`."""
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        calls = [partial(self._comm.all_gather, [plain(t) for t in column], plain(own)) for column, own in pairs]
        return self._do(opts, [t for row in outputs for t in row], *calls)

    @by_device
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> UnisonoWork:
        return self._singles(self._comm.all_gather_single, [output], [input], opts)

    @by_device
    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> UnisonoWork:
        return self._singles(self._comm.all_gather_single, outputs, inputs, opts)

    @by_device
    def gather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> UnisonoWork:
        tensor = only(inputs, "gather")
        targets = _row_at_root(outputs)
        return self._do(opts, targets or [], partial(self._comm.gather, tensor, targets, opts.rootRank))

    @by_device
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> UnisonoWork:
        """Gather the same number of elements from each rank into one tensor. Called by torch 2.15 and later."""
        comm = self._comm
        tensor = plain(input)
        targets = None
        if opts.rootRank == comm.rank:
            if not output.is_contiguous() or output.numel() != comm.size * tensor.numel():
                raise ValueError(
                    f"gather_tensor must be contiguous, with {comm.size} times the {tensor.numel()} elements of "
                    f"tensor; it has {output.numel()}, in strides {tuple(output.stride())}"
                )
            targets = list(plain(output).view(comm.size, *tensor.shape))
        return self._do(opts, [output], partial(comm.gather, tensor, targets, opts.rootRank))

    @by_device
    def scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> UnisonoWork:
        tensor = only(outputs, "scatter")
        sources = _row_at_root(inputs)
        return self._do(opts, outputs, partial(self._comm.scatter, tensor, sources, opts.rootRank))

    @by_device
    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> UnisonoWork:
        targets = [plain(t) for t in outputs]
        sources = [plain(t) for t in inputs]
        return self._do(opts, outputs, partial(self._comm.all_to_all, targets, sources))

    @by_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> UnisonoWork:
        target = unversioned(output)
        source = plain(input)
        taken = output_split_sizes or None
        given = input_split_sizes or None
        return self._do(opts, [output], partial(self._comm.all_to_all_single, target, source, taken, given))

    # -- barriers ------------------------------------------------------------------------------
    @by_device
    def barrier(self, opts: Any = None) -> dist.Work:
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self.others.of(device).barrier(opts)
        return self._do(opts, [], self._comm.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks through the control plane; the error after a timeout names every missing rank. Blocking.

        A timeout of zero fails immediately.
        """
        self._barriers += 1
        connection = self._connection
        topic = f"monitored barrier {self._barriers}"
        limit = self._timeout_s if timeout is None or timeout < timedelta(0) else timeout.total_seconds()
        with torch_words():
            self._queue.run(lambda: connection.control.exchange(connection.group, topic, None, limit))

    # -- messages ------------------------------------------------------------------------------
    @by_device
    def send(self, tensors: _Tensors, dst: int, tag: int = 0) -> UnisonoWork:
        # Keep torch's name for this method, because torch's `isend` also calls it.
        return self._message(self._messages.post("send", [Send(only(tensors, "send"), dst, tag)]), tensors)

    @by_device
    def recv(self, tensors: _Tensors, src: int, tag: int = 0) -> UnisonoWork:
        return self._message(self._messages.receive("recv", only(tensors, "recv"), src, tag), tensors)

    @by_device
    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> UnisonoWork:
        return self._message(self._messages.receive("recv", only(tensors, "recv"), None, tag), tensors)

    def _message(self, work: Work, tensors: _Tensors) -> UnisonoWork:
        self._progress.watch(work)
        return self._recorded(UnisonoWork(work, tensors))

    # Method names that other versions of torch use.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allreduce_sparse = allreduce
    gather_into_tensor = gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- order ---------------------------------------------------------------------------------
    def _do(self, opts: Any, result: _Tensors, *calls: Callable[..., object]) -> UnisonoWork:
        """Run the calls in order, now or as one queued job. Each call receives its timeout in seconds."""
        limit = limit_s(opts) or self._timeout_s
        self._sequence += 1

        def job() -> None:
            for call in calls:
                call(timeout=limit)

        if not asynchronous(opts) or self._detailed or self._connection.group.size == 1:
            self._queue.run(job)
            return self._recorded(UnisonoWork(None, result))
        # Tensors created in inference mode may only be written in inference mode, and the mode is set per thread.
        inference = torch.is_inference_mode_enabled()

        def there() -> None:
            with torch.inference_mode() if inference else contextlib.nullcontext():
                job()

        queued = self._queue.start(called_at(sys._getframe(), there))
        return self._recorded(UnisonoWork(queued, result, waits=self._connection.control.simulated))

    def _recorded(self, work: UnisonoWork) -> UnisonoWork:
        if self._batch is not None:
            self._batch.append(work)
        return work

    # -- for other parts of the library --------------------------------------------------------
    def make_communicator(
        self, timeout_s: float, chunk_bytes: int, check: Literal["auto", "full", "off"]
    ) -> Communicator:
        """Return a separate communicator of the same ranks, for `Communicator.from_group`. Collective.

        Args:
            timeout_s: Timeout for joining, and default timeout of every operation.
            chunk_bytes, check: As for `unisono.init`.
        """
        self._communicators += 1
        store = dist.PrefixStore(f"communicator {self._communicators}", self._store)
        options = GroupOptions(self._comm.backend, check, chunk_bytes)
        comm = self._connect(store, self.rank(), self.size(), timeout_s, options).comm
        # Like every other communicator, the new one belongs to the first thread that uses it.
        comm.release_thread()
        return comm

    # -- lifetime ------------------------------------------------------------------------------
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Complete pending operations and leave the group, as `dist.destroy_process_group` does. Idempotent."""
        self._dropped.detach()
        self._leaving.leave(self._timeout_s)
        self.others.shutdown()

    def abort(self) -> None:
        """Fail every wait on every rank, and leave the group."""
        self._comm.abort("the torch process group was aborted")
        self.others.abort()
        self.shutdown()


with_own_attach(UnisonoGroup)

_FINISH_WITHIN_S = 30.0
"""Long enough for a collective that other ranks still need, but a short wait if they never join the collective."""
_AT_EXIT_S = 5.0


MAKERS.update({UnisonoGroup: UnisonoGroup.make_communicator})


class Leaving:
    """Teardown of a group's communicator; it does not refer to the group, so that it can outlive the group.

    If ranks are threads of one process, no connection closes when a rank ends, so the other ranks would not notice.
    Therefore, a background thread leaves each group that the program drops.
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
        """Leave the group in a background thread. Takes no lock, because a finalizer calls `drop`."""
        self._dropped = True
        spawn_thread(self.leave, "unisono end of a torch group")

    def on_process_exit(self, error: BaseException | None) -> None:
        """At process exit, wait until the background thread has left the group."""
        if self._dropped:
            self._over.wait(_AT_EXIT_S)


def _sum_sparse(comm: Communicator, tensor: torch.Tensor, op: str, timeout: float | None) -> None:
    """Replace a sparse COO tensor with its sum over all ranks, in place. Blocking.

    Raises `ValueError` for another layout or operation.
    """
    if tensor.layout != torch.sparse_coo or op != "sum":
        raise ValueError(f"only sums of sparse_coo tensors are reduced, not {op} of {tensor.layout}; use to_dense()")
    mine = tensor.detach().coalesce()
    counts = torch.zeros(comm.size, dtype=torch.int64)
    comm.all_gather_single(counts, torch.tensor([mine.values().shape[0]]), timeout=timeout)
    indices = mine.indices().contiguous()
    values = mine.values().contiguous()
    all_indices = [indices.new_empty((indices.shape[0], n)) for n in counts.tolist()]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in counts.tolist()]
    comm.all_gather(all_indices, indices, timeout=timeout)
    comm.all_gather(all_values, values, timeout=timeout)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)


def _truncated_mean(comm: Communicator, tensor: torch.Tensor, timeout: float) -> None:
    """Replace integers with their mean, truncated as in NCCL.

    PyTorch Lightning expects every backend except gloo to average integers.
    """
    comm.all_reduce(tensor, "sum", timeout=timeout)
    tensor.div_(comm.size, rounding_mode="trunc")


def _row(lists: _Lists) -> _Tensors:
    """Return a nested list's single inner list. Reject a tensor, which could be mistaken for a list of its rows."""
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise TypeError(f"the list for all ranks stands in a list, not {[type(row).__name__ for row in lists]}")
    return [plain(t) for t in lists[0]]


def _row_at_root(lists: _Lists) -> _Tensors | None:
    """Return the root's list, or None on other ranks, where torch passes `[]` or `[[]]`."""
    return (_row(lists) or None) if lists else None
