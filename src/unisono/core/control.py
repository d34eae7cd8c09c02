"""One rank's handle to the control plane. Data transports report into it; their hot path never needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from unisono.core.failure import Cause
from unisono.core.flight_recorder import Activity
from unisono.core.group import Group

__all__ = ["ControlPlane", "NewMembership"]

T = TypeVar("T")


class NewMembership(NamedTuple):
    """The group that takes the place of one that has failed.

    Attributes:
        name: Of the new group.
        members: Numbers of its ranks in the job: those of the survivors in their old order, then those of newcomers.
    """

    name: str
    members: tuple[int, ...]


class ControlPlane(ABC):
    """A key-value store, agreement, presence and first causes of failure. Safe to use from any thread.

    Groups are known by `Group.name`. A rank is in a group from `join` to `leave`; if its connection
    ends without `leave`, it is lost, which is the first cause of failure of every group it was in.
    """

    # -- the store: keys are strings, values bytes ---------------------------------------------
    @abstractmethod
    def set(self, key: str, value: bytes) -> None: ...

    @abstractmethod
    def get(self, key: str, timeout: float, group: Group | None = None) -> bytes:
        """Wait until the key is there. Raises `CommTimeoutError` that names the key.

        With a group, its failure ends the wait too.
        """

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
    def join(self, group: Group, on_failure: Callable[[Cause], None] | None = None) -> None:
        """Be present in a group. `on_failure`, if given, is called once, from any thread, at its first failure."""

    @abstractmethod
    def leave(self, group: Group, patience: float = 0.0) -> None:
        """Be present no longer, in peace. Members who then wait for this rank get `PeerLostError`.

        Returns when all have left, or `patience` seconds have passed.
        """

    @abstractmethod
    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        """Every member's value, in order of rank. Every member calls it with the same topic, once.

        `value` is anything that `unisono.serialization` carries.

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

    @abstractmethod
    def rebuild(
        self, group: Group, attempt: int, timeout: float, *, grow: int = 0, terms: bytes = b""
    ) -> NewMembership:
        """The group that comes after this one: of those who are in it still, and of `grow` newcomers.

        Every member that lives calls it, with the same `attempt` and `grow`. Who has not come when the
        first one's patience ends is left out, and gets `AbortedError`. `terms` go to the newcomers.
        """

    @abstractmethod
    def request_admission(self, timeout: float) -> tuple[NewMembership, int, bytes]:
        """Wait to be taken in as a newcomer: the group, this one's rank in it, and the members' terms."""

    # -- what everybody is doing ---------------------------------------------------------------
    @abstractmethod
    def watch(self, activity: Activity) -> None:
        """Tell of it to whoever asks by `query`, for as long as it is there."""

    @abstractmethod
    def query(self, group: Group | None, patience: float) -> dict[tuple[str, int], dict[str, Any] | None]:
        """What every rank of a group says that it is doing (`unisono.core.flight_recorder.Desk`); None if nothing.

        By group and rank. Without a group: every client of the control plane that is in any.
        """

    # -- here ----------------------------------------------------------------------------------
    @abstractmethod
    def share(self, key: str, make: Callable[[], T]) -> T:
        """One object for all ranks that are threads of this process (made by whoever comes first).

        If the key begins with a group's name and a slash, the object is forgotten when all have left the group.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave every group and let go of the connection."""
