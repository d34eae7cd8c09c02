"""Interface that a transport implements."""

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
"""Minimum of `heartbeat_s`: kernels schedule keepalive probes in whole seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `init` and `launch` that transports may use.

    Attributes:
        backend: The requested name: "thread", "gloo", "nccl", ...
        device: Default device of tensors.
        timeout_s: Default timeout of one operation in seconds.
        address: Address at which peers reach this host.
        chunk_bytes: Maximum size of a message that an algorithm sends; longer messages are split and pipelined.
        deterministic: Whether floating-point sums have a fixed order; see `unisono.init`.
        heartbeat_s: Seconds after which an unresponsive host counts as lost. If None, slightly more than `timeout_s`: a
            call that waits for an unresponsive host then times out first, and the error names what the call waited for.
        hosts: For each host, the numbers of its ranks in the job's first group; detected if None.
        extra: Options for transports from other packages.
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
        """Return a name for the host of the job's rank `member`; None if `hosts` does not list the rank."""
        return next((f"host {number}" for number, ranks in enumerate(self.hosts or ()) if member in ranks), None)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties that a transport declares before it is connected; see `Transport` for the attributes."""

    devices: frozenset[str]
    host_staged: frozenset[str]
    native: frozenset[str]


MESSAGE_CAPABILITIES = ("tags", "any_source", "devices", "host_staged", "latency_s", "second_per_byte")
"""Attributes that a wrapper copies from the transport through which it sends."""


class Transport(ABC):
    """Abstract transport that moves bytes between the ranks of one group.

    A new transport implements `connect`, `post`, `split`, `close` and `abort`, declares its capabilities, and must pass
    the checks of `unisono.testing`. Tensors passed to a transport are one-dimensional and contiguous.

    Attributes:
        in_process: Whether ranks are threads of one process; read by `launch`.
        simulated: Whether ranks are threads that run one at a time, on a virtual clock; read by `launch`.
        launcher: Launcher for ranks that are processes: "forkserver" or "mpirun"; read by `launch`.
        native: Names of the collectives (see `Call`) that `run` performs natively, without messages.
        tags: Whether tags above 0 are distinguished from each other. `COLLECTIVE_TAG` is always distinguished from
            other tags.
        any_source: Whether `iprobe` reports messages that have arrived, so that a receive can accept any sender.
        checks: Whether `compare` or `run` compares the collectives of all ranks.
        full: Whether `compare` or `run` also compares shapes and contents, as needed for `check="full"`.
        compares_later: Whether ranks may compare a native collective while it runs, which requires that `abort` ends
            the collective on a mismatch.
        balanced: Whether message-based sums must be reduced along the balanced tree over the ranks, like native sums.
        devices: The supported device types of tensors.
        host_staged: Device types that are staged in CPU memory, so that `post` gets CPU tensors.
        overlaps: Whether a native collective progresses, once started, while the caller does other work.
        background: Whether completing collectives in a thread pays off, because the thread mostly waits for a network,
            or because each rank has a spare core; must be the same on every rank.
        fast_path: Object that performs each blocking call on plain tensors with a single native call; None if the
            transport has no such object.
        latency_s, second_per_byte: Rough cost of a message, used to choose an algorithm.
        reconnect: Function that chooses a new transport for a different set of ranks; set only if this transport was
            chosen to suit the ranks' hosts.
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
        """Connect to the other members of the group, and return when messages can be posted. All members call this.

        Args:
            group: Ranks to connect, and this rank's number.
            control: Handle to the control plane.
            options: Device, default timeout and address of this rank, and further options of the backend.

        Returns: The connected transport.

        Raises:
            UnavailableError: The transport can only wrap other transports.
        """
        raise UnavailableError(f"{cls.__name__} can wrap other transports, but cannot be started by name")

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        """Return the capabilities for a backend's name; one transport class may implement several backends.

        Args:
            backend: Name of the backend, such as "gloo".
        """
        return Capabilities(cls.devices, cls.host_staged, cls.native)

    @classmethod
    def shm_peers(cls, group: Group, control: ControlPlane, timeout_s: float) -> tuple[tuple[int, ...], ...]:
        """Return the subsets of a group within which `connect` is known to work: the whole group, or each host's ranks.

        Collective through the control plane, where the ranks must already have joined the group.

        Args:
            group, control: See `connect`.
            timeout_s: Seconds to wait for the other ranks.
        """
        return (tuple(range(group.size)),)

    @property
    def rank(self) -> int:
        """This rank, from 0 to `size` - 1."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size

    @abstractmethod
    def post(self, batch: Sequence[Message]) -> Work:
        """Start sends and receives in one call. No message in the batch waits for another.

        Args:
            batch: Messages with one-dimensional contiguous tensors, which belong to the returned work until it
                completes.

        Returns:
            A `Work` that completes when every message has been sent or received.
        """

    def iprobe(self, peer: int, tag: int) -> bool:
        """Return whether a message from `peer` with this tag has arrived and matches no posted receive. Never blocks.

        On transports that make progress on messages in flight only during waits, `iprobe` makes progress as well. With
        `any_source`, only one thread at a time may call `iprobe`.

        Args:
            peer: A rank of the group.
            tag: Tag of the message.

        Raises:
            PeerLostError: No matching message has arrived, and the peer has left.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no any_source")

    @abstractmethod
    def split(self, group: Group) -> Transport:
        """Return the transport of a subgroup; only the members of the subgroup call this.

        The subgroup's messages are kept apart from this transport's, and both may be in flight at the same time.

        Args:
            group: The subgroup, whose `members` (ranks in the job's first group) are all in this transport's group.
        """

    def mailbox(self, group: Group) -> Mailbox | None:
        """Return a mailbox, in which `group`'s members get messages without posting receives. All members call this.

        Return None, on all ranks, if the transport does not implement mailboxes; callers then use messages on a
        `split`.

        Args:
            group: All or some of this transport's ranks.
        """
        return None

    def reconfigure(self, group: Group) -> Transport:
        """Return a transport of the same kind for the group that replaces this transport's group.

        `reconfigure` also works if this transport is broken.

        Args:
            group: The new group: live ranks of this transport's group, all of which call `reconfigure`, and newcomers,
                which call `connect`.
        """
        return self.split(group)

    def leave(self) -> None:
        """If possible, notify waiting peers that this rank will make no more calls.

        Messages that were already sent still arrive.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Call this only when nothing is in flight. Idempotent."""

    @abstractmethod
    def abort(self, cause: BaseException) -> None:
        """Fail every wait in progress, and leave the transport permanently broken. Callable from any thread.

        Args:
            cause: Error for the waits to report.
        """

    def simulate_freeze(self, thawed: Event, freeze_s: float | None) -> None:
        """Freeze this rank, for tests.

        Args:
            thawed: Event that ends the freeze.
            freeze_s: Duration in seconds; unlimited if None.

        Example:
            >>> def frozen(inner):
            ...     return un.testing.Faulty(inner, seed=1, on_ranks=un.testing.RankFaults(freeze_at=1, freeze_s=0.01))
            >>> un.launch(lambda comm: comm.barrier(algorithm="tree"), 2, "thread", wrap=frozen)
            [None, None]
        """
        thawed.wait(freeze_s)

    def simulate_crash(self, error: BaseException) -> NoReturn:
        """Kill this process with SIGKILL, for tests; if ranks are threads, raise an error.

        Args:
            error: The error to raise.

        Raises:
            BaseException: `error`, if ranks are threads.
        """
        if not self.in_process:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error

    # -- collectives ---------------------------------------------------------------------------
    def supports(self, call: Call) -> bool:
        """Return whether the transport implements this collective natively. The answer is the same on every rank.

        Args:
            call: The collective, with this rank's tensors, before its algorithm is chosen.
        """
        return call.name in self.native and not call.lengths

    def compare(self, call: Call, deadline: float) -> None:
        """Return once the collective may write to memory; by default, immediately.

        Every rank calls `run` after `compare`. A transport with `checks` set waits here, or in `run`, until all ranks
        are known to run the same collective.

        Args:
            call: This rank's collective.
            deadline: Deadline on the library's clock.

        Raises:
            MismatchError: Ranks run different collectives; raised on every rank.
            CommTimeoutError: A rank has not called its collective in time.
        """

    def plain(self) -> Transport | None:
        """Return the transport on which `PlainCalls` runs native calls on the caller's own tensors; None if it cannot.

        The result is this transport itself, or the transport inside a wrapper that only compares collectives.
        """
        return None

    def starts(self, call: Call) -> bool:
        """Return whether `compare` and `run` only start a native collective, so that asynchronous calls need no thread.

        Args:
            call: The call.
        """
        return self.overlaps

    def settle(self) -> None:
        """Return once all collectives so far have been compared, including those that are compared while they run."""

    def run(self, call: Call, over: PointToPoint | None = None) -> Work:
        """Start a collective. By default, the thread that waits for the returned `Work` exchanges the messages.

        Args:
            call: The collective, whose tensors belong to the returned work until it completes. A call without `steps`
                must be a collective that `supports` accepts.
            over: Transport that posts the messages: the outermost wrapper around this one, if there is one.

        Returns:
            A `Work` that completes when this rank's outputs hold the result.
        """
        if call.steps is None:
            raise NotImplementedError(f"{type(self).__name__} declares no native {call.name}")
        return Deferred(partial(call.steps, over or self, call), call.timeout)

    def returned(self, work: Work) -> Work:
        """Return the `Work` for an asynchronous operation's caller: `work`, or its wrapper in a recording or replay.

        Args:
            work: The operation's `Work`.

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
            dtype: Dtype of the tensor; the same on all ranks.
        """
        import torch

        device = "cpu" if "cpu" in self.devices else min(self.devices)
        return torch.empty(tuple(shape), dtype=dtype, device=device)


