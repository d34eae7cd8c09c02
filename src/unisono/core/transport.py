"""The waist: what an algorithm may use, and all that a transport must supply."""

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
    """All that a schedule needs.

    Messages of one tag from one rank to another arrive in the order they were posted. Nothing else
    is promised: a send may wait until it is received.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def post(self, batch: Sequence[Message]) -> Work:
        """Start all of these messages at once. Nothing of the batch waits for anything else of it."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller of `init` or `launch` may choose, and transports may heed.

    Attributes:
        backend: The name asked for: "thread", "gloo", "nccl", ...
        device: Where tensors live by default.
        timeout_s: Seconds that one operation may take unless it says otherwise.
        address: The address of this host that its peers can reach.
        chunk_bytes: Largest message that a schedule sends; longer ones are cut and pipelined.
        hosts: For each host, its ranks (of the first group of the job); found out if None.
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
    """What a transport says of itself before it is connected; the attributes are those of `Transport`."""

    devices: frozenset[str]
    host_staged: frozenset[str]
    native: frozenset[str]


class Status(IntEnum):
    """The end of a native call, as src/native/shm/barrier.hpp numbers it."""

    OK = 0
    DIFFERS = 1
    LATE = 2
    LEFT = 3
    ABORTED = 4
    REFUSED = 6


class FastPath(Protocol):
    """Blocking calls on tensors as callers gave them, one native call each.

    They take the same part in a collective as `Transport.collective` does, so that ranks need not agree on the path,
    and compare fingerprints themselves.
    """

    def collective(
        self, what: Collective, output: Tensors, input: Tensors, op: object, root: int | None, deadline: float
    ) -> Status:
        """Make the call. `REFUSED`, with nothing done, if it needs the general path; `DIFFERS` if ranks' calls differ.

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
        """Return whether a message can be sent or received now. All arguments are as the caller gave them."""
        ...

    def message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Send or receive ("send", "recv") a tensor; `REFUSED`, with nothing done, if it needs the general path."""
        ...


class Transport(ABC):
    """Whatever moves bytes between the ranks of one group.

    A new one writes `connect`, `post`, `split`, `close` and `abort`, declares what it can, and is
    held to the laws of `unisono.testing`. Tensors that reach it are one-dimensional and contiguous.

    Attributes:
        in_process: Whether ranks are threads of one process; `launch` asks.
        simulated: Whether these take turns on a virtual clock; `launch` asks.
        launcher: What starts ranks that are processes: "forkserver", or "mpirun"; `launch` asks.
        native: Names of the collectives (see `CollectiveCall`) that `collective` carries itself.
        tags: Whether tags above 0 can be told apart. `COLLECTIVE_TAG` always can.
        any_source: Whether `iprobe` tells what has come, so that a receive may leave open from whom.
        checks: Whether `begin` itself compares fingerprints between ranks.
        devices: The device types whose tensors it carries.
        host_staged: Those of them that take the way over the CPU's memory; `post` sees CPU tensors then.
        overlaps: Whether a native collective, once started, goes on while the caller does other things.
        background: Whether a thread that sees a collective through pays: it mostly waits for a network, or each rank
            has a core to spare. The same on every rank.
        fast_path: Blocking calls on plain tensors in one native call each, or None.
        latency_s, second_per_byte: Rough cost of a message, from which an algorithm is chosen.
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
        """Join the group's other members, who all call this; return when messages can be posted."""
        raise UnavailableError(f"{cls.__name__} can wrap other transports, but cannot be started by name")

    @classmethod
    def declared(cls, backend: str) -> Capabilities:
        """What it can under this name, for those that have several."""
        return Capabilities(cls.devices, cls.host_staged, cls.native)

    @classmethod
    def shm_peers(cls, group: Group, control: ControlPlane, timeout: float) -> tuple[tuple[int, ...], ...]:
        """The parts of a group within which `connect` works, by proof: all of it, unless this transport ends at a host.

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
        """Whether a message of this tag from `peer` is there that no posted receive takes. Never blocks.

        Also moves on what is under way, where only waits do. Raises `PeerLostError` if there is none, and the peer has
        left. Called by one thread at a time, if `any_source`.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no any_source")

    @abstractmethod
    def split(self, group: Group) -> Transport:
        """The transport of a part of this group; its members, and nobody else, call this.

        `group.members` are ranks of the first group of the job, of which this one's `group.members`
        are a superset. It carries messages of its own, at the same time as this one does.
        """

    def mailbox(self, group: Group) -> Mailbox:
        """Messages that nobody posts receives for, between the members of `group`: all of them, who call this.

        `group` is made of this transport's own members. Made of `post`, unless a transport knows a faster way.
        """
        from unisono.transports.mailbox.over_p2p import PointToPointMailbox

        return PointToPointMailbox(self.split(group))

    def reconfigure(self, group: Group) -> Transport:
        """The transport of a group that takes the place of this one, which may be broken.

        Its members are ranks of this one that live, who call this, and newcomers, who call `connect`.
        """
        return self.split(group)

    def leave(self) -> None:
        """Tell who waits for this rank, if they can be told here, that it makes no more calls. What it sent arrives."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds. Nothing is under way any more. Again is harmless."""

    @abstractmethod
    def abort(self, cause: BaseException) -> None:
        """End every wait in progress, from any thread, with an error that tells `cause`; stay broken."""

    def simulate_crash(self, error: BaseException) -> NoReturn:
        """End this rank as a killed process ends, for tests; where ranks are threads, by raising `error`."""
        if not self.in_process:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error

    def begin(self, fingerprint: Fingerprint, timeout: float) -> None:
        """Called before a collective moves anything. Raise `MismatchError` if ranks differ."""

    def end(self, fingerprint: Fingerprint, call: CollectiveCall, timeout: float) -> None:
        """Called when a collective has moved everything. Raise `CorruptedError` if not what was sent has arrived."""

    def supports(self, call: CollectiveCall) -> bool:
        """Whether `collective` can do this call. Every rank must come to the same answer."""
        return call.name in self.native

    def collective(self, call: CollectiveCall) -> Work:
        """Start a collective that `supports` is true of."""
        raise NotImplementedError(f"{type(self).__name__} declares no native {call.name}")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that this transport reduces best. Collective: the same shape and dtype everywhere."""
        import torch

        device = "cpu" if "cpu" in self.devices else min(self.devices)
        return torch.empty(tuple(shape), dtype=dtype, device=device)
