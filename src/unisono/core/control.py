"""One rank's handle to the control plane. Data transports never need it on their hot path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from unisono.core.call import NOTHING_SENT, Fingerprint, explain
from unisono.core.failure import Cause
from unisono.core.flight_recorder import Activity
from unisono.core.group import Group
from unisono.core.step_boundaries import StepBoundaries
from unisono.errors import MismatchError

__all__ = ["ControlPlane", "NewMembership", "compare_in_full", "raise_mismatch"]

_QUOTE_S = 10.0

T = TypeVar("T")


class NewMembership(NamedTuple):
    """Group that replaces a failed group.

    Attributes:
        name: Name of the new group.
        members: For each rank of the new group, its number in the job: survivors in their old order, then newcomers.
    """

    name: str
    members: tuple[int, ...]


class ControlPlane(ABC):
    """Interface to the control plane: key-value store, agreement, membership and failures of groups. Thread-safe.

    Groups are identified by `Group.name`. A rank is in a group from `join` to `leave`. A rank whose connection ends
    without `leave` is lost, which fails every group that the rank was in.

    Attributes:
        simulated: Whether ranks are threads of a simulation, which end when the simulation does.
        connectable: Whether ranks are processes that can connect to each other.
    """

    simulated: ClassVar[bool] = False
    connectable: ClassVar[bool] = False

    # -- the store: keys are strings, values bytes ---------------------------------------------
    @abstractmethod
    def set(self, key: str, value: bytes) -> None: ...

    @abstractmethod
    def get(self, key: str, timeout: float, group: Group | None = None) -> bytes:
        """Wait until the key exists. After `timeout` seconds, raises a `CommTimeoutError` that names the key.

        If a group is given, its failure also ends the wait.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 if absent; stored as decimal text, as in torch's stores); return the new value."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if its value is `expected`; return the resulting value.

        An absent key is set if `expected` is empty; otherwise, the result is `expected`.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist, without waiting."""

    @abstractmethod
    def delete(self, key: str) -> bool: ...

    @abstractmethod
    def num_keys(self) -> int: ...

    # -- groups --------------------------------------------------------------------------------
    @abstractmethod
    def join(self, group: Group, on_failure: Callable[[Cause], None] | None = None) -> None:
        """Join a group. `on_failure`, if set, is called once, from any thread, at the group's first failure."""

    @abstractmethod
    def leave(self, group: Group, patience: float = 0.0) -> None:
        """Leave the group without an error. Members that wait for a rank that has left get `PeerLostError`.

        Returns when all members have left, or after `patience` seconds.
        """

    @abstractmethod
    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        """Return every member's value, in rank order. Every member calls this once with the same topic.

        `value` is anything that `unisono.serialization` supports.

        Raises:
            CommTimeoutError: Some members did not call this in time. The error names the missing members, and becomes
                the group's first failure.
            CommError: The group has failed (the first failure determines the error's class), or a member left.
        """

    @abstractmethod
    def exchange_unless_equal(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any] | None:
        """Like `exchange`, but return None if all values are equal, which keeps the reply small."""

    @abstractmethod
    def report_failure(self, group: Group, cause: Cause) -> Cause:
        """Report a failure; return the group's first failure, which every member receives."""

    @abstractmethod
    def first_cause(self, group: Group, patience: float = 0.0) -> Cause | None:
        """Return the group's first failure, if known; wait up to `patience` seconds for a report."""

    @abstractmethod
    def rebuild(
        self, group: Group, attempt: int, timeout: float, *, grow: int = 0, size: int = 0, terms: bytes = b""
    ) -> NewMembership:
        """Return this group's successor: its remaining members, plus `grow` newcomers or enough to reach `size`.

        Every live member calls this with the same arguments, except that a member may omit `grow` and `size` to accept
        the other members' `size`. A member that has not called this by the first caller's deadline is excluded, and
        gets `AbortedError`. `terms` are sent to the newcomers.
        """

    @abstractmethod
    def request_admission(self, timeout: float) -> tuple[NewMembership, int, bytes]:
        """Wait to be admitted as a newcomer; return the group, this rank in it, and the `terms` passed to `rebuild`."""

    # -- stopping at the same step -------------------------------------------------------------
    @abstractmethod
    def boundaries(self, group: Group) -> StepBoundaries:
        """Return this rank's counter of step boundaries in a group: the same object on each call until `leave`."""

    @abstractmethod
    def request_stop(self, group: Group | None, reason: str) -> int:
        """Ask all ranks of the group, or of all groups, to stop at the same boundary. Only the first request counts.

        Returns the number of clients that are in the group, or in any group.
        """

    @abstractmethod
    def stop_verdict(self, group: Group, timeout: float) -> int | None:
        """Wait until the boundary at which all ranks stop is known; return its number, or None if the group ends first.

        If some ranks have not reported their boundaries by the deadline, the group fails.
        """

    # -- activity of all ranks -----------------------------------------------------------------
    @abstractmethod
    def watch(self, activity: Activity) -> None:
        """Include an activity in replies to `query` for as long as the `Activity` object exists."""

    @abstractmethod
    def query(self, group: Group | None, patience: float) -> dict[tuple[str, int], dict[str, Any] | None]:
        """Return the report of every rank of a group (`ActivityRegistry.report`); None for ranks that do not reply.

        Each key is a pair of group name and rank. Without a group, every client of the control plane that is in any
        group is queried.
        """

    @abstractmethod
    def hold(self, reason: str | None) -> None:
        """Hold the job's ranks at their next library call; debuggers show `reason`. With None, release the ranks."""

    # -- hosts ---------------------------------------------------------------------------------
    def set_heartbeat(self, seconds: float) -> None:
        """Treat a rank as lost once its host has been silent for `seconds`; this applies to the calling rank as well.

        Only the first call counts. Without a heartbeat, or if ranks share a process, hosts may be silent indefinitely.
        """

    def outage(self) -> str:
        """Return a sentence that says for how long the control plane's host has been silent; empty if it responds."""
        return ""

    # -- within this process -------------------------------------------------------------------
    def measured(self, group: Group, what: str, make: Callable[[], T]) -> T:
        """Return the result of `make`; ranks must call this for any value that differs from run to run.

        A recording keeps the value, and a replay returns it without calling `make`, so that ranks send the same bytes
        again.

        Args:
            group: Group of the communicator over which the value is exchanged.
            what: Description. Only one thread at a time may call this for the same group and description.
            make: Function that measures a time, inspects the host, generates a secret, or writes to a disk, and
                returns anything that `unisono.serialization` supports.
        """
        return make()

    @abstractmethod
    def share(self, key: str, make: Callable[[], T]) -> T:
        """Return one object, created by the first caller, and shared by all ranks that are threads of this process.

        If the key begins with a group's name and a slash, the object is dropped when all ranks have left the group.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave every group and close the connection."""


def compare_in_full(
    control: ControlPlane, group: Group, topic: str, mine: Fingerprint, timeout_s: float, *, shapes: bool = False
) -> None:
    """Compare the fingerprints of all ranks; if any differ, raise an error that quotes them all. Collective."""
    values = control.exchange(group, topic, mine.values(), timeout_s)
    problem = explain([Fingerprint(*value) for value in values], shapes=shapes)
    if problem:
        raise MismatchError(f"{problem}. {NOTHING_SENT}")


def raise_mismatch(control: ControlPlane, group: Group, topic: str, mine: Fingerprint, timeout_s: float) -> NoReturn:
    """Raise an error that lists each rank's collective.

    All ranks call `raise_mismatch` once they know of a mismatch.
    """
    # Leave the call numbers out: the fast path has assigned none yet, and all ranks are known to be at the same call.
    compare_in_full(control, group, topic, mine._replace(call=0), min(timeout_s, _QUOTE_S))
    raise MismatchError(f"ranks differ in what they are about to do. {NOTHING_SENT}")
