"""The `Communicator`: one interface to every transport that moves bytes between ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final, overload

import torch
from typing_extensions import Unpack

from unisono import serialization
from unisono.collectives.arguments import check_rank
from unisono.collectives.tuning.cost_table import CostTable
from unisono.collectives.tuning.prediction import Choice
from unisono.comm.engine import Engine
from unisono.comm.failures import Failures
from unisono.comm.mailbox import open_mailbox
from unisono.comm.messages import Messages
from unisono.comm.objects import check_sent, decode, encode, encode_each
from unisono.comm.place import Place
from unisono.comm.shape_exchange import run_uneven
from unisono.comm.teardown import CLOSE_S
from unisono.comm.tuner import measured_table
from unisono.core import clock
from unisono.core.collective import COLLECTIVES, family_of
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, raise_caused, to_cause
from unisono.core.flight_recorder import Activity, callers_place
from unisono.core.garbage import weak_method
from unisono.core.group import Group
from unisono.core.step_boundaries import StepBoundaries
from unisono.core.tensors import Buffer, check_apart, check_reducible, check_tensor, parse_op
from unisono.core.transport import HEARTBEAT_LEAST_S, Mailbox, Options, Transport, renewed
from unisono.core.types import Blocking, Message, NonBlocking, Recv, ReduceOp, Send, Timeout, Work
from unisono.core.work import ResultWork, resolve_timeout, seconds_left
from unisono.errors import AbortedError, CommError, MismatchError
from unisono.host.network import host_identity
from unisono.wrappers.consistency import Checked

if TYPE_CHECKING:
    from types import TracebackType

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["BY_HANDLE", "Check", "Communicator", "boundaries_of", "engine_of", "join_part", "replace_transport"]

BY_HANDLE: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
"""This process's communicators, keyed by `handle`: compiled graphs contain the handle and not the object."""

_numbers = itertools.count()

Check = Literal["auto", "full", "off"]

_ALL_REDUCE = COLLECTIVES["all_reduce"]
_BARRIER = COLLECTIVES["barrier"]
_REDUCE = COLLECTIVES["reduce"]
_REDUCE_SCATTER = COLLECTIVES["reduce_scatter"]
_REDUCE_SCATTER_SINGLE = COLLECTIVES["reduce_scatter_single"]
_BROADCAST = COLLECTIVES["broadcast"]
_GATHER = COLLECTIVES["gather"]
_SCATTER = COLLECTIVES["scatter"]
_ALL_GATHER = COLLECTIVES["all_gather"]
_ALL_GATHER_SINGLE = COLLECTIVES["all_gather_single"]
_ALL_TO_ALL = COLLECTIVES["all_to_all"]
_ALL_TO_ALL_SINGLE = COLLECTIVES["all_to_all_single"]


