"""Transport interface: the calls that a transport must implement."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol, Self, TypeAlias

from unisono.core.call import Call, Fingerprint
from unisono.core.group import Group
from unisono.core.numbers import Status
from unisono.core.types import Message, PointToPoint, Work
from unisono.core.work import Deferred
from unisono.errors import ClosedError, CommError, PeerLostError, UnavailableError

if TYPE_CHECKING:
    import torch

    from unisono.core.collective import Collective
    from unisono.core.control import ControlPlane
    from unisono.core.tensors import Buffer

__all__ = [
    "HEARTBEAT_LEAST_S",
    "MESSAGE_CAPABILITIES",
    "Capabilities",
    "Envelope",
    "FastPath",
    "Mailbox",
    "Options",
    "Tensors",
    "Transport",
    "renewed",
    "share_capabilities",
]


HEARTBEAT_LEAST_S = 2.0
"""Kernels probe and count in seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `init` and `launch` that transports may use.

    Attributes:
        backend: The requested name: "thread", "gloo", "nccl", ...
        device: Default device of tensors.
        timeout_s: Default timeout of one operation in seconds.
        address: The address of this host that its peers can reach.
        chunk_bytes: Largest message that an algorithm sends; longer ones are cut and pipelined.
        deterministic: Whether sums of rounded numbers have one fixed order; see `unisono.init`.
        heartbeat_s: Seconds after which a host that does not answer is lost. None for a bit more than `timeout_s`: a
            call that waits for such a host gives up before, and names what it has waited for.
        hosts: For each host, its ranks (of the first group of the job); detected if None.
        extra: For transports of other packages.
    """

    backend: str
    device: str = "cpu"
    timeout_s: float = 300.0
    address: str = "127.0.0.1"
    chunk_bytes: int = 2 << 20
    deterministic: bool = False
    hosts: tuple[tuple[int, ...], ...] | None = None
    heartbeat_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def host_of(self, member: int) -> str | None:
        """Return the name that `hosts` gives to the host of a rank of the job."""
        return next((f"host {number}" for number, ranks in enumerate(self.hosts or ()) if member in ranks), None)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties that a transport declares before it is connected; the attributes are those of `Transport`."""

    devices: frozenset[str]
    host_staged: frozenset[str]
    native: frozenset[str]


MESSAGE_CAPABILITIES = ("tags", "any_source", "devices", "host_staged", "latency_s", "second_per_byte")
"""Attributes of a transport that a transport which sends by it shares."""


