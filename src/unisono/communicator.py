"""The `Communicator`: one interface over whatever moves bytes between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, final

import torch

from unisono.comm.engine import Engine
from unisono.comm.mailbox import MailboxMixin
from unisono.comm.monitored_barrier import MonitoredBarrierMixin
from unisono.comm.objects import ObjectMixin
from unisono.comm.state import ANY_THREAD, FailureRelay
from unisono.comm.subgroups import SubgroupMixin
from unisono.comm.teardown import CLOSE_S
from unisono.core.control import ControlPlane
from unisono.core.failure import Cause
from unisono.core.group import Group
from unisono.core.transport import Options, Transport
from unisono.core.work import resolve_timeout
from unisono.errors import MismatchError
from unisono.host.network import host_identity
from unisono.wrappers.consistency import Checked

if TYPE_CHECKING:
    from types import TracebackType

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Check", "Communicator"]

Check = Literal["auto", "full", "off"]


@final
class Communicator(ObjectMixin, SubgroupMixin, MonitoredBarrierMixin, MailboxMixin):
    """A group of ranks that talk to each other: point-to-point, collectives, sub-groups, objects.

    Made by `unisono.init` or `unisono.launch`, by `from_group` from a torch process group that
    someone else owns, by `from_mpi` from an MPI communicator, and by `split`, `subgroup` and `dup` from
    another one. Ranks in every call are ranks of this communicator. It belongs to the thread that
    first uses it. After a failure that may have left ranks apart (all but wrong arguments) it is
    broken: later calls raise the first cause at once.

    Args:
        transport: Connected, one a rank.
        control: This rank's handle to the control plane.
        options: As given to the transport.
        check: "auto" compares before each collective what every rank is about to do; "off" never; "full" also
            shapes, what was given with what was received, and whether a tensor was changed before `wait`.

    Attributes:
        rank, size: Who this is, of how many.
        backend: Name of the transport, such as "gloo".
        device: Where tensors live by default.
        hosts: For each host, the ranks on it.
    """

    def __init__(self, transport: Transport, control: ControlPlane, options: Options, *, check: Check = "auto") -> None:
        if check not in ("auto", "full", "off"):
            raise ValueError(f"check must be 'auto', 'full' or 'off', not {check!r}")
        self._check = check
        self._control, self._options = control, options
        self._splits = self._rebuilds = self._barriers = 0
        self._before_close: list[Callable[[], None]] = []
        self._parts: list[weakref.ref[Communicator]] = []
        self._successor: Communicator | None = None
        group = transport.group
        news = FailureRelay()
        control.join(group, news.tell)
        try:
            self.hosts = self._handshake(transport, group)
        except BaseException:
            transport.close()
            raise
        if check == "full" or (check == "auto" and not transport.checks):
            transport = Checked(transport, control, full=check == "full")
        self._engine = Engine(transport, control, options, full_check=check == "full")
        control.watch(self._engine.activity)
        news.lead_to(self._engine)

    def _handshake(self, transport: Transport, group: Group) -> tuple[tuple[int, ...], ...]:
        """Agree with the others on what all can do; which ranks share a host."""
        mine = (self._host(group), sorted(transport.native), transport.checks, self._options.chunk_bytes, self._check)
        cards = self._control.exchange(group, "introduction", mine, self._options.timeout_s)
        for rank, card in enumerate(cards):
            if card[2:] != cards[0][2:]:
                raise MismatchError(
                    f"rank 0 was made with (checks, chunk_bytes, check) = {tuple(cards[0][2:])}, "
                    f"rank {rank} with {tuple(card[2:])}; they must be equal",
                    rank=group.rank,
                    size=group.size,
                )
        common = set(cards[0][1]).intersection(*(card[1] for card in cards))
        transport.native = frozenset(common)
        names = [card[0] for card in cards]
        return tuple(tuple(r for r, name in enumerate(names) if name == host) for host in dict.fromkeys(names))

    def _host(self, group: Group) -> str:
        """A name for this host, which may be said in the options."""
        me = group.members[group.rank]
        named = (f"host {number}" for number, ranks in enumerate(self._options.hosts or ()) if me in ranks)
        return next(named, None) or host_identity()

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        check: Check = "auto",
        chunk_bytes: int = 2 << 20,
    ) -> Communicator:
        """A communicator on a torch process group that someone else owns, and that is never destroyed by us.

        Collective over the group: every member calls it. The owner may go on using the group, at
        times when the communicator does not. Sub-groups are made without `dist.new_group`.

        Args:
            group: As `dist.init_process_group` or `dist.new_group` made it; None is the default group.
            timeout: Seconds for every operation, unless it says otherwise.
            check: As for `init`.
            chunk_bytes: As for `init`.

        Raises:
            TypeError, ValueError: It is no group, or this process is not in it.
            CommError: Its backend is one that cannot be wrapped.
            CommTimeoutError: Not all members have called it in time.
        """
        from unisono.transports.torch.from_group import adopt

        return cls._owning(*adopt(group, resolve_timeout(timeout, timeout), chunk_bytes), check)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dim: str | int | None = None, **options: Any) -> Communicator:
        """`from_group` of one dimension of a torch `DeviceMesh`."""
        return cls.from_group(mesh.get_group(dim), **options)

    @classmethod
    def from_mpi(
        cls, comm: Any, *, timeout: float = 300.0, check: Check = "auto", chunk_bytes: int = 2 << 20
    ) -> Communicator:
        """A communicator of the ranks of an MPI communicator that someone else owns, and that is never freed by us.

        Collective over it: every member calls it. The owner may go on using it at any time: messages
        travel on communicators of our own.

        Args:
            comm: Of mpi4py, such as `MPI.COMM_WORLD`, or a part of it; no intercommunicator.
            timeout: Seconds for every operation, unless it says otherwise.
            check: As for `init`.
            chunk_bytes: As for `init`.

        Raises:
            UnavailableError: There is no mpi4py, or no MPI library.
            CommTimeoutError: Not all members have called it in time.
        """
        from unisono.transports.mpi.from_comm import adopt

        return cls._owning(*adopt(comm, resolve_timeout(timeout, timeout), chunk_bytes), check)

    @classmethod
    def _owning(
        cls, transport: Transport, control: ControlPlane, options: Options, release: Callable[[], None], check: Check
    ) -> Communicator:
        """One that releases what was made for it at its end, which is now if it cannot be made."""
        try:
            made = cls(transport, control, options, check=check)
        except BaseException:
            release()
            raise
        made.on_close(release)
        return made

    @property
    def backend(self) -> str:
        """Name of the transport: "thread", "gloo", ..."""
        return self._options.backend

    @property
    def overlaps(self) -> bool:
        """Whether an asynchronous collective goes on while the caller computes, at little cost to it."""
        transport = self._engine.transport
        return transport.overlaps or transport.background

    # -- life ----------------------------------------------------------------------------------
    def release_thread(self) -> None:
        """Give the communicator up: the next thread that uses it owns it."""
        self._engine.own("hand_over")
        self._engine.owner = None

    def allow_any_thread(self) -> None:
        """Let every thread use it from now on. The caller sees to it that no two are in a collective at once."""
        self._engine.own("share")
        self._engine.owner = ANY_THREAD

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory that this backend reduces best (uninitialised). Collective: the same on every rank.

        It stays valid as long as a tensor on it lives, also after `close`.
        """
        self._engine.enter("empty")
        return self._engine.transport.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    def abort(self, reason: str = "the program asked for it") -> None:
        """End every wait on every rank with `AbortedError`, and break the communicator. From any thread."""
        if not self._engine.closed:
            cause = Cause("AbortedError", self.rank, f"rank {self.rank} aborted the communicator: {reason}")
            self._engine.on_failure(self._control.fail(self._engine.group, cause))

    def close(self) -> None:
        """Let go of everything, also of the parts made of this one. Every rank calls it when it is done.

        Waits up to a second for the others, so that nothing in flight is cut off; and before that, for saves in the
        background, which end at once if the communicator is broken. Again is harmless. A communicator
        that nobody holds any more, nor parts or unfinished works of it, is closed in the background.
        """
        if self._successor is not None:
            self._finish()
            for part in self._open_parts():
                part._close(0.0)
            self._successor.close()
        if not self._engine.closed:
            self._finish()
            self._close(CLOSE_S)

    def _finish(self) -> None:
        """Let what others do with it in the background come to its end, while all still works."""
        if self._successor is not None:
            self._successor._finish()
        while self._before_close:
            self._before_close.pop()()
        for part in self._open_parts():
            part._finish()

    def _close(self, patience: float) -> None:
        self._engine.close(patience)
        for part in self._open_parts():
            part._close(0.0)
        self._engine.ending.finish()

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for this rank learns why it does not come, also in the parts made of this one."""
        if self._successor is not None:
            return self._successor._fail(error)
        self._engine.failed(error, "the program")
        for part in self._open_parts():
            part._fail(error)
        self._engine.ending.fail(error)

    def _open_parts(self) -> list[Communicator]:
        return [part for ref in self._parts if (part := ref()) is not None and not part._engine.closed]

    def on_close(self, action: Callable[[], None], *, first: bool = False) -> None:
        """Also do this at the end of `close`; or first, while all still works, for who uses it in the background."""
        (self._before_close if first else self._engine.ending.closers).append(action)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator {self.backend} rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator lives in one process; make one in each rank by init or launch")
