"""The `Communicator`: one interface over whatever moves bytes between ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from unisono.comm.engine import Engine
from unisono.comm.mailbox import MailboxMixin
from unisono.comm.monitored_barrier import MonitoredBarrierMixin
from unisono.comm.objects import ObjectMixin
from unisono.comm.persistent import PersistentMixin
from unisono.comm.state import FailureRelay
from unisono.comm.tuning import TuningMixin
from unisono.core.control import ControlPlane
from unisono.core.group import Group
from unisono.core.notebook import html_table
from unisono.core.transport import Options, Transport
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.errors import MismatchError
from unisono.host.network import host_identity
from unisono.wrappers.consistency import Checked

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["BY_HANDLE", "Check", "Communicator"]

BY_HANDLE: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
"""The communicators of this process by the names that compiled graphs hold instead of objects."""

_numbers = itertools.count()

Check = Literal["auto", "full", "off"]


@final
class Communicator(ObjectMixin, PersistentMixin, TuningMixin, MonitoredBarrierMixin, MailboxMixin):
    """A group of ranks that communicate: point-to-point, collectives, sub-groups, objects.

    Created by `unisono.init` or `unisono.launch`, by `from_group` from a torch process group of
    another owner, by `from_mpi` from an MPI communicator, and by `split`, `subgroup` and `dup` from
    another communicator. Ranks in every call are ranks of this communicator. Where a call takes a tensor on the
    CPU, it also takes NumPy arrays, DLPack objects, memory such as bytearrays, numbers and lists of numbers, of which
    all but numbers and read-only memory may be written. It belongs to the thread
    that first uses it. After a failure that may leave ranks out of step (any but wrong arguments) it is
    broken: later calls raise the first cause immediately.

    Args:
        transport: A connected transport, one per rank.
        control: This rank's handle to the control plane.
        options: The options that were passed to the transport.
        check: "auto" compares every rank's operation before each collective; "off" never does; "full" also compares
            shapes, sent with received contents, and whether a tensor was changed before `wait`.

    Attributes:
        rank, size: This process's rank, and the number of ranks.
        backend: Name of the transport, such as "gloo".
        device: Default device of tensors.

    Example:
        >>> with un.init() as comm:
        ...     t = torch.ones(3)
        ...     comm.all_reduce(t)
        ...     comm, t.tolist()
        (<Communicator thread rank 0 of 1>, [1.0, 1.0, 1.0])
    """

    def __init__(self, transport: Transport, control: ControlPlane, options: Options, *, check: Check = "auto") -> None:
        if check not in ("auto", "full", "off"):
            raise ValueError(f"check must be 'auto', 'full' or 'off', not {check!r}")
        self._check = check
        self._control, self._options = control, options
        self._splits = self._rebuilds = self._barriers = 0
        self._compared: dict[str, int] = {}
        self._before_close: list[Callable[[], None]] = []
        self._parts: list[weakref.ref[Communicator]] = []
        self._successor: Communicator | None = None
        group = transport.group
        relay = FailureRelay()
        control.join(group, relay.on_failure)
        try:
            self._host_names = self._handshake(transport, group)
        except BaseException:
            transport.close()
            raise
        if check == "full" or (check == "auto" and not transport.checks):
            transport = Checked(transport, control, full=check == "full")
        self._engine = Engine(transport, control, options, self._host_names, full_check=check == "full")
        control.watch(self._engine.activity)
        relay.connect(self._engine)
        self._handle = f"communicator {next(_numbers)}"
        BY_HANDLE[self._handle] = self

    def _handshake(self, transport: Transport, group: Group) -> Sequence[str]:
        """Agree with the other ranks on common capabilities. Return the name of each rank's host."""
        settings = self._options.chunk_bytes, self._check, self._options.deterministic
        mine = (self._host(group), sorted(transport.native), transport.checks, *settings)
        cards = self._control.agree(group, "introduction", mine, self._options.timeout_s)
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
        """For each host, the ranks on it."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(self._host_names):
            found.setdefault(name, []).append(rank)
        return tuple(map(tuple, found.values()))

    def _host(self, group: Group) -> str:
        """Return a name for this host, which the options may set."""
        me = group.members[group.rank]
        named = (f"host {number}" for number, ranks in enumerate(self._options.hosts or ()) if me in ranks)
        return next(named, None) or host_identity()

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: Timeout = 300.0,
        check: Check = "auto",
        chunk_bytes: int = 2 << 20,
    ) -> Communicator:
        """Return a communicator on a torch process group of another owner; unisono never destroys the group.

        Collective over the group: every member calls it. The owner may continue to use the group
        while the communicator does not. Sub-groups are created without `dist.new_group`. On a group of
        the backend `unisono` the communicator has a transport of its own, of the same kind.

        Args:
            group: As created by `dist.init_process_group` or `dist.new_group`; None is the default group.
            timeout: Default of every operation: seconds or a `timedelta`.
            check: As for `init`.
            chunk_bytes: As for `init`.

        Raises:
            TypeError, ValueError: It is not a group, or this process is not in it.
            CommError: Its backend cannot be wrapped.
            CommTimeoutError: Not all members have called it in time.

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
        from unisono.transports.torch.from_group import adopt, resolve_group

        group, timeout_s = resolve_group(group), resolve_timeout(timeout)
        if make := getattr(group, "make_communicator", None):
            # A `UnisonoGroup`, whose module imports this one.
            made: Communicator = make(timeout_s, chunk_bytes, check)
            return made
        return cls._owning(*adopt(group, timeout_s, chunk_bytes), check)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dim: str | int | None = None, **options: Any) -> Communicator:
        """Return a communicator on one dimension of a torch `DeviceMesh`; see `from_group`.

        Args:
            mesh: As created by `torch.distributed.init_device_mesh`.
            dim: Name or number of the dimension; may be None if there is only one.
            options: Arguments of `from_group`.
        """
        return cls.from_group(mesh.get_group(dim), **options)

    @classmethod
    def from_mpi(
        cls, comm: Any, *, timeout: Timeout = 300.0, check: Check = "auto", chunk_bytes: int = 2 << 20
    ) -> Communicator:
        """Return a communicator of the ranks of an MPI communicator of another owner; unisono never frees that.

        Collective over it: every member calls it. The owner may continue to use it at any time: messages
        travel on unisono's own communicators.

        Args:
            comm: A communicator of mpi4py, such as `MPI.COMM_WORLD`, or a part of it; no intercommunicator.
            timeout: Default of every operation: seconds or a `timedelta`.
            check: As for `init`.
            chunk_bytes: As for `init`.

        Raises:
            UnavailableError: There is no mpi4py, or no MPI library.
            CommTimeoutError: Not all members have called it in time.
        """
        from unisono.transports.mpi.from_comm import adopt

        return cls._owning(*adopt(comm, resolve_timeout(timeout), chunk_bytes), check)

    @classmethod
    def _owning(
        cls, transport: Transport, control: ControlPlane, options: Options, release: Callable[[], None], check: Check
    ) -> Communicator:
        """Return a communicator that calls `release` at its end; immediately if it cannot be created."""
        try:
            made = cls(transport, control, options, check=check)
        except BaseException:
            release()
            raise
        made.after_close(release)
        return made

    @property
    def backend(self) -> str:
        """Name of the transport: "thread", "gloo", ..."""
        return self._options.backend

    @property
    def overlaps(self) -> bool:
        """Return whether an asynchronous collective progresses while the caller computes, at little cost to it."""
        transport = self._engine.transport
        return (transport.overlaps or transport.background) and not self._options.deterministic

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised tensor in memory that this backend reduces best. Collective: the same on every rank.

        The memory stays valid as long as a tensor on it exists, also after `close`.

        Args:
            shape: Sizes of the dimensions, or the number of elements.
            dtype: Of the elements.

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

    def __repr__(self) -> str:
        return f"<Communicator {self.backend} rank {self.rank} of {self.size}>"

    def _repr_html_(self) -> str:
        failure = self.exception()
        state = "open" if failure is None else f"{type(failure).__name__}: {failure}"
        group = self._engine.group
        rows = {"rank": f"{self.rank} of {self.size}", "backend": self.backend, "device": self.device}
        return html_table("Communicator", {**rows, "group": group.name, "state": state})

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator belongs to one process; create a Communicator in each rank with init or launch")
