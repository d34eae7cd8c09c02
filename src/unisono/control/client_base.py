"""Base class of control-plane clients: defines all requests; subclasses send requests and receive replies."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from unisono import serialization
from unisono.control.replies import Reply
from unisono.core import clock
from unisono.core.control import ControlPlane, NewMembership
from unisono.core.failure import Cause, error_of, text_of
from unisono.core.flight_recorder import Activity, ActivityRegistry
from unisono.core.frames import Frame
from unisono.core.group import Group
from unisono.core.step_boundaries import StepBoundaries
from unisono.core.threads import AutoResetEvent
from unisono.diagnostics.event_log import EventLog, record_of
from unisono.diagnostics.hang_report import hang_report, sentence
from unisono.errors import ClosedError, CommTimeoutError, PeerLostError

__all__ = [
    "CLOSED",
    "Callback",
    "ControlClient",
    "Membership",
    "PendingRequest",
    "SharedObjects",
    "news_of",
    "reply_of",
]

T = TypeVar("T")

# Seconds allowed for the server to report the outcome after a timeout; fewer if its host is known to be unreachable.
_GRACE_S = 5.0
_AWAY_S = 0.2
_AGAIN_S = 1.0


CLOSED = Cause("ClosedError", None, "this control handle is closed")


class SharedObjects:
    """Objects shared by ranks of one process.

    Attributes:
        objects: The objects, by key.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._making = threading.RLock()

    def get(self, key: str, make: Callable[[], T]) -> T:
        """Return the object for `key`, which the first caller makes."""
        with self._making:
            if key not in self.objects:
                self.objects[key] = make()
            shared: T = self.objects[key]
            return shared

    def drop(self, group: str) -> None:
        """Drop objects that a group's members share. (No lock: a thread that is making an object may call `drop`.)"""
        for key in [key for key in list(self.objects) if key.startswith(f"{group}/")]:
            self.objects.pop(key, None)


