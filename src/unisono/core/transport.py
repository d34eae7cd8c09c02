"""Transport interface: the calls that an algorithm may use, and that a transport must implement."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self, TypeAlias

from unisono.core.fingerprint import Fingerprint
from unisono.core.group import Group
from unisono.core.types import CollectiveCall, Message, Work
from unisono.errors import UnavailableError

if TYPE_CHECKING:
    import torch

    from unisono.core.collective import Collective
    from unisono.core.control import ControlPlane
    from unisono.core.mailbox import Mailbox

__all__ = ["Capabilities", "FastPath", "Options", "PointToPoint", "Status", "Tensors", "Transport"]

Tensors: TypeAlias = "torch.Tensor | Sequence[torch.Tensor] | None"


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
        chunk_bytes: Largest message that a schedule sends; longer ones are cut and pipelined.
        hosts: For each host, its ranks (of the first group of the job); detected if None.
        extra: For transports of other packages.
    """

    backend: str
    device: str = "cpu"
    timeout_s: float = 300.0
    address: str = "127.0.0.1"
    chunk_bytes: int = 2 << 20
    hosts: tuple[tuple[int, ...], ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties that a transport declares before it is connected; the attributes are those of `Transport`."""

    devices: frozenset[str]
    host_staged: frozenset[str]
    native: frozenset[str]


class Status(IntEnum):
    """Status of a native call, with the numbers of src/native/shm/barrier.hpp."""

    OK = 0
    DIFFERS = 1
    LATE = 2
    LEFT = 3
    ABORTED = 4
    REFUSED = 6


class FastPath(Protocol):
    """Blocking calls on the caller's own tensors, in one native call each.

    They interoperate with `Transport.collective` on other ranks, so ranks need not agree on the path, and they
    compare fingerprints themselves.
    """

    def collective(
        self, what: Collective, output: Tensors, input: Tensors, op: object, root: int | None, deadline: float
    ) -> Status:
        """Make the call. `REFUSED`, with no effect, if it needs the general path; `DIFFERS` if ranks' calls differ.

        Args:
            what: The collective.
            output: What is written, as the caller gave it: a tensor or one a rank; None where nothing is.
            input: What is read, where that is something else.
            op, root: As the caller gave them, where there are such.
            deadline: On the monotonic clock.
        """
        ...

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Raise the `MismatchError` that quotes each rank's fingerprint. All ranks call it."""
        ...

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Return whether a message can be sent or received now. All arguments are the caller's own."""
        ...

    def message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Send or receive ("send", "recv") a tensor; return `REFUSED`, with no effect, if it needs the general path."""
        ...


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
        """Connect to the group's other members, which all call this; return when messages can be posted."""
        raise UnavailableError(f"{cls.__name__} can wrap other transports, but cannot be started by name")

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        """Return the capabilities under this name, for transports that have several names."""
        return Capabilities(cls.devices, cls.host_staged, cls.native)

    @classmethod
    def shm_peers(cls, group: Group, control: ControlPlane, timeout: float) -> tuple[tuple[int, ...], ...]:
        """Return the proven parts of a group in which `connect` works: all of it, unless limited to one host.

        Collective, over the control plane; the ranks have joined the group there.
        """
        return (tuple(range(group.size)),)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @abstractmethod
    def post(self, batch: Sequence[Message]) -> Work:
        """As in `PointToPoint`."""

    def iprobe(self, peer: int, tag: int) -> bool:
        """Return whether a message of this tag from `peer` has arrived that no posted receive matches. Never blocks.

        Also progresses messages in flight, where only waits do. Raises `PeerLostError` if there is none, and the peer
        has left. Called by one thread at a time, if `any_source`.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no any_source")

    @abstractmethod
    def split(self, group: Group) -> Transport:
        """Return the transport of a subgroup; only the members of the subgroup call this.

        `group.members` are ranks of the first group of the job; this transport's `group.members`
        are a superset. Both transports carry separate messages at the same time.
        """

    def mailbox(self, group: Group) -> Mailbox:
        """Return a mailbox for messages without posted receives between the members of `group`, which all call this.

        `group` consists of this transport's own members. Built on `post`, unless a transport has a faster way.
        """
        from unisono.transports.mailbox.over_p2p import PointToPointMailbox

        return PointToPointMailbox(self.split(group))

    def reconfigure(self, group: Group) -> Transport:
        """Return the transport of a group that replaces this one, which may be broken.

        Its members are live ranks of this group, which call this, and newcomers, which call `connect`.
        """
        return self.split(group)

    def leave(self) -> None:
        """Notify the ranks that wait for this one, if possible here, of its last call. Sent messages still arrive."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Nothing may be in flight any more. Idempotent."""

    @abstractmethod
    def abort(self, cause: BaseException) -> None:
        """End every wait in progress, from any thread, with an error that reports `cause`; stay broken."""

    def simulate_crash(self, error: BaseException) -> NoReturn:
        """Simulate a killed process, for tests; where ranks are threads, raise `error`."""
        if not self.in_process:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error

    def begin(self, fingerprint: Fingerprint, timeout: float) -> None:
        """Prepare a collective before any data moves. Raise `MismatchError` if ranks differ."""

    def end(self, fingerprint: Fingerprint, call: CollectiveCall, timeout: float) -> None:
        """Finish a collective when all data has moved. Raise `CorruptedError` if received and sent data differ."""

    def supports(self, call: CollectiveCall) -> bool:
        """Return whether `collective` supports this call. Every rank must return the same answer."""
        return call.name in self.native

    def collective(self, call: CollectiveCall) -> Work:
        """Start a collective for which `supports` is true."""
        raise NotImplementedError(f"{type(self).__name__} declares no native {call.name}")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory that this transport reduces fastest. Collective: the same shape and dtype on all ranks."""
        import torch

        device = "cpu" if "cpu" in self.devices else min(self.devices)
        return torch.empty(tuple(shape), dtype=dtype, device=device)