class Transport(ABC):
    """Abstract transport of bytes between the ranks of one group.

    A new transport implements `connect`, `post`, `split`, `close` and `abort`, declares its capabilities, and must
    pass the checks of `unisono.testing`. Tensors that reach it are one-dimensional and contiguous.

    Attributes:
        in_process: Whether ranks are threads of one process; read by `launch`.
        simulated: Whether those threads take turns on a virtual clock; read by `launch`.
        launcher: Launcher of ranks that are processes: "forkserver", or "mpirun"; read by `launch`.
        native: Names of the collectives (see `Call`) that `run` carries out without messages.
        tags: Whether tags above 0 are distinguished. `COLLECTIVE_TAG` always is.
        any_source: Whether `iprobe` reports what has arrived, so that a receive may accept any sender.
        checks: Whether `compare` or `run` compares the calls of all ranks.
        full: Whether it compares shapes and contents, too, as `check="full"` asks for.
        compares_later: Whether ranks may compare a native call while it runs, because `abort` ends a call that differs.
        balanced: Whether sums by messages must be reduced in the balanced tree over the ranks, as native ones are.
        devices: The supported device types of tensors.
        host_staged: Those of them that are staged in CPU memory; `post` sees CPU tensors then.
        overlaps: Whether a native collective, once started, progresses while the caller does other things.
        background: Whether a thread that completes a collective pays off: it mostly waits for a network, or each rank
            has a core to spare. The same on every rank.
        fast_path: Blocking calls on plain tensors in one native call each, or None.
        latency_s, second_per_byte: Rough cost of a message, used to choose an algorithm.
        reconnect: Set by what has chosen this transport by the hosts of the ranks: chooses again for other ranks.
    """

    in_process: ClassVar[bool] = False
    simulated: ClassVar[bool] = False
    launcher: ClassVar[str] = "forkserver"
    native: frozenset[str] = frozenset()
    tags: bool = True
    any_source: bool = False
    checks: bool = False
    full: bool = False
    compares_later: bool = False
    balanced: bool = False
    devices: frozenset[str] = frozenset({"cpu"})
    host_staged: frozenset[str] = frozenset()
    overlaps: bool = False
    background: bool = False
    fast_path: FastPath | None = None
    latency_s: float = 50e-6
    second_per_byte: float = 1e-9
    reconnect: Callable[[Group], Transport] | None = None

    group: Group

    @classmethod
    def connect(cls, group: Group, control: ControlPlane, options: Options) -> Self:
        """Connect to the group's other members, which all call this; return when messages can be posted.

        Args:
            group: The ranks to connect, and this rank's number.
            control: This rank's handle to the control plane.
            options: Device, default timeout and address of this rank, and further options of the backend.

        Returns: The connected transport.

        Raises:
            UnavailableError: The transport only wraps others.
        """
        raise UnavailableError(f"{cls.__name__} can wrap other transports, but cannot be started by name")

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        """Return the capabilities under this name, for transports that have several names.

        Args:
            backend: Name of the backend, such as "gloo".
        """
        return Capabilities(cls.devices, cls.host_staged, cls.native)

    @classmethod
    def shm_peers(cls, group: Group, control: ControlPlane, timeout_s: float) -> tuple[tuple[int, ...], ...]:
        """Return the proven parts of a group in which `connect` works: all of it, unless limited to one host.

        Collective, over the control plane; the ranks have joined the group there.

        Args:
            group, control: As for `connect`.
            timeout_s: Seconds to wait for the other ranks.
        """
        return (tuple(range(group.size)),)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self.group.size

    @abstractmethod
    def post(self, batch: Sequence[Message]) -> Work:
        """Start sends and receives in one call; no message of the batch waits for another.

        Args:
            batch: Messages of one-dimensional contiguous tensors, which belong to the work until it ends.

        Returns:
            A work that ends when every message has been sent or received.
        """

    def iprobe(self, peer: int, tag: int) -> bool:
        """Return whether a message of this tag from `peer` has arrived that no posted receive matches. Never blocks.

        Also progresses messages in flight, where only waits do. Called by one thread at a time, if `any_source`.

        Args:
            peer: A rank of the group.
            tag: Tag of the message.

        Raises:
            PeerLostError: There is no such message, and the peer has left.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no any_source")

    @abstractmethod
    def split(self, group: Group) -> Transport:
        """Return the transport of a subgroup; only the members of the subgroup call this.

        Messages of both transports are separate, and may be in flight at the same time.

        Args:
            group: `group.members`, a subset of this transport's, are ranks of the first group of the job.
        """

    def mailbox(self, group: Group) -> Mailbox | None:
        """Return a mailbox for messages without posted receives between the members of `group`, which all call this.

        `group` consists of this transport's own members. None, on all ranks, if the transport has no faster way than
        messages that are posted on a `split`.

        Args:
            group: All or some of this transport's ranks.
        """
        return None

    def reconfigure(self, group: Group) -> Transport:
        """Return a transport of this kind for a group that replaces this one, which may be broken.

        Args:
            group: Consists of live ranks of this group, which call this, and newcomers, which call `connect`.
        """
        return self.split(group)

    def leave(self) -> None:
        """Notify the ranks that wait for this one, if possible here, of its last call. Sent messages still arrive."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Nothing may be in flight any more. Idempotent."""

    @abstractmethod
    def abort(self, cause: BaseException) -> None:
        """End every wait in progress with an error; stay broken. May be called from any thread.

        Args:
            cause: Error that the waits report.
        """

    def simulate_freeze(self, thawed: Event, freeze_s: float | None) -> None:
        """Let this rank do nothing, for tests.

        Args:
            thawed: Ends it when it is set.
            freeze_s: Seconds until its end; None for no limit.

        Example:
            >>> def frozen(inner):
            ...     return un.testing.Faulty(inner, seed=1, on_ranks=un.testing.RankFaults(freeze_at=1, freeze_s=0.01))
            >>> un.launch(lambda comm: comm.barrier(algorithm="tree"), 2, "thread", wrap=frozen)
            [None, None]
        """
        thawed.wait(freeze_s)

    def simulate_crash(self, error: BaseException) -> NoReturn:
        """End this process by SIGKILL, for tests; where ranks are threads, raise an error.

        Args:
            error: The error to raise.

        Raises:
            BaseException: `error`, where ranks are threads.
        """
        if not self.in_process:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error

    # -- collectives ---------------------------------------------------------------------------
    def supports(self, call: Call) -> bool:
        """Return whether a collective of the transport's own carries out this call. The same answer on every rank.

        Args:
            call: The call, with this rank's tensors, before its algorithm is chosen.
        """
        return call.name in self.native and not call.lengths

    def compare(self, call: Call, deadline: float) -> None:
        """Return when the call may write to memory. Nothing by default; `run` follows, on every rank.

        A transport that `checks` returns when all ranks are known to make the same call, or does that in `run`.

        Args:
            call: This rank's call.
            deadline: On the library's clock.

        Raises:
            MismatchError: Ranks make different calls; on every rank.
            CommTimeoutError: A rank has not made its call in time.
        """

    def plain(self) -> Transport | None:
        """Return what runs native calls on the caller's own tensors, as `PlainCalls` makes them; None if nothing does.

        It is this transport, or the one inside a wrapper that only compares.
        """
        return None

    def starts(self, call: Call) -> bool:
        """Return whether `compare` and `run` only start a native call, so that an asynchronous one needs no thread.

        Args:
            call: The call.
        """
        return self.overlaps

    def settle(self) -> None:
        """Return when all calls so far have been compared, those included that ranks compare while they run."""

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        """Start a collective: here, one that is carried out by messages, by the thread that waits.

        Args:
            call: The call, whose tensors belong to the work until it ends. Without `steps`, `supports` is true of it.
            over: Posts the messages: the outermost wrapper of this transport, if it has one.

        Returns:
            A work that ends when this rank's outputs hold the result.
        """
        if call.steps is None:
            raise NotImplementedError(f"{type(self).__name__} declares no native {call.name}")
        return Deferred(partial(call.steps, over or self, call), call.timeout)

    def returned(self, work: Work) -> Work:
        """Return the work that the caller of an asynchronous call gets: another one where its answers are recorded.

        Args:
            work: Of the call.

        Example:
            >>> def program(comm):
            ...     return comm.barrier(async_op=True).wait()
            >>> un.launch(program, 2, "thread", wrap=lambda inner: un.testing.Checksummed(inner))
            [None, None]
        """
        return work

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in the memory that this transport reduces fastest. Collective.

        Args:
            shape: Number of elements in each dimension; the same on all ranks.
            dtype: The same on all ranks.
        """
        import torch

        device = "cpu" if "cpu" in self.devices else min(self.devices)
        return torch.empty(tuple(shape), dtype=dtype, device=device)


Tensors: TypeAlias = "Buffer | Sequence[Buffer] | None"


def share_capabilities(transport: Transport, other: Transport, *names: str) -> None:
    """Let a transport declare what another one does, by which it sends.

    Args:
        transport, other: The two transports.
        names: Names of the attributes to copy.
    """
    vars(transport).update({name: getattr(other, name) for name in names})


def renewed(transport: Transport, group: Group) -> Transport:
    """Return the transport of a group that replaces a transport's own: by its `reconnect`, else `reconfigure`."""
    return transport.reconfigure(group) if transport.reconnect is None else transport.reconnect(group)