class ControlClient(ControlPlane, ABC):
    """A rank's handle, independent of how its messages are sent.

    Args:
        patience_s: Seconds to wait for answers that do not depend on other ranks.
        shared: The objects of the ranks in this process.

    Attributes:
        activities: What this rank does in each of its communicators.
    """

    def __init__(self, patience_s: float, shared: SharedObjects) -> None:
        self._patience_s = patience_s
        self._shared = shared
        self._numbers = itertools.count(1)
        self._waiters: dict[int, PendingRequest] = {}
        self._members: dict[str, Membership] = {}
        self._boundaries: dict[str, StepBoundaries] = {}
        self._ended: Cause | None = None
        self._silent = False
        self._ending = threading.Lock()
        self.activities: ActivityRegistry = ActivityRegistry()
        self._record: EventLog | None = None

    @abstractmethod
    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        """Start a request. `receive` gets the reply, in any thread, possibly before this method returns."""

    @abstractmethod
    def _notify(self, words: tuple[Any, ...]) -> None:
        """Send a message that gets no reply, from any thread; it may be lost."""

    def _wait(self, waiter: PendingRequest, timeout: float) -> bool:
        """Return whether the answer has arrived in time."""
        if waiter.reply is None:
            clock.wait(waiter.awake, clock.now() + timeout)
        return waiter.reply is not None

    @property
    @abstractmethod
    def _where(self) -> str:
        """Name of the server, for error messages."""

    # -- requests and replies ----------------------------------------------------------------------
    def _begin(self, *words: Any) -> PendingRequest:
        waiter = PendingRequest(next(self._numbers), words)
        self._waiters[waiter.number] = waiter
        try:
            # Check `_ended` only after adding the waiter: the thread that ends the connection sets `_ended` first, and
            # then answers the waiters.
            if self._ended is not None:
                raise error_of(self._ended)
            self._send(waiter.number, words)
        except BaseException:
            self._waiters.pop(waiter.number, None)
            raise
        return waiter

    def _finish(self, waiter: PendingRequest, timeout: float, group: Group | None = None) -> Any:
        """Return the answer's value, or raise its error."""
        timeout = self._within(timeout)
        try:
            self._wait(waiter, timeout)
        finally:
            self._waiters.pop(waiter.number, None)
        if waiter.reply is None:
            self._silent = True
            why = sentence(self.outage()) or " Is its process running?"
            raise CommTimeoutError(f"{self._where} has not answered for {timeout:.1f} s.{why}", waited_s=timeout)
        _, outcome, body = waiter.reply
        if outcome == "failed":
            raise error_of(Cause(*cast("tuple[str, int | None, str]", body)), group)
        return body

    def _within(self, timeout: float) -> float:
        """Return `timeout`, but at most 1 s if the server was silent, because a failing rank sends many requests."""
        return min(timeout, _AGAIN_S) if self._silent else timeout

    @property
    def _grace_s(self) -> float:
        return _AWAY_S if self.outage() else _GRACE_S

    def _request(self, *words: Any, group: Group | None = None, within_s: float | None = None) -> Any:
        return self._finish(self._begin(*words), self._patience_s if within_s is None else within_s, group)

    def _ask(
        self,
        timeout: float,
        give_up: Callable[[int], tuple[Any, ...]],
        *words: Any,
        group: Group | None = None,
        unanswered: str | None = None,
    ) -> Any:
        """Return the value of an answer that depends on other ranks.

        Args:
            timeout: Seconds to wait for the answer.
            give_up: Function that takes this request's number, and returns a follow-up request to send on timeout.
                Answers arrive in order, so once the follow-up request is answered, the original answer has arrived or
                never will.
            words: The request.
            group: Group whose rank numbers appear in error texts.
            unanswered: Error text for the case that only the follow-up request is answered; None if the follow-up
                request always makes the server answer the original.
        """
        waiter = self._begin(*words)
        try:
            if not self._wait(waiter, timeout):
                self._request(*give_up(waiter.number), group=group, within_s=self._grace_s)
                if unanswered is not None and waiter.reply is None:
                    raise CommTimeoutError(unanswered, waited_s=timeout)
        except BaseException:
            self._waiters.pop(waiter.number, None)
            raise
        return self._finish(waiter, self._grace_s, group)

    def receive(self, reply: Reply) -> Callback | None:
        """Pass a reply to its waiter. Return a callback for the caller to call outside any lock, or None."""
        number, outcome, body = reply
        if outcome == "asked":
            return lambda: self._notify(("answer", body, serialization.encode(self.activities.report())))
        if outcome == "boundary":
            group, reason = cast("tuple[str, str]", body)
            return lambda: self._notify(("passed", group, self._boundaries_of(group).hold(reason)))
        if outcome == "held":
            return lambda: self._hold(cast("str | None", body))
        if number:
            self._silent = False
            waiter = self._waiters.get(number)
            if waiter is not None:
                waiter.answer(reply)
            return None
        name, kind, rank, message = cast("tuple[str, str, int | None, str]", body)
        membership = self._members.get(name)
        return membership.fail(Cause(kind, rank, message)) if membership is not None else None

    def _end(self, cause: Cause, *, fails_groups: bool, failed_rank: int | None = None) -> list[Callback]:
        """Notify all waiting threads, and optionally the groups, that no more answers will arrive.

        `failed_rank` is the responsible rank's number in the job's first group; other groups number that rank
        differently.
        """
        with self._ending:
            if self._ended is not None:
                return []
            self._ended = cause
        members = list(self._members.values()) if fails_groups else []
        callbacks = [m.fail(_as_seen_in(m.group, cause, failed_rank)) for m in members]
        for waiter in list(self._waiters.values()):
            waiter.answer((waiter.number, "failed", (cause.kind, cause.rank, cause.message)))
        return [callback for callback in callbacks if callback is not None]

    def on_process_exit(self, error: BaseException | None) -> None:
        """Close at process exit; if an error ends the process, first report it to every group."""
        self._patience_s = min(self._patience_s, _GRACE_S)
        if self._record is not None and self._members:
            group = next(iter(self._members.values())).group
            text = "not closed" if error is None else f"{type(error).__name__}: {text_of(error)}"
            self._record.put("exit" if error is None else "error", group.name, group.rank, None, text)
        for membership in list(self._members.values()):
            if error is not None and self._ended is None:
                group = membership.group
                message = f"rank {group.rank} failed: {type(error).__name__}: {text_of(error)}"
                self.report_failure(group, Cause("PeerLostError", group.rank, message))
        self.close()

    # -- the store ---------------------------------------------------------------------------------
    def set(self, key: str, value: bytes) -> None:
        self._request("set", key, value)

    def get(self, key: str, timeout: float, group: Group | None = None) -> bytes:
        unanswered = f"waited {timeout:.1f} s for the key {key!r}, which no rank has set"
        words = ("get", key, "" if group is None else group.name)
        return bytes(self._ask(timeout, _forget, *words, group=group, unanswered=unanswered))

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._request("compare_set", key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", list(keys)))

    def delete(self, key: str) -> bool:
        return bool(self._request("delete", key))

    def num_keys(self) -> int:
        return int(self._request("num_keys"))

    # -- groups ------------------------------------------------------------------------------------
    def join(self, group: Group, on_failure: Callable[[Cause], None] | None = None) -> None:
        before = self._members.get(group.name)
        self._members[group.name] = Membership(group, on_failure)
        try:
            self._request("join", group.name, group.rank, group.size, list(group.members), group=group)
        except BaseException:
            if before is None:
                self._members.pop(group.name, None)
            else:
                self._members[group.name] = before
            raise

    def leave(self, group: Group, patience: float = 0.0) -> None:
        self._boundaries.pop(group.name, None)
        if self._members.pop(group.name, None) is None:
            return
        # Without a control plane, there is nothing to leave.
        with contextlib.suppress(PeerLostError, ClosedError, CommTimeoutError):
            waiter = self._begin("leave", group.name, patience > 0)
            if not self._wait(waiter, self._within(patience or self._patience_s)) and not self._silent:
                self._request("forget", waiter.number, within_s=self._grace_s)
            self._waiters.pop(waiter.number, None)

    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        values = self._exchange(group, topic, value, timeout, agree=False)
        # Only `agree` allows the server to answer without values.
        assert values is not None
        return values

    def exchange_unless_equal(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any] | None:
        return self._exchange(group, topic, value, timeout, agree=True)

    def _exchange(self, group: Group, topic: str, value: Any, timeout: float, *, agree: bool) -> list[Any] | None:
        known = self._members.get(group.name)
        if known is not None and known.cause is not None:
            raise error_of(known.cause, group)

        def withdraw(_number: int) -> tuple[Any, ...]:
            # The "withdraw" request notifies the other ranks, which raise the same error. It also ensures that the
            # server answers the "exchange" request, with the outcome.
            report, deadlock, *_ = hang_report(self, group)
            return "withdraw", group.name, topic, timeout, report, deadlock

        words = ("exchange", group.name, topic, serialization.encode(value), agree)
        contents = self._ask(timeout, withdraw, *words, group=group)
        return None if contents is None else [serialization.decode(content) for content in contents]

    def report_failure(self, group: Group, cause: Cause) -> Cause:
        membership = self._members.get(group.name)
        if membership is not None and membership.cause is not None:
            return membership.cause
        if self._ended is None:
            with contextlib.suppress(CommTimeoutError):
                # If the server does not answer, the other ranks have to detect the failure by themselves.
                words = (group.name, cause.kind, cause.rank, cause.message)
                return Cause(*self._request("fail", *words, group=group, within_s=min(self._patience_s, self._grace_s)))
        callback = membership.fail(cause) if membership is not None else None
        if callback is not None:
            callback()
        return cause

    def first_cause(self, group: Group, patience: float = 0.0) -> Cause | None:
        membership = self._members.get(group.name)
        if membership is not None:
            membership.failed.wait(max(0.0, patience))
            return membership.cause
        found = None if self._ended is not None else self._request("cause", group.name)
        return None if found is None else Cause(*found)

    def rebuild(
        self, group: Group, attempt: int, timeout: float, *, grow: int = 0, size: int = 0, terms: bytes = b""
    ) -> NewMembership:
        words = ("rebuild", group.name, attempt, grow, list(group.members), terms, size)
        name, members = self._ask(timeout, lambda _: ("without", group.name, attempt, timeout), *words, group=group)
        return NewMembership(name, tuple(members))

    def request_admission(self, timeout: float) -> tuple[NewMembership, int, bytes]:
        unanswered = f"waited {timeout:.1f} s to join; the ranks of the job must call comm.rebuild with grow= or size="
        name, members, rank, terms = self._ask(timeout, _forget, "apply", unanswered=unanswered)
        return NewMembership(name, tuple(members)), rank, terms

    def hold(self, reason: str | None) -> None:
        if reason is not None:
            self._hold(reason)
        self._request("hold", reason)

    def _hold(self, reason: str | None) -> None:
        # Imported here, because a job that is not debugged must not load the debugger.
        from unisono.control.debug_socket import DEBUGGED

        DEBUGGED.hold([(self, self.activities)], self._where, reason)

    # -- stopping at the same step -----------------------------------------------------------------
    def boundaries(self, group: Group) -> StepBoundaries:
        return self._boundaries_of(group.name)

    def _boundaries_of(self, name: str) -> StepBoundaries:
        # `setdefault` is atomic: the control thread and the thread that creates the communicator may call
        # `_boundaries_of` at the same time.
        return self._boundaries.setdefault(name, StepBoundaries())

    def request_stop(self, group: Group | None, reason: str) -> int:
        return int(self._request("stop", None if group is None else group.name, reason))

    def stop_verdict(self, group: Group, timeout: float) -> int | None:
        def unreported(_number: int) -> tuple[Any, ...]:
            # Fail the whole group. If only this rank gave up, it would pass this step boundary, at which the other
            # ranks may later stop.
            return "unreported", group.name, timeout, hang_report(self, group).report

        verdict: int | None = self._ask(timeout, unreported, "verdict", group.name, group=group)
        return verdict

    # -- within this process -----------------------------------------------------------------------
    def share(self, key: str, make: Callable[[], T]) -> T:
        return self._shared.get(key, make)

    # -- activity of ranks ----------------------------------------------------------------------
    def watch(self, activity: Activity) -> None:
        self.activities.add(activity)
        if self._record is None:
            self._record = record_of(activity.group.rank)
        activity.record = self._record

    def query(self, group: Group | None, patience: float) -> dict[tuple[str, int], dict[str, Any] | None]:
        name = None if group is None else group.name
        pairs = self._ask(patience, lambda number: ("enough", number), "survey", name, group=group)
        return {tuple(who): None if content is None else serialization.decode(content) for who, content in pairs}


def _forget(number: int) -> tuple[str, int]:
    return "forget", number


def _as_seen_in(group: Group, cause: Cause, failed_rank: int | None) -> Cause:
    return replace(cause, rank=group.members.index(failed_rank)) if failed_rank in group.members else cause


Callback = Callable[[], None]


def reply_of(content: bytes) -> Reply:
    """Return the answer in a frame from the first connection, which may contain values from any rank.

    Raises:
        ValueError: The frame is invalid.
    """
    match serialization.decode(content):
        case number, "ok", body if number and type(number) is int:
            return number, "ok", body
        case number, "failed", (str(kind), rank, str(message)) if number and type(number) is int and _is_rank(rank):
            return number, "failed", (kind, rank, message)
    raise ValueError("a malformed reply")


def news_of(frame: Frame) -> Reply:
    """Return the notification in a frame from the second connection. Notifications are JSON, which is cheap to encode.

    Raises:
        ValueError: The frame is invalid.
    """
    news = frame.json()
    match news:
        case "failed", (str(name), str(kind), rank, str(message)) if _is_rank(rank):
            return 0, "failed", (name, kind, rank, message)
        case ("asked", int(body)) | ("goodbye", None as body) | ("held", (None | str()) as body):
            return 0, news[0], body
        case "boundary", (str(name), str(reason)):
            return 0, "boundary", (name, reason)
    raise ValueError("a malformed notification")


def _is_rank(value: object) -> bool:
    """Return whether a value is valid as the rank in a `Cause`: an exact int, or None."""
    return value is None or type(value) is int


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request in flight.

    Attributes:
        words: The verb, and its arguments.
        reply: The answer, once it has arrived.
        awake: Set when the answer arrives, or when the waiting thread has to take over reading from the connection.
    """

    number: int
    words: tuple[Any, ...]
    reply: Reply | None = None
    awake: AutoResetEvent = field(default_factory=AutoResetEvent)

    def answer(self, reply: Reply) -> None:
        """Set the answer, unless it is already set."""
        if self.reply is None:
            self.reply = reply
            self.awake.set()


@dataclass(slots=True, eq=False)
class Membership:
    """This rank's presence in one group.

    Attributes:
        on_failure: Called with the group's first cause.
        failed: Set once `cause` is.
    """

    group: Group
    on_failure: Callable[[Cause], None] | None
    cause: Cause | None = None
    failed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, cause: Cause) -> Callback | None:
        """Record the group's first cause, and return a callback to call outside any lock; ignore later causes."""
        with self._lock:
            if self.cause is not None:
                return None
            self.cause = cause
        self.failed.set()
        return None if self.on_failure is None else partial(self.on_failure, cause)
