"""Transport interface: the calls that an algorithm may use, and that a transport must implement."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self

from unisono.core.fingerprint import Fingerprint
from unisono.core.group import Group
from unisono.core.types import CollectiveCall, Message, Work
from unisono.errors import UnavailableError

if TYPE_CHECKING:
    import torch

    from unisono.core.control import ControlPlane
    from unisono.core.fast_path import FastPath
    from unisono.core.mailbox import Mailbox

__all__ = ["Capabilities", "Options", "PointToPoint", "Transport"]


class PointToPoint(Protocol):
    """Interface that a schedule needs.

    Messages of one tag from one rank to another arrive in the order they were posted. Nothing else
    is promised: a send may wait until it is received.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def post(self, batch: Sequence[Message]) -> Work:
        """Start all of these messages in one call. No message of the batch waits for another."""
        ...


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
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties that a transport declares before it is connected; the attributes are those of `Transport`."""

    devices: frozenset[str]
    host_staged: frozenset[str]
    native: frozenset[str]


class Transport(ABC):
    """Abstract transport of bytes between the ranks of one group.

    A new transport implements `connect`, `post`, `split`, `close` and `abort`, declares its capabilities, and must
    pass the checks of `unisono.testing`. Tensors that reach it are one-dimensional and contiguous.

    Attributes:
        in_process: Whether ranks are threads of one process; read by `launch`.
        simulated: Whether those threads take turns on a virtual clock; read by `launch`.
        launcher: Launcher of ranks that are processes: "forkserver", or "mpirun"; read by `launch`.
        native: Names of the collectives (see `CollectiveCall`) that `collective` supports itself.
        tags: Whether tags above 0 are distinguished. `COLLECTIVE_TAG` always is.
        any_source: Whether `iprobe` reports what has arrived, so that a receive may accept any sender.
        checks: Whether `begin` itself compares fingerprints between ranks.
        devices: The supported device types of tensors.
        host_staged: Those of them that are staged in CPU memory; `post` sees CPU tensors then.
        overlaps: Whether a native collective, once started, progresses while the caller does other things.
        background: Whether a thread that completes a collective pays off: it mostly waits for a network, or each rank
            has a core to spare. The same on every rank.
        fast_path: Blocking calls on plain tensors in one native call each, or None.
        latency_s, second_per_byte: Rough cost of a message, used to choose an algorithm.
    """

    in_process: ClassVar[bool] = False
    simulated: ClassVar[bool] = False
    launcher: ClassVar[str] = "forkserver"
    native: frozenset[str] = frozenset()
    tags: bool = True
    any_source: bool = False
    checks: bool = False
    devices: frozenset[str] = frozenset({"cpu"})
    host_staged: frozenset[str] = frozenset()
    overlaps: bool = False
    background: bool = False
    fast_path: FastPath | None = None
    latency_s: float = 50e-6
    second_per_byte: float = 1e-9

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
        """Return the transport of a group that replaces this one, which may be broken.

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

    def begin(self, fingerprint: Fingerprint, timeout_s: float) -> None:
        """Prepare a collective before any data moves. Nothing by default.

        Args:
            fingerprint: Description of this rank's call.
            timeout_s: Seconds to wait for the other ranks.

        Raises:
            MismatchError: Ranks call with different fingerprints; only where `checks` is set.
        """

    def end(self, fingerprint: Fingerprint, call: CollectiveCall, timeout_s: float) -> None:
        """Finish a collective when all data has moved. Nothing by default.

        Args:
            fingerprint, timeout_s: As for `begin`.
            call: The call, with its results.

        Raises:
            CorruptedError: Received and sent data differ, where the transport compares them.
        """

    def supports(self, call: CollectiveCall) -> bool:
        """Return whether `collective` supports this call. Every rank must return the same answer.

        Args:
            call: The call, with this rank's tensors.
        """
        return call.name in self.native and not call.lengths

    def collective(self, call: CollectiveCall) -> Work:
        """Start a collective for which `supports` is true.

        Args:
            call: The call, whose tensors belong to the work until it ends.

        Returns:
            A work that ends when this rank's outputs hold the result.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no native {call.name}")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in the memory that this transport reduces fastest. Collective.

        Args:
            shape: Number of elements in each dimension; the same on all ranks.
            dtype: The same on all ranks.
        """
        import torch

        device = "cpu" if "cpu" in self.devices else min(self.devices)
        return torch.empty(tuple(shape), dtype=dtype, device=device)