class FastPath(Protocol):
    """Blocking calls on the caller's own tensors, in one native call each.

    They interoperate with `Transport.run` on other ranks, so ranks need not agree on the path, and they compare
    calls themselves.
    """

    def try_collective(
        self,
        what: Collective,
        output: Tensors,
        input: Tensors,
        op: object,
        root: int | None,
        algorithm: str | None,
        deadline: float,
    ) -> Status:
        """Make the call. Return `UNSUPPORTED`, with no effect, for the general path; `MISMATCH` if ranks' calls differ.

        Args:
            what: The collective.
            output: What is written, as the caller gave it: a tensor or one a rank; None where nothing is.
            input: What is read, where that is something else.
            op, root, algorithm: As the caller gave them, where there are such.
            deadline: On the library's clock.
        """
        ...

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Raise the `MismatchError` that quotes each rank's fingerprint. All ranks call it."""
        ...

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Return whether a message can be sent or received now. All arguments are the caller's own."""
        ...

    def try_message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Send or receive ("send", "recv") a tensor; return `UNSUPPORTED`, with no effect, for the general path."""
        ...


class Envelope(NamedTuple):
    """One message as it arrived.

    Attributes:
        peer: The sender's rank.
        head: The bytes of the message.
        bodies: The tensors sent with it: one-dimensional, of uint8, in memory of their own.
    """

    peer: int
    head: bytes
    bodies: Sequence[torch.Tensor]


class Mailbox(ABC):
    """One rank's queue of unsolicited messages. Messages from one rank to another arrive in order.

    Unlike a transport, it has no posted receives, and no failure of the whole: a lost rank is
    `mark_lost`d, and the others continue. Any thread may send; one thread at a time may `poll`; only the permanent
    service thread may `wait`. A thread that is about to poll by itself calls `mute_wakeups`, so that the waiting
    thread stays asleep.

    Attributes:
        group: Group of the ranks.
        eager: Whether a thread that waits for a message should first poll for it for a while.
        lost: The lost ranks, each with the error that reports it.
        on_stall: Called in the sending thread when a send has to wait until the receiver makes room.
    """

    eager: bool = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lost: dict[int, BaseException] = {}
        self.on_stall: Callable[[], None] = _nothing
        self.closed: bool = False
        self._closers: list[Callable[[], None]] = []

    @abstractmethod
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        """Send a message; return when the bodies may be changed.

        Args:
            peer: Another rank.
            head: Bytes, preferably few.
            bodies: One-dimensional contiguous tensors of uint8 on the CPU.
            timeout: Seconds that the receiver may take to make room.

        Raises:
            PeerLostError: The peer has gone.
            CommTimeoutError: The peer receives nothing. It is lost then; otherwise the message arrives later.
        """

    @abstractmethod
    def poll(self) -> list[Envelope]:
        """Return the messages that have arrived. Never blocks."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when a message may have arrived, another thread calls `wake`, or the timeout expires."""

    def mute_wakeups(self) -> None:
        """Declare that the caller polls from now on: no thread needs to be woken."""

    def unmute(self) -> None:
        """Declare that the caller has stopped polling."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait`. From any thread, and from a finalizer: takes no lock."""

    def mark_lost(self, peer: int, error: BaseException) -> None:
        """Mark a rank as lost: sends to it fail, including those in progress."""
        self.lost.setdefault(peer, error)
        self.wake()

    def abort_message(self, peer: int, error: BaseException) -> None:
        """Handle an aborted or interrupted send: part of the message was sent, so no message can follow it."""
        if not isinstance(error, CommError):
            error = PeerLostError(f"a message to rank {peer} was aborted by {type(error).__name__}", peer=peer)
        self.mark_lost(peer, error)

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self.closed = True
        closers = self._closers
        self._closers = []
        for closer in closers:
            closer()

    def on_close(self, closer: Callable[[], None]) -> None:
        """Register a function that `close` calls too."""
        self._closers.append(closer)

    def check(self, peer: int) -> None:
        """Raise if nothing can be sent to this rank."""
        if peer in self.lost:
            error = self.lost[peer]
            raise PeerLostError(str(error), peer=peer) from error
        if self.closed:
            raise ClosedError("this mailbox is closed")


def _nothing() -> None:
    """Do nothing: the default of `on_stall`."""