Tensors: TypeAlias = "Buffer | Sequence[Buffer] | None"


def share_capabilities(transport: Transport, other: Transport, *names: str) -> None:
    """Copy declared capabilities to `transport` from `other`, through which it sends.

    Args:
        transport, other: The transport to update, and the transport through which it sends.
        names: Names of the attributes to copy.
    """
    vars(transport).update({name: getattr(other, name) for name in names})


def renewed(transport: Transport, group: Group) -> Transport:
    """Return a transport for `group`, which replaces `transport.group`; uses `reconnect` if set, else `reconfigure`."""
    return transport.reconfigure(group) if transport.reconnect is None else transport.reconnect(group)


class FastPath(Protocol):
    """Blocking operations that work directly on the caller's tensors, each in one native call.

    Fast-path operations interoperate with `Transport.run` on other ranks, so some ranks may use the fast path while
    others use `run`. The fast path compares the ranks' collectives itself.
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
        """Run a collective.

        Return `UNSUPPORTED`, without effect, if the collective needs the general path; `MISMATCH` if ranks' collectives
        differ.

        Args:
            what: Description of the collective.
            output: Output as the caller passed it: a tensor, or one tensor per rank; None if there is none.
            input: Input, if it is separate from the output.
            op, root, algorithm: Arguments as the caller passed them, if any.
            deadline: Deadline on the library's clock.
        """
        ...

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Raise a `MismatchError` that quotes each rank's fingerprint. All ranks call this."""
        ...

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Return whether a message can be sent or received now. All arguments are as the caller passed them."""
        ...

    def try_message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Send or receive ("send", "recv") a tensor; return `UNSUPPORTED`, without effect, if this path can't do so."""
        ...


