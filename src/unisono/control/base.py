"""One rank's handle to the control plane. Data transports report into it; their hot path never needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.group import Group

__all__ = ["Cause", "Control"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cause:
    """The first thing that went wrong in a group.

    Attributes:
        kind: Name of the error class in `unisono.errors` that the other ranks raise.
        rank: The rank (of that group) that it is about.
        message: A sentence, without the reader's own rank in it.
    """

    kind: str
    rank: int | None
    message: str


class Control(ABC):
    """A key-value store, agreement, presence and first causes of failure. Safe to use from any thread.

    Groups are known by `Group.name`. A rank is in a group from `join` to `leave`; if its connection
    ends without `leave`, it is lost, which is the first cause of failure of every group it was in.
    """

    # -- the store: keys are strings, values bytes ---------------------------------------------
    @abstractmethod
    def set(self, key: str, value: bytes) -> None: ...

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Wait until the key is there. Raises `CommTimeoutError` that names the key."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 if absent; kept as decimal text, as torch's stores do); the new value."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set if the present value is `expected` (or the key is absent and `expected` is empty); the value then."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there, without waiting."""

    @abstractmethod
    def delete(self, key: str) -> bool: ...

    @abstractmethod
    def num_keys(self) -> int: ...

    # -- groups --------------------------------------------------------------------------------
    @abstractmethod
    def join(self, group: Group, on_failure: Callable[[Cause], None]) -> None:
        """Be present in a group. `on_failure` is called once, from any thread, at its first failure."""

    @abstractmethod
    def leave(self, group: Group) -> None:
        """Be present no longer, in peace. Members who then wait for this rank get `PeerLostError`."""

    @abstractmethod
    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        """Every member's value, in order of rank. Every member calls it with the same topic, once.

        `value` is anything that `unisono.wire` carries.

        Raises:
            CommTimeoutError: Not all came; it names who is missing, and is the group's first cause.
            CommError: The group has failed (the class that its first cause names), or a member left.
        """

    @abstractmethod
    def agree(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any] | None:
        """As `exchange`, but None if all values are equal: one small word back, whatever the values' size."""

    @abstractmethod
    def fail(self, group: Group, cause: Cause) -> Cause:
        """Report a failure. The first of a group stays; it is returned, and told to every member."""

    @abstractmethod
    def cause(self, group: Group, patience: float = 0.0) -> Cause | None:
        """The group's first cause, if known; wait up to `patience` seconds for one to be told."""

    # -- here ----------------------------------------------------------------------------------
    @abstractmethod
    def share(self, key: str, make: Callable[[], T]) -> T:
        """One object for all ranks that are threads of this process (made by whoever comes first)."""

    @abstractmethod
    def close(self) -> None:
        """Leave every group and let go of the connection."""
