"""The collectives and messages of a torch process group, carried out by a communicator."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.communicator import Communicator
from unisono.core.flight_recorder import called_at
from unisono.interop.device_backends import DeviceBackends, by_device
from unisono.interop.from_store import JoinedGroup
from unisono.interop.options import UnisonoWork, asynchronous, limit_s, only, operation, plain
from unisono.interop.serial_queue import Progress, SerialQueue

__all__ = ["Collectives", "Lists", "Tensors"]

Tensors = list[torch.Tensor]
Lists = list[list[torch.Tensor]]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Collectives:
    """Methods that torch calls, with its names and arguments; see `torch.distributed` for each.

    A call returns immediately where torch requests it, or its C++ code calls. Collectives run in the order of
    their calls; `wait` and the future raise the errors of those that run later.
    """

    others: DeviceBackends
    _connection: JoinedGroup
    _queue: SerialQueue
    _progress: Progress
    _timeout_s: float
    _batch: list[UnisonoWork] | None
    _barriers: int

    # -- reductions ----------------------------------------------------------------------------
    @by_device
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> UnisonoWork:
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        tensor = only(given, "all_reduce")
        op = operation(opts)
        comm = self._connection.comm
        if tensor.layout != torch.strided:
            return self._do(lambda limit: _sum_sparse(comm, tensor, op, limit), opts, given)
        if op == "avg" and tensor.dtype in _INTEGERS:
            return self._do(lambda limit: _truncated_mean(comm, tensor, limit), opts, given)
        return self._do(lambda limit: comm.all_reduce(tensor, op, timeout=limit), opts, given)

    @by_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> UnisonoWork:
        mine = [plain(t) for t in tensors]
        op = operation(opts)
        comm = self._connection.comm

        def all_of_them(limit: float) -> None:
            for tensor in mine:
                comm.all_reduce(tensor, op, timeout=limit)

        return self._do(all_of_them, opts, tensors)

    @by_device
    def reduce(self, tensors: Tensors, opts: Any) -> UnisonoWork:
        tensor = only(tensors, "reduce")
        op = operation(opts)
        comm = self._connection.comm
        return self._do(lambda limit: comm.reduce(tensor, opts.rootRank, op, timeout=limit), opts, tensors)

    @by_device
    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None) -> UnisonoWork:
        output = only(outputs, "reduce_scatter")
        op = operation(opts)
        comm = self._connection.comm
        parts = [plain(t) for t in inputs[0]]
        return self._do(lambda limit: comm.reduce_scatter(output, parts, op, timeout=limit), opts, outputs)

    @by_device
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> UnisonoWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @by_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> UnisonoWork:
        op = operation(opts)
        comm = self._connection.comm
        pairs = [(plain(output), plain(given)) for output, given in zip(outputs, inputs, strict=True)]

        def all_of_them(limit: float) -> None:
            for output, given in pairs:
                comm.reduce_scatter_single(output, given, op, timeout=limit)

        return self._do(all_of_them, opts, outputs)

    # -- movements -----------------------------------------------------------------------------
    @by_device
    def broadcast(self, tensors: Tensors, opts: Any) -> UnisonoWork:
        tensor = only(tensors, "broadcast")
        comm = self._connection.comm
        return self._do(lambda limit: comm.broadcast(tensor, opts.rootRank, timeout=limit), opts, tensors)

    @by_device
    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> UnisonoWork:
        tensor = only(inputs, "all_gather")
        comm = self._connection.comm
        parts = [plain(t) for t in outputs[0]]
        return self._do(lambda limit: comm.all_gather(parts, tensor, timeout=limit), opts, outputs[0])

    @by_device
    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> UnisonoWork:
        """`outputs[r][i]` becomes rank r's `inputs[i]`."""
        comm = self._connection.comm
        mine = [plain(t) for t in inputs]
        columns = [[plain(t) for t in column] for column in zip(*outputs, strict=True)]

        def all_of_them(limit: float) -> None:
            for column, tensor in zip(columns, mine, strict=True):
                comm.all_gather(column, tensor, timeout=limit)

        return self._do(all_of_them, opts, [t for row in outputs for t in row])

    @by_device
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> UnisonoWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    @by_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> UnisonoWork:
        comm = self._connection.comm
        pairs = [(plain(output), plain(given)) for output, given in zip(outputs, inputs, strict=True)]

        def all_of_them(limit: float) -> None:
            for output, given in pairs:
                comm.all_gather_single(output, given, timeout=limit)

        return self._do(all_of_them, opts, outputs)

    @by_device
    def gather(self, outputs: Lists, inputs: Tensors, opts: Any) -> UnisonoWork:
        tensor = only(inputs, "gather")
        comm = self._connection.comm
        targets = _list_at_root(outputs)
        return self._do(lambda limit: comm.gather(tensor, targets, opts.rootRank, timeout=limit), opts, targets or [])

    @by_device
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> UnisonoWork:
        """Gather as many elements from each rank, one after another: since torch 2.15."""
        tensor = plain(input)
        comm = self._connection.comm
        targets = None
        if opts.rootRank == comm.rank:
            if not output.is_contiguous() or output.numel() != comm.size * tensor.numel():
                raise ValueError(
                    f"gather_tensor must be contiguous, with {comm.size} times the {tensor.numel()} elements of "
                    f"tensor; it has {output.numel()}, in strides {tuple(output.stride())}"
                )
            targets = list(plain(output).view(comm.size, *tensor.shape))
        return self._do(lambda limit: comm.gather(tensor, targets, opts.rootRank, timeout=limit), opts, [output])

    @by_device
    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any) -> UnisonoWork:
        tensor = only(outputs, "scatter")
        comm = self._connection.comm
        sources = _list_at_root(inputs)
        return self._do(lambda limit: comm.scatter(tensor, sources, opts.rootRank, timeout=limit), opts, outputs)

    @by_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> UnisonoWork:
        targets = [plain(t) for t in outputs]
        sources = [plain(t) for t in inputs]
        comm = self._connection.comm
        return self._do(lambda limit: comm.all_to_all(targets, sources, timeout=limit), opts, outputs)

    @by_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> UnisonoWork:
        target = plain(output)
        source = plain(input)
        comm = self._connection.comm
        taken = output_split_sizes or None
        given = input_split_sizes or None
        return self._do(
            lambda limit: comm.all_to_all_single(target, source, taken, given, timeout=limit), opts, [output]
        )

    # -- barriers ------------------------------------------------------------------------------
    @by_device
    def barrier(self, opts: Any = None) -> dist.Work:
        device = getattr(opts, "device", None)
        comm = self._connection.comm
        if device is not None and device.type != "cpu":
            return self.others.of(device).barrier(opts)
        return self._do(lambda limit: comm.barrier(timeout=limit), opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names every missing rank. Blocking; over the control plane.

        A timeout of zero fails immediately.
        """
        self._barriers += 1
        connection = self._connection
        topic = f"monitored barrier {self._barriers}"
        limit = self._timeout_s if timeout is None or timeout < timedelta(0) else timeout.total_seconds()
        self._queue.run(lambda: connection.control.exchange(connection.group, topic, None, limit))

    # -- messages ------------------------------------------------------------------------------
    @by_device
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> UnisonoWork:
        work = self._connection.comm.isend(only(tensors, "send"), dst, tag)
        self._progress.watch(work)
        return self._recorded(UnisonoWork(work, tensors))

    @by_device
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> UnisonoWork:
        work = self._connection.comm.irecv(only(tensors, "recv"), src, tag)
        self._progress.watch(work)
        return self._recorded(UnisonoWork(work, tensors))

    @by_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> UnisonoWork:
        return self.recv(tensors, None, tag)

    # Names by which other versions of torch call the same.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- order ---------------------------------------------------------------------------------
    def _do(self, call: Callable[[float], object], opts: Any, result: Tensors) -> UnisonoWork:
        """Run the call now, or queue it, in order; it receives its timeout in seconds."""
        limit = limit_s(opts) or self._timeout_s
        if not asynchronous(opts) or self._connection.group.size == 1:
            self._queue.run(lambda: call(limit))
            return self._recorded(UnisonoWork(None, result))
        # Tensors made in inference mode may be written in inference mode only, which is a thread's own.
        inference = torch.is_inference_mode_enabled()

        def there() -> None:
            with torch.inference_mode() if inference else contextlib.nullcontext():
                call(limit)

        return self._recorded(UnisonoWork(self._queue.start(called_at(sys._getframe(), there)), result))

    def _recorded(self, work: UnisonoWork) -> UnisonoWork:
        if self._batch is not None:
            self._batch.append(work)
        return work


def _sum_sparse(comm: Communicator, tensor: torch.Tensor, op: str, timeout: float | None) -> None:
    """Make a sparse COO tensor the sum of all ranks' ones, in place. Blocking.

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


def _truncated_mean(comm: Communicator, tensor: torch.Tensor, limit: float) -> None:
    """The mean of integers as NCCL gives it. Lightning asks every backend but gloo for one."""
    comm.all_reduce(tensor, "sum", timeout=limit)
    tensor.div_(comm.size, rounding_mode="trunc")


def _list_at_root(lists: Lists) -> Tensors | None:
    """Torch gives a list of one list at the root, and an empty list (or an empty list in it) elsewhere."""
    return [plain(t) for t in lists[0]] if lists and lists[0] else None
