"""The waist: what an algorithm may use, and all that a transport must supply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from unisono.errors import UnavailableError
from unisono.fingerprint import Fingerprint
from unisono.group import Group
from unisono.types import Call, Message, Work

if TYPE_CHECKING:
    import torch

    from unisono.control import Control

__all__ = ["Options", "PointToPoint", "Quick", "Transport"]


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
        extra: For transports of other packages.
    """

    backend: str
    device: str = "cpu"
    timeout_s: float = 300.0
    address: str = "127.0.0.1"
    chunk_bytes: int = 2 << 20
    extra: dict[str, Any] = field(default_factory=dict)


class Quick(Protocol):
    """A shorter way for calls that need no preparation, which a transport may offer.

    It takes the same part in the collective as `Transport.collective` does, so that it does not matter
    which ranks take it, and compares fingerprints itself.
    """

    def all_reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> bool:
        """Do it in place and return True; or return False, with nothing done, if the tensor needs preparation."""
        ...

    def barrier(self, timeout: float) -> bool:
        """Likewise."""
        ...


class Transport(ABC):
    """Whatever moves bytes between the ranks of one group.

    A new one writes `connect`, `post`, `split`, `close` and `abort`, declares what it can, and is
    held to the laws of `unisono.testing`. Tensors that reach it are one-dimensional and contiguous.

    Attributes:
        in_process: Whether ranks are threads of one process; `launch` asks.
        native: Names of the collectives (see `Call`) that `collective` carries itself.
        tags: Whether tags above 0 can be told apart. `COLLECTIVE_TAG` always can.
        any_source: Whether `Recv.peer` may be -1.
        checks: Whether `begin` itself compares fingerprints between ranks.
        devices: The device types whose tensors it carries.
        staged: Those of them that take the way over the CPU's memory; `post` sees CPU tensors then.
        overlaps: Whether a native collective, once started, goes on while the caller does other things.
        quick: A shorter way for the simplest calls, or None.
        latency_s, second_per_byte: Rough cost of a message, from which an algorithm is chosen.
    """

    in_process: ClassVar[bool] = False
    native: frozenset[str] = frozenset()
    tags: bool = True
    any_source: bool = False
    checks: bool = False
    devices: frozenset[str] = frozenset({"cpu"})
    staged: frozenset[str] = frozenset()
    overlaps: bool = False
    quick: Quick | None = None
    latency_s: float = 50e-6
    second_per_byte: float = 1e-9

    group: Group

    @classmethod
    def connect(cls, group: Group, control: Control, options: Options) -> Self:
        """Join the group's other members, who all call this; return when messages can be posted."""
        raise UnavailableError(f"{cls.__name__} can wrap other transports, but cannot be started by name")

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @abstractmethod
    def post(self, batch: Sequence[Message]) -> Work:
        """As in `PointToPoint`."""

    @abstractmethod
    def split(self, group: Group) -> Transport:
        """The transport of a part of this group; its members, and nobody else, call this.

        `group.members` are ranks of the first group of the job, of which this one's `group.members`
        are a superset. It carries messages of its own, at the same time as this one does.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds. Nothing is under way any more. Again is harmless."""

    @abstractmethod
    def abort(self, cause: BaseException) -> None:
        """End every wait in progress, from any thread, with an error that tells `cause`; stay broken."""

    def begin(self, fingerprint: Fingerprint, timeout: float) -> None:
        """Called before a collective moves anything. Raise `MismatchError` if ranks differ."""

    def carries(self, call: Call) -> bool:
        """Whether `collective` can do this call. Every rank must come to the same answer."""
        return call.name in self.native

    def collective(self, call: Call) -> Work:
        """Start a collective that `carries` is true of."""
        raise NotImplementedError(f"{type(self).__name__} declares no native {call.name}")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that this transport reduces best. Collective: the same shape and dtype everywhere."""
        import torch

        device = "cpu" if "cpu" in self.devices else min(self.devices)
        return torch.empty(tuple(shape), dtype=dtype, device=device)