class Envelope(NamedTuple):
    """A message as it arrived.

    Attributes:
        peer: Rank of the sender.
        head: Content of the message besides the tensors.
        bodies: The message's tensors: one-dimensional, uint8, in newly allocated memory.
    """

    peer: int
    head: bytes
    bodies: Sequence[torch.Tensor]


class Mailbox(ABC):
    """A rank's queue of unsolicited messages. Messages from one rank to another arrive in order.

    Unlike a transport, a mailbox has no posted receives, and does not fail as a whole: a lost rank is marked with
    `mark_lost`, and the other ranks continue. Any thread may send; one thread at a time may `poll`; only the permanent
    service thread may `wait`. A thread that is about to poll by itself calls `mute_wakeups`, so that the waiting thread
    remains asleep.

    Attributes:
        group: The ranks' group.
        eager: Whether a thread that waits for a message should poll for a while first.
        lost: Lost ranks, each with the error that reported its loss.
        on_stall: Called in the sending thread when a send has to wait for the receiver to make room.
        on_close: Called once, by `close`.
    """

    eager: bool = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lost: dict[int, BaseException] = {}
        self.on_stall: Callable[[], None] = _nothing
        self.on_close: Callable[[], None] = _nothing
        self.closed: bool = False

    @abstractmethod
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        """Send a message; return when the tensors in `bodies` may be modified.

        Args:
            peer: Another rank.
            head: Content of the message besides the tensors; preferably short.
            bodies: One-dimensional contiguous tensors of uint8 on the CPU.
            timeout: Seconds to wait for the receiver to make room.

        Raises:
            PeerLostError: The peer is gone.
            CommTimeoutError: The peer isn't receiving, and is marked as lost.
        """

    @abstractmethod
    def poll(self) -> list[Envelope]:
        """Return the messages that have arrived. Never blocks."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Wait until a message may have arrived, another thread calls `wake`, or the timeout expires."""

    def mute_wakeups(self) -> None:
        """Declare that the caller polls from now on, so that no thread needs to be woken."""

    def unmute(self) -> None:
        """Declare that the caller has stopped polling."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait`. Can be called from any thread, and even from finalizers, because it takes no lock."""

    def mark_lost(self, peer: int, error: BaseException) -> None:
        """Mark a rank as lost: sends to it fail, including those in progress."""
        self.lost.setdefault(peer, error)
        self.wake()

    def abort_message(self, peer: int, error: BaseException) -> None:
        """Handle an aborted or interrupted send: only part of the message was sent, so no message can follow."""
        if not isinstance(error, CommError):
            error = PeerLostError(f"a message to rank {peer} was aborted by {type(error).__name__}", peer=peer)
        self.mark_lost(peer, error)

    def close(self) -> None:
        """Release all resources. Idempotent."""
        if not self.closed:
            self.closed = True
            try:
                self.release()
            finally:
                self.on_close()
                # Drop the function, which may keep a communicator alive.
                self.on_close = _nothing

    def release(self) -> None:
        """Release this class's resources; `close` calls this once, after setting `closed`."""

    def check(self, peer: int) -> None:
        """Raise an error if messages to rank `peer` can no longer be sent."""
        if peer in self.lost:
            error = self.lost[peer]
            raise PeerLostError(str(error), peer=peer) from error
        if self.closed:
            raise ClosedError("this mailbox is closed")


def _nothing() -> None:
    """Do nothing; the initial value of `on_stall` and `on_close`."""