@final
class Communicator(Place):
    """A group of ranks that communicate: point-to-point, collectives, sub-groups, objects.

    You create one with `unisono.init` or `unisono.launch`, with `from_group` around an existing torch process group,
    with `from_mpi` around an MPI communicator, or with `split`, `subgroup` and `dup` of another communicator. All ranks
    that are passed to methods, or returned, are ranks in this communicator. Every call that accepts a CPU tensor also
    accepts NumPy arrays, DLPack objects, buffers such as bytearrays, numbers and lists of numbers. Results can be
    written to all of these types except single numbers and read-only memory. A communicator belongs to the thread that
    first uses it. After a failure that may leave ranks out of step (anything but wrong arguments), the communicator is
    broken: later calls immediately raise the error of the first failure.

    Args:
        transport: A connected transport, one per rank.
        control: This rank's handle to the control plane.
        options: Options of the transport.
        check: "auto" compares all ranks' operations before each collective (on nccl, while the collective runs); "off"
            never compares; "full" also compares shapes and the contents sent and received, and detects tensors that are
            modified before `wait`.
        admission: On a rank that replaces a lost rank, the function that `rebuild` calls to join the other ranks. The
            function takes a deadline on the library's clock, and returns the new communicator.

    Attributes:
        rank, size: This process's rank, and the number of ranks.
        backend: Name of the transport, such as "gloo".
        device: Default device of tensors.
        handle: Key in `BY_HANDLE`, under which compiled graphs find this communicator.

    Example:
        >>> with un.init() as comm:
        ...     t = torch.ones(3)
        ...     comm.all_reduce(t)
        ...     comm, t.tolist()
        (<Communicator thread rank 0 of 1>, [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        transport: Transport,
        control: ControlPlane,
        options: Options,
        *,
        check: Check = "auto",
        admission: Callable[[float], Communicator] | None = None,
    ) -> None:
        if check not in ("auto", "full", "off"):
            raise ValueError(f"check must be 'auto', 'full' or 'off', not {check!r}")
        self._check = check
        self._control = control
        self._options = options
        self._admission = admission
        self._splits = self._rebuilds = self._barriers = self._mailboxes = 0
        self._before_close: list[Callable[[], None]] = []
        # Weak references, because communicators made by `split` live only as long as the program refers to them.
        self._parts: list[weakref.ref[Communicator]] = []
        # The communicator that `rebuild` made from this one.
        self._successor: Communicator | None = None
        group = transport.group
        failures = Failures(transport, control, Activity(group), options.backend)
        control.join(group, weak_method(failures.fail))
        try:
            control.set_heartbeat(options.heartbeat_s or options.timeout_s + HEARTBEAT_LEAST_S)
            self._host_names = self._handshake(transport, group)
        except BaseException:
            transport.close()
            raise
        unchecked = not transport.checks and group.size > 1
        if (check == "full" and not transport.full) or (check == "auto" and unchecked):
            # Calls are compared over extra connections, unless the ranks share a process or the transport compares
            # calls itself.
            from unisono.transports.tcp.collectives import TcpCollectives

            connect = TcpCollectives if control.connectable and not transport.checks else None
            transport = Checked(
                transport, control, options, connect, full=check == "full", report=weak_method(failures.report_later)
            )
            failures.transport = transport
        self._engine = Engine(failures, options, self._host_names, check=check)
        self._messages = Messages(self._engine)
        self._boundaries = control.boundaries(group)
        control.watch(self._engine.activity)
        self.handle: str = f"communicator {next(_numbers)}"
        BY_HANDLE[self.handle] = self

    def _handshake(self, transport: Transport, group: Group) -> Sequence[str]:
        """Agree with the other ranks on common capabilities, and return the name of each rank's host."""
        settings = self._options.chunk_bytes, self._check, self._options.deterministic
        host = self._options.host_of(group.members[group.rank]) or host_identity()
        mine = (host, sorted(transport.native), transport.checks, *settings)
        cards = self._control.exchange_unless_equal(group, "introduction", mine, self._options.timeout_s)
        if cards is None:
            return [mine[0]] * group.size
        for rank, card in enumerate(cards):
            if card[2:] != cards[0][2:]:
                raise MismatchError(
                    f"rank 0 was created with (checks, chunk_bytes, check, deterministic) = {tuple(cards[0][2:])}, "
                    f"rank {rank} with {tuple(card[2:])}; they must be equal",
                    rank=group.rank,
                    size=group.size,
                )
        common = set(cards[0][1]).intersection(*(card[1] for card in cards))
        transport.native = frozenset(common)
        return [card[0] for card in cards]

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each host."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(self._host_names):
            found.setdefault(name, []).append(rank)
        return tuple(map(tuple, found.values()))

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: Timeout = 300.0,
        check: Check = "auto",
        chunk_bytes: int = 2 << 20,
    ) -> Communicator:
        """Return a communicator on top of an existing torch process group, which unisono never destroys.

        Collective over the group: every member calls it. While the communicator is idle, the group's owner may still
        use the group. Sub-groups are created without `dist.new_group`. If the group's backend is `unisono`, the
        communicator gets its own transport, of the same kind as the group's.

        Args:
            group: Group created by `dist.init_process_group` or `dist.new_group`; None for the default group.
            timeout: Default timeout of every operation: seconds or a `timedelta`.
            check: See `init`.
            chunk_bytes: See `init`.

        Raises:
            TypeError, ValueError: `group` is not a group, or this process is not in it.
            CommError: The group's backend cannot be wrapped.
            CommTimeoutError: Not all members called `from_group` in time.

        Example:
            >>> import tempfile, torch.distributed as dist
            >>> dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
            >>> with un.Communicator.from_group() as comm:
            ...     print(comm)
            <Communicator gloo rank 0 of 1>
            >>> with un.Communicator.from_mesh(dist.init_device_mesh("cpu", (1,))) as comm:
            ...     print(comm)
            <Communicator gloo rank 0 of 1>
            >>> dist.destroy_process_group()
        """
        from unisono.transports.torch.from_group import MAKERS, adopt, resolve_group

        group = resolve_group(group)
        timeout_s = resolve_timeout(timeout)
        for kind, make in MAKERS.items():
            if isinstance(group, kind):
                made: Communicator = make(group, timeout_s, chunk_bytes, check)
                return made
        return cls._owning(*adopt(group, timeout_s, chunk_bytes), check)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dim: str | int | None = None, **options: Any) -> Communicator:
        """Return a communicator over one dimension of a torch `DeviceMesh`; see `from_group`.

        Args:
            mesh: A mesh from `torch.distributed.init_device_mesh`.
            dim: Name or number of the dimension; may be None if there is only one.
            options: Arguments of `from_group`.
        """
        return cls.from_group(mesh.get_group(dim), **options)

    @classmethod
    def from_mpi(
        cls, comm: Any, *, timeout: Timeout = 300.0, check: Check = "auto", chunk_bytes: int = 2 << 20
    ) -> Communicator:
        """Return a communicator on top of an existing MPI communicator, which unisono never frees.

        Collective over `comm`: every member calls this. The owner of `comm` may use it at any time, because unisono
        sends messages on separate MPI communicators.

        Args:
            comm: An mpi4py intracommunicator, such as `MPI.COMM_WORLD`.
            timeout: Default timeout of every operation: seconds or a `timedelta`.
            check: See `init`.
            chunk_bytes: See `init`.

        Raises:
            UnavailableError: mpi4py or an MPI library is missing.
            CommTimeoutError: Not all members called `from_mpi` in time.
        """
        from unisono.transports.mpi.transport import adopt

        return cls._owning(*adopt(comm, resolve_timeout(timeout), chunk_bytes), check)

    @classmethod
    def _owning(
        cls, transport: Transport, control: ControlPlane, options: Options, release: Callable[[], None], check: Check
    ) -> Communicator:
        """Return a communicator that calls `release` when it is closed; if it cannot be created, call `release` now."""
        try:
            made = cls(transport, control, options, check=check)
        except BaseException:
            release()
            raise
        made.after_close(release)
        return made

    # -- the communicator itself -----------------------------------------------------------------
    @property
    def is_replacement(self) -> bool:
        """Whether this rank replaces a lost one and has yet to join the other ranks by calling `rebuild`.

        True only under `launch(..., on_failure="replace")`; False for the communicator that `rebuild` returns.
        """
        return self._admission is not None

    def exception(self) -> CommError | None:
        """Return the error that further calls would raise; None while calls can be made."""
        return self._engine.failures.error()

    @property
    def overlaps(self) -> bool:
        """Return whether asynchronous collectives progress during the caller's computation without slowing it much."""
        transport = self._engine.transport
        return (transport.overlaps or transport.background) and not self._options.deterministic

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised tensor in the memory that this backend reduces fastest. Collective.

        The memory remains valid as long as a tensor refers to it, even after `close`.

        Args:
            shape: Sizes of the dimensions, or the number of elements.
            dtype: Dtype of the elements.

        Example:
            >>> def program(comm):
            ...     t = comm.empty((2, 3)).fill_(comm.rank)
            ...     comm.all_reduce(t)
            ...     return t.sum().item()
            >>> un.launch(program, nprocs=3, backend="shm")
            [18.0, 18.0, 18.0]
        """
        self._engine.enter("empty")
        return self._engine.transport.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    # -- collectives that reduce, and the barrier ------------------------------------------------
    @overload
    def all_reduce(
        self, tensor: Buffer, op: str | ReduceOp = ..., *, scale: float | None = ..., **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_reduce(
        self, tensor: Buffer, op: str | ReduceOp = ..., *, scale: float | None = ..., **how: Unpack[NonBlocking]
    ) -> Work: ...
    def all_reduce(
        self,
        tensor: Buffer,
        op: str | ReduceOp = "sum",
        *,
        scale: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Replace every rank's tensor with the sum (or `op`) of all ranks' tensors, bitwise identical on all ranks.

        Collective. The operation is in place. Tensors may have any strides; their number of elements n must be the same
        on all ranks.

        Args:
            tensor: Any dtype that torch can reduce with `op`; a sum of bools is "or".
            op: sum, avg, product, min, max (NaN wins), band, bor or bxor.
            scale: Factor applied to each contribution, in the tensor's dtype (torch's PREMUL_SUM), for "sum" and "avg"
                of floating-point and complex dtypes. Must be the same on all ranks. With a scale, the tensor is copied.
            algorithm: "auto" for the algorithm with the lowest predicted time (see `plan`); a name from
                `unisono.collectives.algorithms.all_reduce` ("ring", "double_binary_tree:segments=8", ...); or "native"
                if the backend has a native collective. With None, the native collective if there is one, and otherwise
                the algorithm that is cheapest at the backend's nominal latency and bandwidth. With "fewest_bytes", the
                native collective if possible, and otherwise the algorithm that sends the fewest bytes.
            async_op: Return a `Work` immediately; the tensor belongs to it until `wait` returns.
            timeout: Seconds or a `timedelta`; the communicator's timeout if None.

        Returns: With `async_op`, the `Work` in flight; otherwise None, once the collective is done.

        Raises:
            MismatchError: Ranks disagree on collective, `op`, dtype, n, algorithm or scale; no data moved.
            ValueError: A dtype that `op` or `scale` does not support, memory that overlaps itself, or an unknown
                algorithm.
            CommTimeoutError, PeerLostError: See `unisono.errors`; the communicator is then broken.

        Cost: with p ranks, at least ceil(log2 p) rounds; each rank sends at least 2(p-1)/p of the tensor's bytes.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([1.0, 2.0]) * (comm.rank + 1)
            ...     comm.all_reduce(t, algorithm="ring")
            ...     return t.tolist()
            >>> un.launch(program, nprocs=4, backend="thread")[3]
            [10.0, 20.0]
        """
        if scale is None:
            return self._engine.run_fast(_ALL_REDUCE, tensor, None, op, None, algorithm, timeout, async_op)
        return self._engine.run(_ALL_REDUCE, tensor, None, op, None, algorithm, timeout, async_op, scale=scale)

    @overload
    def reduce(self, tensor: Buffer, op: str | int = ..., dst: int | str = ..., **how: Unpack[Blocking]) -> None: ...
    @overload
    def reduce(self, tensor: Buffer, op: str | int = ..., dst: int | str = ..., **how: Unpack[NonBlocking]) -> Work: ...
    def reduce(
        self,
        tensor: Buffer,
        op: Any = "sum",
        dst: Any = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Replace rank `dst`'s tensor with the sum (or `op`) of all ranks' tensors; the other tensors remain unchanged.

        Collective. The operation is in place on rank `dst`.

        Args:
            tensor, op: See `all_reduce`.
            dst: The rank that gets the result; 0 by default. As in torch, `dst` may also come before `op`:
                `reduce(tensor, 1, "max")`.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([comm.rank + 1])
            ...     comm.reduce(t, dst=1, op="max")
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, 3, 3]
        """
        op, dst = (dst or "sum", op) if isinstance(op, int) else (op, dst)
        return self._engine.run_fast(_REDUCE, tensor, None, op, dst, algorithm, timeout, async_op)

    @overload
    def reduce_scatter(
        self,
        output: Buffer,
        input_list: Sequence[Buffer],
        op: str | ReduceOp = ...,
        **how: Unpack[Blocking],
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, output: Buffer, input_list: Sequence[Buffer], op: str | ReduceOp = ..., **how: Unpack[NonBlocking]
    ) -> Work: ...
    def reduce_scatter(
        self,
        output: Buffer,
        input_list: Sequence[Buffer],
        op: str | ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Write the sum (or `op`) of every rank's `input_list[r]` to `output` on rank r.

        Collective. The list's entries may differ in length, but entry r must have the same length on every rank. The
        inputs remain unchanged.

        Args:
            output: On rank r, any shape and strides, with as many elements as `input_list[r]`.
            input_list: One tensor per rank, of the same dtype.
            op: See `all_reduce`.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, each rank sends (p-1)/p of its inputs' bytes, and copies its inputs once.

        Example:
            >>> def program(comm):
            ...     out = torch.zeros(1)
            ...     comm.reduce_scatter(out, [torch.tensor([10.0 * r]) for r in range(comm.size)])
            ...     return out.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [0.0, 20.0]
        """
        return self._engine.run_fast(_REDUCE_SCATTER, output, input_list, op, None, algorithm, timeout, async_op)

    @overload
    def reduce_scatter_single(
        self, output: Buffer, input: Buffer, op: str | ReduceOp = ..., **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def reduce_scatter_single(
        self, output: Buffer, input: Buffer, op: str | ReduceOp = ..., **how: Unpack[NonBlocking]
    ) -> Work: ...
    def reduce_scatter_single(
        self,
        output: Buffer,
        input: Buffer,
        op: str | ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Sum all ranks' inputs (or combine them with `op`), and write part r of the result to `output` on rank r.

        Works like `reduce_scatter`, except that each rank's inputs are parts of one tensor.

        Args:
            output: Any shape and strides, with the same number of elements on every rank.
            input: Tensor of the same dtype, with p times as many elements for p ranks; the first part is for rank 0.
            op: See `all_reduce`.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Example:
            >>> def program(comm):
            ...     out = torch.zeros(2)
            ...     comm.reduce_scatter_single(out, torch.arange(4.0))
            ...     return out.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0.0, 2.0], [4.0, 6.0]]
        """
        return self._engine.run_fast(_REDUCE_SCATTER_SINGLE, output, input, op, None, algorithm, timeout, async_op)

    @overload
    def barrier(self, **how: Unpack[Blocking]) -> None: ...
    @overload
    def barrier(self, **how: Unpack[NonBlocking]) -> Work: ...
    def barrier(
        self, *, algorithm: str | None = None, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Wait until every rank has reached the barrier. Collective.

        Args:
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, ceil(log2 p) rounds of one byte.
        """
        return self._engine.run_fast(_BARRIER, None, None, None, None, algorithm, timeout, async_op)

    def agree(self, value: Any, name: str) -> None:
        """Register a value that must be equal on all ranks; the next collective checks that it is.

        All ranks call `agree` in the same order. `agree` itself sends nothing, but records the value as it is now. This
        thread's next collective on this communicator, or on another communicator of the same ranks, compares a digest
        of the recorded value. `flush_agreements`, `barrier` and `close` compare all pending values. Values are equal if
        they have the same types, shapes, dtypes and bits; dicts and sets may be in any order, and tensors on any
        device. With `check="off"`, only `flush_agreements` and `close` compare the values.

        Args:
            value: Number, string, tensor, array, module, optimizer or dataclass, or a container of these.
            name: Name of the value in errors.

        Raises:
            TypeError: The value contains a type that cannot be compared.
            MismatchError: Ranks have different values, or a rank has not called `agree`. The collective that compares
                the values raises this error on every rank; `close` may raise it on one rank only. The error names the
                first differing element and which ranks have which value, or the rank that has not called `agree`.

        Cost: in this call, about 10 us plus the time to hash the value; in the next collective, about 0.1 ms.

        Example:
            >>> def program(comm):
            ...     comm.agree({"lr": 0.1 * (1 + comm.rank)}, "settings")
            ...     comm.barrier()
            >>> un.launch(program, 2, "thread")
            Traceback (most recent call last):
            ...
            unisono.errors.MismatchError: ...ranks differ in 'settings', at ['lr']: rank 0: 0.1; rank 1: 0.2...
        """
        self._engine.enter("agree")
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        if self.size > 1:
            self._engine.agreements.add(value, name)

    def flush_agreements(self, timeout: Timeout | None = None) -> None:
        """Compare the values passed to `agree` right away. Collective. If they differ, the communicator remains usable.

        Args:
            timeout: Seconds or a `timedelta`; the communicator's timeout if None.

        Raises:
            MismatchError: Values differ; see `agree`. Raised on every rank.

        Cost: a barrier, and a round trip to the control plane.

        Example:
            >>> def program(comm):
            ...     comm.agree(comm.size, "ranks")
            ...     comm.flush_agreements()
            >>> un.launch(program, 2, "thread")
            [None, None]
        """
        self._engine.flush_agreements(_BARRIER, timeout)

    def monitored_barrier(self, timeout: Timeout | None = None) -> None:
        """Run a barrier over the control plane; on timeout, name every missing rank and what it is doing.

        Collective. This barrier sends nothing over the backend, so you can use it even when you suspect a fault in the
        backend. `barrier` also names missing ranks, but perhaps not all of them; this method finds all, at the cost of
        a round trip to the control plane.

        Args:
            timeout: Seconds or a `timedelta`; the communicator's timeout if None.

        Raises:
            CommTimeoutError: Ranks are missing. Raised on every rank that has joined; the error says what each missing
                rank is doing.
            PeerLostError: One of the ranks is gone.

        Example:
            >>> un.launch(lambda comm: comm.monitored_barrier(timeout=5), nprocs=3, backend="thread")
            [None, None, None]
        """
        self._engine.enter("monitored_barrier")
        engine = self._engine
        limit = resolve_timeout(timeout, self._engine.options.timeout_s)
        self._barriers += 1
        record = "monitored_barrier", None, "", callers_place()
        engine.activity.note(*record)
        engine.activity.enter(*record)
        try:
            self._control.exchange(engine.group, f"monitored_barrier #{self._barriers}", None, limit)
        except CommError as error:
            raise_caused(engine.failures.report(error, "monitored_barrier", self._barriers), error)
        finally:
            engine.activity.leave()

    # -- collectives with a root, of any dtype ---------------------------------------------------
    @overload
    def broadcast(self, tensor: Buffer, src: int, **how: Unpack[Blocking]) -> None: ...
    @overload
    def broadcast(self, tensor: Buffer, src: int, **how: Unpack[NonBlocking]) -> Work: ...
    def broadcast(
        self,
        tensor: Buffer,
        src: int,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Replace every rank's tensor with rank `src`'s.

        Collective. The operation is in place. Raises the same errors as `all_reduce`.

        Args:
            tensor: Any shape and strides; the same number of elements and dtype on every rank.
            src: The rank whose tensor is sent.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.tensor([comm.rank])
            ...     comm.broadcast(t, src=1)
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, 1, 1]
        """
        return self._engine.run_fast(_BROADCAST, tensor, None, None, src, algorithm, timeout, async_op)

    @overload
    def scatter(
        self, tensor: Buffer, scatter_list: Sequence[Buffer] | None, src: int, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def scatter(
        self, tensor: Buffer, scatter_list: Sequence[Buffer] | None, src: int, **how: Unpack[NonBlocking]
    ) -> Work: ...
    def scatter(
        self,
        tensor: Buffer,
        scatter_list: Sequence[Buffer] | None = None,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """On rank r, receive `scatter_list[r]` from rank `src` into `tensor`; only `src` passes a list.

        Collective.

        Args:
            tensor: Any shape and strides; the same number of elements on every rank.
            scatter_list: On rank `src`, one tensor per rank, each with the length and dtype of `tensor`; None on the
                other ranks.
            src: The rank that sends.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     t = torch.zeros(1)
            ...     comm.scatter(t, [torch.tensor([float(r)]) for r in range(3)] if comm.rank == 0 else None)
            ...     return t.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [0.0, 1.0, 2.0]
        """
        return self._engine.run_fast(_SCATTER, tensor, scatter_list, None, src, algorithm, timeout, async_op)

    @overload
    def gather(
        self, tensor: Buffer, gather_list: Sequence[Buffer] | None, dst: int, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def gather(
        self, tensor: Buffer, gather_list: Sequence[Buffer] | None, dst: int, **how: Unpack[NonBlocking]
    ) -> Work: ...
    def gather(
        self,
        tensor: Buffer,
        gather_list: Sequence[Buffer] | None = None,
        dst: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """On rank `dst`, receive the tensor of each rank r into `gather_list[r]`; only `dst` passes a list.

        Collective.

        Args:
            tensor: Any shape and strides; the same number of elements on every rank.
            gather_list: On rank `dst`, one tensor per rank, each with the length and dtype of `tensor`; None on the
                other ranks.
            dst: The rank that receives.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, ceil(log2 p) rounds.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(1) for _ in range(3)] if comm.rank == 2 else None
            ...     comm.gather(torch.tensor([float(comm.rank)]), out, dst=2)
            ...     return out and [t.item() for t in out]
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, None, [0.0, 1.0, 2.0]]
        """
        return self._engine.run_fast(_GATHER, gather_list, tensor, None, dst, algorithm, timeout, async_op)

    # -- collectives among all ranks, of any dtype -----------------------------------------------
    @overload
    def all_gather(self, tensor_list: Sequence[Buffer], tensor: Buffer, **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_gather(self, tensor_list: Sequence[Buffer], tensor: Buffer, **how: Unpack[NonBlocking]) -> Work: ...
    def all_gather(
        self,
        tensor_list: Sequence[Buffer],
        tensor: Buffer,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """On every rank, receive the tensor of each rank r into `tensor_list[r]`.

        Collective. The ranks' tensors may differ in length, but every rank must know all lengths.

        Args:
            tensor_list: One tensor per rank, of any shape and strides; entry r has as many elements as rank r's tensor.
            tensor: This rank's tensor, of the same dtype.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, each rank sends (p-1)/p of the list's bytes.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(r + 1) for r in range(comm.size)]
            ...     comm.all_gather(out, torch.full((comm.rank + 1,), float(comm.rank)))
            ...     return [t.tolist() for t in out]
            >>> un.launch(program, nprocs=2, backend="thread")[0]
            [[0.0], [1.0, 1.0]]
        """
        return self._engine.run_fast(_ALL_GATHER, tensor_list, tensor, None, None, algorithm, timeout, async_op)

    @overload
    def all_gather_single(self, output: Buffer, input: Buffer, **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_gather_single(self, output: Buffer, input: Buffer, **how: Unpack[NonBlocking]) -> Work: ...
    def all_gather_single(
        self,
        output: Buffer,
        input: Buffer,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Like `all_gather`, but receive the tensors of all ranks into one tensor, rank 0's first.

        Args:
            output: Any shape and strides, with p times as many elements as `input` for p ranks, of the same dtype.
            input: This rank's tensor, of any shape and strides; the same number of elements on every rank.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Example:
            >>> def program(comm):
            ...     out = torch.zeros(2, 2)
            ...     comm.all_gather_single(out, torch.tensor([1.0, 2.0]) + 10 * comm.rank)
            ...     return out.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")[0]
            [[1.0, 2.0], [11.0, 12.0]]
        """
        return self._engine.run_fast(_ALL_GATHER_SINGLE, output, input, None, None, algorithm, timeout, async_op)

    @overload
    def all_to_all(
        self, output_list: Sequence[Buffer], input_list: Sequence[Buffer], **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_to_all(
        self, output_list: Sequence[Buffer], input_list: Sequence[Buffer], **how: Unpack[NonBlocking]
    ) -> Work: ...
    def all_to_all(
        self,
        output_list: Sequence[Buffer],
        input_list: Sequence[Buffer],
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """On every rank r, receive rank s's `input_list[r]` into `output_list[s]`, for all ranks s.

        Collective. Lengths are arbitrary, as long as sender and receiver agree.

        Args:
            output_list: One tensor per rank, of any shape and strides; entry s has as many elements as rank s sends to
                this rank.
            input_list: One tensor per rank, of the same dtype; entry r is sent to rank r.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Cost: with p ranks, each rank sends (p-1)/p of its inputs' bytes.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(1) for _ in range(comm.size)]
            ...     comm.all_to_all(out, [torch.tensor([10.0 * comm.rank + r]) for r in range(comm.size)])
            ...     return [t.item() for t in out]
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0.0, 10.0], [1.0, 11.0]]
        """
        return self._engine.run_fast(_ALL_TO_ALL, output_list, input_list, None, None, algorithm, timeout, async_op)

    @overload
    def all_to_all_single(
        self,
        output: Buffer,
        input: Buffer,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: Buffer,
        input: Buffer,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[NonBlocking],
    ) -> Work: ...
    def all_to_all_single(
        self,
        output: Buffer,
        input: Buffer,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Exchange rows of one tensor: each rank sends some rows of `input` to every rank.

        Works like `all_to_all`, except that the parts are rows of one tensor.

        Args:
            output: Any shape with at least one dimension; the rows of rank 0 come first.
            input: Tensor of the same dtype; its first rows are sent to rank 0.
            output_split_sizes: Number of rows of `output` to receive from each rank; if None, the same number from
                each.
            input_split_sizes: Number of rows of `input` to send to each rank; if None, the same number to each.
            algorithm, async_op, timeout: See `all_reduce`.

        Returns: See `all_reduce`.

        Example:
            >>> def program(comm):
            ...     mine, out = torch.arange(3) + 10 * comm.rank, torch.zeros(2 + comm.rank * 2, dtype=torch.int64)
            ...     comm.all_to_all_single(out, mine, [1 + comm.rank] * 2, [1, 2])
            ...     return out.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0, 10], [1, 2, 11, 12]]
        """
        splits = output_split_sizes, input_split_sizes
        if splits == (None, None):
            return self._engine.run_fast(_ALL_TO_ALL_SINGLE, output, input, None, None, algorithm, timeout, async_op)
        return self._engine.run(
            _ALL_TO_ALL_SINGLE, output, input, None, None, algorithm, timeout, async_op, splits=splits
        )

    # -- collectives of tensors whose lengths other ranks need not know --------------------------
    @overload
    def all_gather_v(self, tensor: Buffer, **how: Unpack[Blocking]) -> list[torch.Tensor]: ...
    @overload
    def all_gather_v(self, tensor: Buffer, **how: Unpack[NonBlocking]) -> ResultWork[list[torch.Tensor]]: ...
    def all_gather_v(
        self,
        tensor: Buffer,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> list[torch.Tensor] | ResultWork[list[torch.Tensor]]:
        """Return the tensors of all ranks, in rank order. No rank needs to know the other ranks' lengths.

        Collective. Cost: an all_gather of the tensors, and another of 18 numbers per rank.

        Args:
            tensor: Tensor of at most 16 dimensions; the size of the first dimension may differ between ranks.
            algorithm: Name of an all_gather algorithm; see `all_reduce`.
            async_op: Return a `ResultWork` immediately; its `result()` waits for the tensors, and returns them.
                `tensor` belongs to the `ResultWork` until `result` has returned.
            timeout: Seconds or a `timedelta`, once for the exchange of shapes and once for the tensors; the
                communicator's timeout if None.

        Returns: New contiguous tensors, one for each rank; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError: Tensors differ between ranks in dtype, or in a dimension other than the first; no data moved.
            ValueError: More than 16 dimensions, or a tensor that cannot be sent.

        Example:
            >>> def program(comm):
            ...     return [t.tolist() for t in comm.all_gather_v(torch.arange(comm.rank))]
            >>> un.launch(program, nprocs=3, backend="thread")[1]
            [[], [0], [0, 1]]
        """
        found: list[torch.Tensor] | ResultWork[list[torch.Tensor]] = run_uneven(
            self._engine, COLLECTIVES["all_gather_v"], tensor, None, algorithm, async_op, timeout
        )
        return found

    @overload
    def gather_v(self, tensor: Buffer, dst: int = ..., **how: Unpack[Blocking]) -> list[torch.Tensor] | None: ...
    @overload
    def gather_v(
        self, tensor: Buffer, dst: int = ..., **how: Unpack[NonBlocking]
    ) -> ResultWork[list[torch.Tensor] | None]: ...
    def gather_v(
        self,
        tensor: Buffer,
        dst: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> list[torch.Tensor] | ResultWork[list[torch.Tensor] | None] | None:
        """Return the tensors of all ranks, in rank order, on rank `dst`; None on the other ranks.

        Collective. Cost: a gather of the tensors, and an all_gather of 18 numbers per rank.

        Args:
            tensor: Tensor of at most 16 dimensions; the size of the first dimension may differ between ranks.
            dst: The rank that receives.
            algorithm: Name of a gather algorithm; see `all_reduce`.
            async_op, timeout: See `all_gather_v`.

        Returns: On rank `dst`, new contiguous tensors, one for each rank; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError, ValueError: See `all_gather_v`. `MismatchError` is also raised if ranks differ in `dst`.

        Example:
            >>> def program(comm):
            ...     found = comm.gather_v(torch.arange(comm.rank), dst=1)
            ...     return found and [t.tolist() for t in found]
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, [[], [0], [0, 1]], None]
        """
        found: list[torch.Tensor] | ResultWork[list[torch.Tensor] | None] | None = run_uneven(
            self._engine, COLLECTIVES["gather_v"], tensor, dst, algorithm, async_op, timeout
        )
        return found

    @overload
    def scatter_v(
        self, tensors: Sequence[Buffer] | None = ..., src: int = ..., **how: Unpack[Blocking]
    ) -> torch.Tensor: ...
    @overload
    def scatter_v(
        self, tensors: Sequence[Buffer] | None = ..., src: int = ..., **how: Unpack[NonBlocking]
    ) -> ResultWork[torch.Tensor]: ...
    def scatter_v(
        self,
        tensors: Sequence[Buffer] | None = None,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> torch.Tensor | ResultWork[torch.Tensor]:
        """Return this rank's tensor from rank `src`'s list; only `src` needs to know shapes and dtype.

        Collective. Cost: a scatter of the tensors, and a broadcast of 18 numbers per rank.

        Args:
            tensors: On rank `src`, one tensor per rank, of at most 16 dimensions, equal in all but the first dimension;
                None on the other ranks.
            src: The rank that sends.
            algorithm: Name of a scatter algorithm; see `all_reduce`.
            async_op, timeout: See `all_gather_v`.

        Returns: A new contiguous tensor, on the communicator's device; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError: Ranks differ in `src` or algorithm; no data moved.
            TypeError, ValueError: Rank `src` has no list, or a list that cannot be sent. Raised on every rank; no data
                moved.

        Example:
            >>> def program(comm):
            ...     return comm.scatter_v([torch.arange(r) for r in range(3)] if comm.rank == 0 else None).tolist()
            >>> un.launch(program, nprocs=3, backend="thread")
            [[], [0], [0, 1]]
        """
        found: torch.Tensor | ResultWork[torch.Tensor] = run_uneven(
            self._engine, COLLECTIVES["scatter_v"], tensors, src, algorithm, async_op, timeout
        )
        return found

    @overload
    def all_to_all_v(self, tensors: Sequence[Buffer], **how: Unpack[Blocking]) -> list[torch.Tensor]: ...
    @overload
    def all_to_all_v(self, tensors: Sequence[Buffer], **how: Unpack[NonBlocking]) -> ResultWork[list[torch.Tensor]]: ...
    def all_to_all_v(
        self,
        tensors: Sequence[Buffer],
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> list[torch.Tensor] | ResultWork[list[torch.Tensor]]:
        """Send `tensors[r]` to each rank r, and return the tensors received from all ranks, in rank order.

        Collective. Cost: an all_to_all of the tensors, and another of 18 numbers per rank.

        Args:
            tensors: One tensor per rank, of at most 16 dimensions; the size of the first dimension may differ between
                tensors.
            algorithm: Name of an all_to_all algorithm; see `all_reduce`.
            async_op, timeout: See `all_gather_v`.

        Returns: New contiguous tensors, one for each rank; with `async_op`, the `ResultWork` in flight.

        Raises:
            MismatchError, ValueError: See `all_gather_v`.

        Example:
            >>> def program(comm):
            ...     return [t.tolist() for t in comm.all_to_all_v([torch.full((r,), comm.rank) for r in range(3)])]
            >>> un.launch(program, nprocs=3, backend="thread")
            [[[], [], []], [[0], [1], [2]], [[0, 0], [1, 1], [2, 2]]]
        """
        found: list[torch.Tensor] | ResultWork[list[torch.Tensor]] = run_uneven(
            self._engine, COLLECTIVES["all_to_all_v"], tensors, None, algorithm, async_op, timeout
        )
        return found

    # -- collectives of Python values ------------------------------------------------------------
    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, trusted: bool = False, timeout: Timeout | None = None
    ) -> Any:
        """Return rank `src`'s value on every rank. Collective.

        Args:
            obj: The value on rank `src`: None, bool, number, string, bytes, container, dataclass, enum or tensor.
            src: The rank that sends.
            trusted: Whether to allow every type that cloudpickle supports, which lets peers run code on this rank. Must
                be the same on all ranks.
            timeout: Seconds or a `timedelta`, once for the exchange of lengths and once for the values; the
                communicator's timeout if None.

        Raises:
            TypeError: The value cannot be sent; raised on all ranks.
            ValueError: A rank sent a pickled value, and this rank did not pass `trusted=True`.

        Example:
            >>> un.launch(lambda comm: comm.broadcast_object({"lr": 0.1 + comm.rank}), nprocs=2, backend="thread")
            [{'lr': 0.1}, {'lr': 0.1}]
        """
        self._engine.enter("broadcast_object")
        check_rank(src, "src", self.size)
        data = encode(obj, self.rank, trusted) if self.rank == src else b""
        length = torch.tensor([len(data)], device=self.device)
        self.broadcast(length, src, timeout=timeout)
        blank = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        buffer = self._bytes(data) if self.rank == src else blank
        self.broadcast(buffer, src, timeout=timeout)
        check_sent(data)
        return obj if self.rank == src else decode(buffer, trusted)

    def all_gather_object(self, obj: Any, *, trusted: bool = False, timeout: Timeout | None = None) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Collective.

        Args:
            obj: This rank's value, of a type that `broadcast_object` accepts.
            trusted, timeout: See `broadcast_object`.

        Raises:
            TypeError, ValueError: See `broadcast_object`.

        Example:
            >>> un.launch(lambda comm: comm.all_gather_object(comm.rank * "x"), nprocs=3, backend="thread")[0]
            ['', 'x', 'xx']
        """
        self._engine.enter("all_gather_object")
        data = self._bytes(encode(obj, self.rank, trusted))
        # Use two fast-path calls, because all_gather_v has no fast path, and checkpoints call this often.
        lengths = data.new_empty(self.size, dtype=torch.int64)
        self.all_gather_single(lengths, lengths.new_tensor([data.numel()]), timeout=timeout)
        counts = lengths.tolist()
        buffers = data.new_empty(sum(counts)).split(counts)
        self.all_gather(buffers, data, timeout=timeout)
        return [decode(buffer, trusted) for buffer in buffers]

    def gather_object(
        self, obj: Any, dst: int = 0, *, trusted: bool = False, timeout: Timeout | None = None
    ) -> list[Any] | None:
        """Return every rank's value, in rank order, on rank `dst`; None on the other ranks. Collective.

        Args:
            obj: This rank's value, of a type that `broadcast_object` accepts.
            dst: The rank that receives.
            trusted, timeout: See `broadcast_object`.

        Raises:
            TypeError, ValueError: See `broadcast_object`. Raised on rank `dst`; a `TypeError` also on a rank whose
                value cannot be sent.

        Example:
            >>> un.launch(lambda comm: comm.gather_object({"rank": comm.rank}, dst=1), nprocs=2, backend="thread")
            [None, [{'rank': 0}, {'rank': 1}]]
        """
        self._engine.enter("gather_object")
        check_rank(dst, "dst", self.size)
        data = encode(obj, self.rank, trusted)
        gathered = self.gather_v(self._bytes(data), dst, timeout=timeout)
        check_sent(data)
        return None if gathered is None else [decode(part, trusted) for part in gathered]

    def scatter_object(
        self, objs: Sequence[Any] | None = None, src: int = 0, *, trusted: bool = False, timeout: Timeout | None = None
    ) -> Any:
        """Return this rank's entry of rank `src`'s list; only `src` passes a list. Collective.

        Args:
            objs: On rank `src`, one value per rank, as for `broadcast_object`; None on the other ranks.
            src: The rank that sends.
            trusted, timeout: See `broadcast_object`.

        Raises:
            TypeError: A value cannot be sent; raised on all ranks.
            ValueError: The list does not have one value for each rank; raised on all ranks.

        Example:
            >>> def program(comm):
            ...     return comm.scatter_object(["first", "second"] if comm.rank == 0 else None)
            >>> un.launch(program, nprocs=2, backend="thread")
            ['first', 'second']
        """
        self._engine.enter("scatter_object")
        check_rank(src, "src", self.size)
        parts = encode_each(objs, self.rank, self.size, trusted) if self.rank == src else []
        sent = [self._bytes(part) for part in parts] or None
        return decode(self.scatter_v(sent, src, timeout=timeout), trusted)

    def _bytes(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    # -- messages --------------------------------------------------------------------------------
    def send(self, tensor: Buffer, dst: int, tag: int = 0, *, timeout: Timeout | None = None) -> None:
        """Send a tensor to rank `dst`; return once the tensor may be changed again.

        Do not rely on buffering: two ranks that both send before they receive may deadlock. Use `sendrecv` instead.

        Args:
            tensor: Any shape, strides and dtype. The receiver's tensor has the same number of elements and dtype.
            dst: The receiver's rank. To send to yourself, post the receive first, or use `isend`.
            tag: 0 to 2**24 - 1; messages match by tag, and in order within a tag.
            timeout: Seconds or a `timedelta`; the communicator's timeout if None.

        Raises:
            CommTimeoutError: The message was not received in time; the communicator is then broken.
            MismatchError: The receiver expects a different dtype or number of elements.

        Example:
            >>> def program(comm):
            ...     t = torch.full((2,), 7.0) if comm.rank == 0 else torch.zeros(2)
            ...     comm.send(t, dst=1) if comm.rank == 0 else comm.recv(t, src=0)
            ...     return t.tolist()
            >>> un.launch(program, nprocs=2, backend="thread")
            [[7.0, 7.0], [7.0, 7.0]]
        """
        if self._engine.try_message("send", tensor, dst, tag, timeout):
            return
        resolve_timeout(timeout)
        self._messages.post("send", [Send(tensor, dst, tag)]).wait_or_break(timeout)

    def recv(self, tensor: Buffer, src: int | None = None, tag: int = 0, *, timeout: Timeout | None = None) -> int:
        """Receive a tensor in place, and return the rank that sent it.

        Args:
            tensor: See `send`.
            src: The sender's rank; any rank if None. If several ranks have sent, they are served in turn.
            tag: See `send`.
            timeout: See `send`.

        Returns: The sender's rank.

        Raises:
            CommTimeoutError, MismatchError: See `send`.
            ValueError: `src` is None, and the backend (nccl, for example) cannot report which ranks have sent.

        Example:
            >>> def program(comm):
            ...     if comm.rank > 0:
            ...         return comm.send(torch.tensor([10 * comm.rank]), dst=0)
            ...     t = torch.zeros(1, dtype=torch.int64)
            ...     return sorted((comm.recv(t), t.item()) for _ in range(comm.size - 1))
            >>> un.launch(program, nprocs=3, backend="thread")[0]
            [(1, 10), (2, 20)]
        """
        if src is not None and self._engine.try_message("recv", tensor, src, tag, timeout):
            return src
        resolve_timeout(timeout)
        work = self._messages.receive("recv", tensor, src, tag)
        work.wait_or_break(timeout)
        return work.source_rank()

    def isend(self, tensor: Buffer, dst: int, tag: int = 0) -> Work:
        """Start a send. The tensor must not change until the work's `wait` has returned.

        Args:
            tensor, dst, tag: See `send`.

        Returns: The work in flight.

        Example:
            >>> def program(comm):
            ...     t = torch.full((2,), 7.0) if comm.rank == 0 else torch.zeros(2)
            ...     work = comm.isend(t, dst=1) if comm.rank == 0 else comm.irecv(t, src=0)
            ...     work.wait()
            ...     return t.tolist(), work.source_rank()
            >>> un.launch(program, nprocs=2, backend="thread")
            [([7.0, 7.0], -1), ([7.0, 7.0], 0)]
        """
        return self._messages.post("isend", [Send(tensor, dst, tag)])

    def irecv(self, tensor: Buffer, src: int | None = None, tag: int = 0) -> Work:
        """Start a receive. The tensor holds the message once the work's `wait` has returned.

        If `src` is None, the message may come from any rank; the work's `source_rank` then returns the sender. Receives
        without `src` are matched in call order, and only with messages that no receive with `src` matches.

        Args:
            tensor, src, tag: See `recv`.

        Returns: The work in flight.
        """
        return self._messages.receive("irecv", tensor, src, tag)

    def sendrecv(
        self,
        send_tensor: Buffer,
        dst: int,
        recv_tensor: Buffer,
        src: int,
        *,
        sendtag: int = 0,
        recvtag: int = 0,
        timeout: Timeout | None = None,
    ) -> None:
        """Send one tensor and receive another at the same time, which cannot deadlock in a ring of ranks.

        Args:
            send_tensor, dst, sendtag: See `send`.
            recv_tensor, src, recvtag: See `recv`; but `recv_tensor` must not share memory with `send_tensor`, and `src`
                must not be None.
            timeout: Limit for both messages together; see `send`.

        Example:
            >>> def program(comm):
            ...     mine, other = torch.tensor([comm.rank]), torch.zeros(1, dtype=torch.int64)
            ...     comm.sendrecv(mine, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
            ...     return other.item()
            >>> un.launch(program, nprocs=3, backend="thread")
            [2, 0, 1]
        """
        resolve_timeout(timeout)
        devices = self._engine.transport.devices
        written = check_tensor(recv_tensor, "recv_tensor", devices, written=True)
        check_apart(
            [("recv_tensor", written)],
            [("send_tensor", check_tensor(send_tensor, "send_tensor", devices, written=False))],
        )
        self._messages.post(
            "sendrecv", [Recv(recv_tensor, src, recvtag), Send(send_tensor, dst, sendtag)]
        ).wait_or_break(timeout)

    def batch_isend_irecv(self, messages: Sequence[Message]) -> list[Work]:
        """Start many messages in one call.

        Args:
            messages: `un.Send` and `un.Recv`, each with a tensor, a peer and a tag.

        Returns: A list with a single `Work` for all messages, as in torch on nccl; empty if there are no messages.

        Raises:
            TypeError: An element is neither a `Send` nor a `Recv`.

        Example:
            >>> def program(comm):
            ...     mine, other = torch.tensor([comm.rank]), torch.zeros(1, dtype=torch.int64)
            ...     works = comm.batch_isend_irecv([un.Send(mine, 1 - comm.rank), un.Recv(other, 1 - comm.rank)])
            ...     for work in works:
            ...         work.wait()
            ...     return other.item()
            >>> un.launch(program, nprocs=2, backend="thread")
            [1, 0]
        """
        messages = list(messages)
        for message in messages:
            if not isinstance(message, Send | Recv):
                raise TypeError(
                    f"batch_isend_irecv takes unisono.Send and unisono.Recv, not {type(message).__name__}. "
                    "Pass a list such as [unisono.Send(tensor, dst), unisono.Recv(other, src)]"
                )
        return [self._messages.post("batch_isend_irecv", messages)] if messages else []

    def probe(self, src: int | None = None, tag: int = 0, *, timeout: Timeout | None = None) -> int:
        """Wait for a message that no posted receive will get, and return the rank that sent it.

        `probe` does not receive the message; the next receive from its sender with the same tag does.

        Args:
            src: The sender's rank; any rank if None.
            tag: The message's tag.
            timeout: Seconds or a `timedelta`; the communicator's timeout if None. The communicator remains usable after
                a timeout.

        Returns: The sender's rank.

        Raises:
            CommTimeoutError: No message arrived in time.
            ValueError: The backend (nccl, for example) cannot report which ranks have sent.

        Example:
            >>> def program(comm):
            ...     if comm.rank > 0:
            ...         return comm.send(torch.arange(comm.rank), dst=0)
            ...     for _ in range(comm.size - 1):
            ...         src = comm.probe()
            ...         comm.recv(torch.zeros(src, dtype=torch.int64), src)
            ...     return comm.iprobe()
            >>> un.launch(program, nprocs=3, backend="thread")
            [None, None, None]
        """
        limit = resolve_timeout(timeout, self._engine.options.timeout_s)
        work = self._messages.probe("probe", src, tag)
        try:
            work.wait(limit)
        finally:
            work.cancel()
        return work.source_rank()

    def iprobe(self, src: int | None = None, tag: int = 0) -> int | None:
        """Return the sender of a message that has already arrived, or None. Like `probe`, but does not wait.

        Args:
            src, tag: See `probe`.
        """
        work = self._messages.probe("iprobe", src, tag)
        if not work.is_completed():
            work.cancel()
            return None
        work.wait(0.0)
        return work.source_rank()

    def mailbox(self, metadata: Any = None) -> tuple[Mailbox, list[Any]]:
        """Return a mailbox, and the metadata that each rank passed. Collective.

        Mailboxes are for libraries that serve requests from other ranks. A rank that dies breaks this communicator, but
        not its mailboxes: they only mark that rank as lost.

        Args:
            metadata: A value that `unisono.serialization` supports, sent to all ranks.

        Raises:
            CommTimeoutError: Not all ranks joined.

        Cost: a few exchanges over the control plane, and one request to each other rank.

        Example:
            >>> def program(comm):
            ...     box, names = comm.mailbox(f"worker {comm.rank}")
            ...     box.close()
            ...     return names
            >>> un.launch(program, nprocs=2, backend="thread")[0]
            ['worker 0', 'worker 1']
        """
        self._engine.enter("mailbox")
        self._mailboxes += 1
        return open_mailbox(self._engine, self._mailboxes, metadata)

    # -- other communicators of the same ranks ---------------------------------------------------
    @overload
    def split(self, color: int, key: int = ...) -> Communicator: ...
    @overload
    def split(self, color: int | None, key: int = ...) -> Communicator | None: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Create a communicator for each color, containing the ranks that passed this color, ordered by key.

        Collective over this communicator. Ranks with equal keys keep their order. A rank that passes `color=None` gets
        None. Subgroups can be used concurrently with each other and with their parent.

        Args:
            color: Any int; ranks with equal colors form a group. With None, this rank joins no group.
            key: Position among the ranks of the same color.

        Returns:
            The communicator of this rank's color; None if `color` is None.

        Raises:
            TypeError: `color` or `key` is not an int.

        Cost: two exchanges over the control plane; no torch group is registered.

        Example:
            >>> def program(comm):
            ...     half = comm.split(color=comm.rank % 2)
            ...     t = torch.tensor([comm.rank])
            ...     half.all_reduce(t)
            ...     return t.item()
            >>> un.launch(program, nprocs=4, backend="thread")
            [2, 4, 2, 4]
        """
        return self._split(color, key, self._check, self._options)

    def _split(self, color: int | None, key: int, check: Check, options: Options) -> Communicator | None:
        self._engine.enter("split")
        for name, value in (("color", color), ("key", key)):
            if not isinstance(value, int) and (value is not None or name == "key"):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        # Convert the color to an int, because it becomes part of the group's name, and True and 1 must give the same
        # name.
        color = color if color is None else int(color)
        self._splits += 1
        group = self._engine.group
        request = color, key, self._engine.ending.dropped_parts()
        try:
            with self._engine.activity.exchanging("split"):
                requests = self._control.exchange(group, f"split #{self._splits}", request, self._options.timeout_s)
        except CommError as error:
            raise_caused(self._engine.failures.report(error, "split", self._splits), error)
        self._engine.ending.release([dropped for _, _, dropped in requests])
        if color is None:
            return None
        members = sorted((key, rank) for rank, (chosen, key, _) in enumerate(requests) if chosen == color)
        child = group.child(f"{self._splits}.{color}", [rank for _, rank in members])
        try:
            part = join_part(self, child, check, options)
        except CommError as error:
            error.locate(rank=child.rank, size=child.size, group=child.text, operation="split", call=self._splits)
            raise
        part._engine.set_parent(self._engine)
        self._parts = [ref for ref in self._parts if ref() is not None] + [weakref.ref(part)]
        return part

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of the given ranks, in the order of the list; None on the other ranks.

        Collective over this communicator: every rank passes the same list.

        Args:
            ranks: Distinct ranks of this communicator, at least one.

        Raises:
            MismatchError: Ranks passed different lists.
            ValueError: The list is empty, repeats a rank, or contains a rank that does not exist.

        Cost: a `split` and a `flush_agreements`.

        Example:
            >>> def program(comm):
            ...     part = comm.subgroup([2, 0])
            ...     return None if part is None else part.rank
            >>> un.launch(program, nprocs=3, backend="thread")
            [1, None, 0]
        """
        self._engine.enter("subgroup")
        ranks = list(ranks)
        for index, rank in enumerate(ranks):
            check_rank(rank, f"ranks[{index}]", self.size)
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"ranks must be distinct, and at least one, not {ranks}")
        self.agree(ranks, "the ranks of a subgroup")
        self.flush_agreements()
        inside = self.rank in ranks
        return self._split(0 if inside else None, ranks.index(self.rank) if inside else 0, self._check, self._options)

    def dup(self, *, check: Check | None = None, deterministic: bool | None = None) -> Communicator:
        """Return a second communicator over the same ranks, for another thread or library. Collective.

        Args:
            check, deterministic: See `init`; None copies this communicator's setting. A library whose ranks have
                already agreed on the calls that follow can pass "off" for `check`.

        Example:
            >>> def program(comm):
            ...     with comm.dup() as second:
            ...         return second.rank == comm.rank
            >>> un.launch(program, nprocs=2, backend="thread")
            [True, True]
        """
        options = self._options if deterministic is None else replace(self._options, deterministic=deterministic)
        duplicate = self._split(0, self.rank, check or self._check, options)
        assert duplicate is not None
        return duplicate

    def _plain(self) -> Transport:
        """Return the transport without its `Checked` wrapper, because each new communicator adds its own wrapper."""
        transport = self._engine.transport
        return transport.inner if isinstance(transport, Checked) else transport

    # -- after a failure -----------------------------------------------------------------------
    def rebuild(self, *, grow: int = 0, size: int | None = None, timeout: Timeout | None = None) -> Communicator:
        """Return a new communicator: the remaining ranks, renumbered in their old order, then any newcomers.

        Collective over the live ranks: each rank calls `rebuild` after a failed call, or all ranks call it at the same
        point of the program to admit newcomers. The method does not wait for ranks that have left or that die
        meanwhile. This communicator is unusable afterwards; its subgroups are unaffected. The new communicator takes
        over this communicator's subgroups, and the actions registered with `before_close` and `after_close`.

        Args:
            grow: Number of newcomers (calling `unisono.join`) to wait for and admit; they get the highest ranks.
            size: Instead of `grow`: number of ranks in the new communicator. `rebuild` then waits until enough
                newcomers have joined to reach this number, even if ranks are lost meanwhile. Ranks that pass neither
                `grow` nor `size` accept the other ranks' `size`.
            timeout: Time within which the other ranks must join; the communicator's timeout if None. A live rank that
                does not join in time (a stopped process, say) is excluded permanently, and its `rebuild` raises
                `AbortedError`.

        Raises:
            AbortedError: The other ranks continued without this rank.
            CommTimeoutError: Newcomers did not join in time.
            MismatchError: Ranks passed different arguments.
            CommError: More than `size` ranks remain.

        If `is_replacement` is true, the method joins the other ranks and ignores every argument but the timeout.

        Cost: one exchange over the control plane, and the time to connect: a few milliseconds on one host.

        Example:
            >>> def program(comm):
            ...     if comm.rank == 1:
            ...         raise KeyError("this rank is gone")
            ...     try:
            ...         comm.barrier()
            ...     except un.CommError:
            ...         comm = comm.rebuild()
            ...     t = torch.ones(1)
            ...     comm.all_reduce(t)
            ...     return comm.rank, comm.size, t.item()
            >>> ends = un.launch(program, nprocs=3, backend="thread", on_failure="continue")
            >>> ends[0], ends[2]
            ((0, 2, 2.0), (1, 2, 2.0))
        """
        self._engine.own("rebuild")
        self._engine.failures.check_open("rebuild")
        if not isinstance(grow, int) or grow < 0:
            raise ValueError(f"grow must be a number of new ranks, not {grow!r}")
        if size is not None and (not isinstance(size, int) or size < 1 or grow):
            raise ValueError(f"size must be the number of ranks, without grow, not {size!r} with grow={grow}")
        deadline = clock.now() + resolve_timeout(timeout, self._options.timeout_s)
        if self._admission is not None:
            made: Communicator | None = self._admission(deadline)
            self._engine.retire()
        else:
            made = self._attempt(grow, size or 0, deadline)
        while made is None:
            made = self._attempt(grow, size or 0, deadline)
        made._engine.replace(self._engine)
        made._before_close = self._before_close
        self._before_close = []
        self._successor = made
        self._boundaries.end(made, made._boundaries)
        self._control.leave(self._engine.group)
        return made

    def _attempt(self, grow: int, size: int, deadline: float) -> Communicator | None:
        """Return the new communicator; None if another rank was lost while creating it."""
        group = self._engine.group
        self._rebuilds += 1
        try:
            rebuilt = self._control.rebuild(
                group, self._rebuilds, seconds_left(deadline), grow=grow, size=size, terms=self._terms()
            )
        except CommError as error:
            raise error.locate(rank=group.rank, size=group.size, operation="rebuild") from None
        # Retire the engine only now that all ranks have joined: no rank is still in a call on the old communicator.
        self._engine.retire()
        members = rebuilt.members
        new = Group(rebuilt.name, members.index(group.members[group.rank]), members)
        try:
            return self._connected(new, deadline)
        except BaseException as error:
            self._control.report_failure(new, to_cause(error, new.rank, "rebuild"))
            self._control.leave(new)
            again = isinstance(error, CommError) and not isinstance(error, AbortedError | MismatchError)
            if not again or not seconds_left(deadline):
                raise
            return None

    def _connected(self, new: Group, deadline: float) -> Communicator:
        self._control.join(new)
        transport = renewed(self._plain(), new)
        try:
            made = Communicator(transport, self._control, self._options, check=self._check)
            self._control.exchange(new, "rebuilt", None, max(seconds_left(deadline), 1.0))
        except BaseException as error:
            transport.abort(error)
            raise
        return made

    def _terms(self) -> bytes:
        """Return the communicator's settings, which a newcomer needs."""
        options = self._options
        settings = options.backend, options.timeout_s, options.heartbeat_s, options.chunk_bytes, options.deterministic
        return serialization.encode((*settings, self._check))

    # -- choice of algorithms --------------------------------------------------------------------
    def tune(self, seconds: float = 2.0) -> CostTable:
        """Measure the cost of messages, so that `algorithm="auto"` relies on measurements from now on. Collective.

        The method times a few algorithms and sizes, and fits latency, bandwidth, reduction speed and overhead per
        message to the times. All ranks use rank 0's result, which rank 0 stores in the user's cache folder for later
        programs with the same backend, processor and ranks per host.

        Args:
            seconds: Approximate maximum duration of the measurement.

        Returns:
            The table.

        Raises:
            ValueError: `seconds` is not positive.

        Example:
            >>> un.launch(lambda comm: comm.tune(seconds=0.1).measured, nprocs=2, backend="thread")
            [True, True]
        """
        if not seconds > 0:
            raise ValueError(f"seconds must be a positive number, not {seconds}")
        self._engine.enter("tune")
        return measured_table(self, self._engine.tuner, self._engine.options.device, seconds)

    def plan(
        self,
        collective: str,
        nbytes: int,
        *,
        dtype: torch.dtype = torch.float32,
        op: str | ReduceOp = "sum",
        algorithm: str | None = None,
    ) -> Choice:
        """Return which algorithm `"auto"` chooses for a call, why, and the predicted times of the alternatives.

        Collective if the ranks have not yet agreed on a cost table, in an earlier `plan`, `tune` or call with "auto".

        Args:
            collective: "all_reduce", "broadcast", ...; the root is rank 0.
            nbytes: Size in bytes of one rank's input or output, whichever is larger.
            dtype, op: Dtype and operation of the call; fewer algorithms can serve floating-point reductions.
            algorithm: Algorithm to evaluate instead of the one that "auto" chooses.

        Raises:
            ValueError: No such collective or algorithm, or the algorithm cannot serve the call.

        Example:
            >>> plan = un.launch(lambda comm: comm.plan("all_reduce", 1024), nprocs=4, backend="thread")[0]
            >>> plan.algorithm in un.algorithms.serving("all_reduce", 4), plan.predicted_s < 1
            (True, True)
        """
        family = family_of(collective)
        reduced = parse_op(op) if family.reduces else None
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, not {nbytes}")
        if reduced is not None:
            check_reducible(reduced, dtype)
        self._engine.enter("plan")
        return self._engine.selection.plan(collective, nbytes, dtype, reduced, algorithm)

    def metrics(self) -> dict[str, Any]:
        """Return statistics on recent collectives, and the rank, if any, that slows down the other ranks. Collective.

        Call this method in a training loop, every 100 steps or so. A report covers the collectives since the previous
        report, but at least the last 100 and at most the last 2,048. For a reliable result, a report should cover at
        least 20 training steps. A rank is reported as slow if its typical delay is at least 2 % of the time (8 % with
        two ranks), and if it is late more consistently than chance explains. Rank 0 logs a warning on the logger
        `unisono` when the slow rank, or what it is doing, changes. While there is a slow rank, ranks sample their
        stacks 200 times a second, and later calls of this method report what the slow rank is doing. All times are
        measured on the host, so the time that a kernel waits on a GPU is not included.

        Returns: A dict, equal on all ranks: "calls" (number of collectives that all ranks have recorded), "seconds"
        (the time that these collectives span), "outside_s" (for each rank, the part of that time spent outside this
        communicator's calls), and "straggler" (None, or a dict that describes the slow rank). The keys of "straggler"
        are "rank"; "where", the call at which the rank arrives late; "late_s" and "share", its delay in seconds and as
        a fraction of the time; "doing", which is "computing", "in a collective" (of another group) or "in the loader";
        and "line", its line in the program. "doing" and "line" are None until there are enough samples to distinguish
        the slow rank from the other ranks.

        Raises:
            CommError: One of the collectives failed; see `unisono.errors`.

        Cost: 2 short collectives with 24 bytes per recorded call; recording adds 50 ns to every call.

        Example:
            >>> import time
            >>> def program(comm):
            ...     for _ in range(40):
            ...         time.sleep(0.3 if comm.rank == 1 else 0.1)
            ...         comm.barrier()
            ...     return comm.metrics()["straggler"]
            >>> found = un.simulate(program, 3).results[0]
            >>> found["rank"], round(found["share"], 2), found["where"][:10]
            (1, 0.67, 'barrier at')
        """
        self._engine.enter("metrics")
        return self._engine.slow_rank.metrics(self)

    # -- lifetime --------------------------------------------------------------------------------
    def release_thread(self) -> None:
        """Release the communicator from its thread; the next thread that uses it becomes the owner.

        Raises:
            CommError: Another thread owns the communicator.

        Example:
            >>> from threading import Thread
            >>> with un.init() as comm:
            ...     comm.barrier()
            ...     comm.release_thread()
            ...     worker = Thread(target=comm.barrier)
            ...     worker.start()
            ...     worker.join()
        """
        self._engine.release("release_thread", any_thread=False)

    def allow_any_thread(self) -> None:
        """Allow every thread to use this communicator from now on. The caller ensures that collectives do not overlap.

        Raises:
            CommError: Another thread owns the communicator.

        Example:
            >>> from threading import Thread
            >>> with un.init() as comm:
            ...     comm.allow_any_thread()
            ...     comm.barrier()
            ...     worker = Thread(target=comm.barrier)
            ...     worker.start()
            ...     worker.join()
        """
        self._engine.release("allow_any_thread", any_thread=True)

    # -- stopping at the same step -----------------------------------------------------------------
    def stop_requested(self) -> bool:
        """Return whether all ranks stop at this step.

        Every rank calls `stop_requested` once in each step, at the same place. Each call of this method is a boundary
        between two steps. After any rank has requested a stop, the method returns True on all ranks, starting at the
        first boundary that no rank has passed yet. Until a stop is requested, the method sends nothing and never waits.
        `un.stop.batches` calls this method for each batch of a loader; `un.stop.enable` lets signals, deadlines and
        files request a stop.

        Raises:
            ClosedError: The communicator is closed.
            CommTimeoutError: After a request, a rank did not report its step in time. Raised on every rank; the error
                names the rank that did not report.
            CommError: A stop was requested, and the communicator has failed.

        Cost: 0.2 us per call. After a request, one call also makes an exchange over the control plane.

        Source: the preemption sync point of JAX's coordination service.

        Example:
            >>> def program(comm):
            ...     steps = 0
            ...     while not comm.stop_requested():
            ...         steps += 1
            ...         if comm.rank == 1 and steps == 5:
            ...             comm.request_stop("found a minimum")
            ...         comm.barrier()
            ...     return steps, comm.stop_reason
            >>> first, second = un.launch(program, nprocs=2, backend="thread")
            >>> first == second
            True
        """
        if self._successor is not None:
            return self._successor.stop_requested()
        self._engine.failures.check_open("stop_requested")
        boundaries = self._boundaries
        boundaries.passed += 1
        if boundaries.requested is not None and boundaries.stops_at is None:
            boundaries.stops_at = self._control.stop_verdict(self._engine.group, self._options.timeout_s)
        return boundaries.stops_at is not None and boundaries.stopped

    def request_stop(self, reason: str = "the program asked for it") -> None:
        """Request that all ranks stop at the same step, where `stop_requested` returns True. Callable from any thread.

        Only the first request counts. After `rebuild`, the request goes to the new communicator.

        Args:
            reason: Text that `stop_reason` returns on every rank.

        Raises:
            ClosedError: The communicator is closed.
            CommError: The control plane is gone.
        """
        latest = self.latest
        latest._engine.failures.check_open("request_stop")
        latest._control.request_stop(latest._engine.group, reason)
        if latest is not self.latest:  # `rebuild` may have missed this request, so repeat it.
            self.request_stop(reason)

    @property
    def stop_reason(self) -> str | None:
        """The reason given in the stop request; None until this rank has stopped."""
        return boundaries_of(self).reason

    @property
    def latest(self) -> Communicator:
        """The latest communicator that `rebuild` has made from this one; this communicator if there is none."""
        return self if self._successor is None else self._successor.latest

    def abort(self, reason: str = "the program asked for it") -> None:
        """Make every wait on every rank raise `AbortedError`, and break the communicator. Callable from any thread.

        Args:
            reason: Part of the error's text on every rank.

        Example:
            >>> def program(comm):
            ...     if comm.rank == 0:
            ...         comm.abort("no more data")
            ...     comm.barrier()
            >>> errors = un.launch(program, 2, "thread", on_failure="continue")
            >>> [type(error).__name__ for error in errors], "no more data" in str(errors[1])
            (['AbortedError', 'AbortedError'], True)
        """
        if not self._engine.life.closed:
            cause = Cause("AbortedError", self.rank, f"rank {self.rank} aborted the communicator: {reason}")
            self._engine.failures.fail(self._control.report_failure(self._engine.group, cause))

    def close(self) -> None:
        """Release all resources, including those of sub-communicators. Every rank calls `close` at the end. Idempotent.

        The method first waits for background saves, then up to a second for the other ranks, so that nothing in flight
        is cut off. If the communicator is broken, the wait for saves and the wait for ranks both end immediately. If a
        save has failed, its error is raised at the end. On nccl, calls are compared while they run, so `close` also
        raises `MismatchError` if the ranks' last calls differ. A communicator is closed in the background once nothing
        refers to it, to its sub-communicators, or to a `Work` that it has in flight.

        Example:
            >>> comm = un.init()
            >>> comm.close()
        """
        try:
            if self._successor is not None or not self._engine.life.closed:
                self._finish()
        finally:
            if self._successor is not None:
                self._successor.close()
            if not self._engine.life.closed:
                self._engine.ending.close(CLOSE_S)

    def before_close(self, action: Callable[[], None]) -> None:
        """Register an action to run at the start of `close`, while calls still work.

        The action registered last runs first. The action does not run if the communicator is dropped without `close`.
        After a `rebuild`, the new communicator runs the action.

        Args:
            action: Function without arguments, for instance one that waits for background work that uses the
                communicator.

        Example:
            >>> comm = un.init()
            >>> comm.before_close(lambda: print("rank", comm.rank, "closes"))
            >>> comm.after_close(lambda: print("closed"))
            >>> comm.close()
            rank 0 closes
            closed
        """
        self._before_close.append(action)

    def after_close(self, action: Callable[[], None]) -> None:
        """Register an action to run at the end of `close`, to release resources. Actions run in the order registered.

        When the communicator is dropped without `close`, the action runs in another thread, so it must not refer to the
        communicator. After a `rebuild`, the new communicator runs the action.

        Args:
            action: Function without arguments.
        """
        self._engine.ending.closers.append(action)

    def _finish(self) -> None:
        """Let background work on this communicator and its subgroups finish, while calls can still be made."""
        if self._successor is not None:
            self._successor._finish()
        while self._before_close:
            self._before_close.pop()()
        self._engine.settle()
        for part in self._open_parts():
            part._finish()

    def _fail(self, error: BaseException) -> None:
        """Report this rank's error to the ranks that may be waiting for this rank, here or in sub-communicators."""
        if self._successor is not None:
            self._successor._fail(error)
            return
        self._engine.failures.report(error, None)
        for part in self._open_parts():
            part._fail(error)
        self._engine.ending.fail(error)

    def _open_parts(self) -> list[Communicator]:
        return [part for ref in self._parts if (part := ref()) is not None and not part._engine.life.closed]

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        try:
            self.close()
        except Exception:
            # An error in a background save must not replace the error that ends the program.
            if error is None:
                raise

    def _require_same(self, what: str, value: bytes, wrong: Exception) -> None:
        self._engine.agreements.require_same(what, value, wrong)

    def __repr__(self) -> str:
        return f"<Communicator {self.backend} rank {self.rank} of {self.size}>"

    def _repr_html_(self) -> str:
        from unisono.core.notebook import html_table

        failure = self.exception()
        state = "open" if failure is None else f"{type(failure).__name__}: {failure}"
        group = self._engine.group
        rows = {"rank": f"{self.rank} of {self.size}", "backend": self.backend, "device": self.device}
        return html_table("Communicator", {**rows, "group": group.name, "state": state})

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator belongs to one process; create a Communicator in each rank with init or launch")


def join_part(comm: Communicator, part: Group, check: Check, options: Options) -> Communicator:
    """Return a communicator for some of another communicator's ranks.

    Only the new communicator's ranks call `join_part`, with a new group name.

    Args:
        comm: The communicator of all ranks.
        part: Group of the new communicator's ranks, created with `Group.child` from the group of `comm`.
        check: See `init`.
        options: Options of the new communicator's transport.

    Raises:
        CommError: A member is missing or has failed; all members get an error.

    Example:
        >>> def program(comm):
        ...     engine = engine_of(comm)
        ...     if comm.rank == 1:
        ...         return None
        ...     with join_part(comm, engine.group.child("ends", [0, 2]), "auto", engine.options) as ends:
        ...         return ends.rank
        >>> un.launch(program, nprocs=3, backend="thread")
        [0, None, 1]
    """
    # From here on, the control plane detects the loss of a rank of this group, even before that rank joins.
    comm._control.join(part)
    try:
        return Communicator(comm._plain().split(part), comm._control, options, check=check)
    except BaseException as error:
        comm._control.report_failure(part, to_cause(error, part.rank, "split"))
        comm._control.leave(part)
        raise


def engine_of(comm: Communicator) -> Engine:
    """Return a communicator's engine, for modules that use the engine or its group directly.

    Example:
        >>> comm = un.init()
        >>> engine_of(comm).group.members
        (0,)
    """
    return comm._engine


def boundaries_of(comm: Communicator) -> StepBoundaries:
    """Return this rank's step count on a communicator, or on the communicator that replaced it in a `rebuild`.

    Example:
        >>> comm = un.init()
        >>> comm.stop_requested(), boundaries_of(comm).passed
        (False, 1)
    """
    return comm.latest._boundaries


def replace_transport(comm: Communicator, transport: Transport, control: ControlPlane) -> None:
    """Replace a communicator's transport and control plane, also for communicators that are made from it later.

    Used to install a recording wrapper, and to restore the originals when recording ends.
    """
    comm._control = control
    comm._engine.wrap(transport, control)
