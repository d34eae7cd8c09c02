"""All that a rank may ask of the control plane, on top of one way to send a request and get replies."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from unisono import wire
from unisono.control.base import Cause, Control
from unisono.control.failure import error_of
from unisono.control.groups import Reply
from unisono.errors import ClosedError, CommTimeoutError, PeerLostError
from unisono.group import Group

__all__ = ["Callback", "Requester", "Waiter"]

Callback = Callable[[], None]

# After a timeout: for the server to say what came of it.
_GRACE_S = 5.0


class Waiter:
    """One request under way. A bare lock: nothing else in Python wakes another thread as fast."""

    __slots__ = ("_lock", "number", "reply")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: Reply | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def answer(self, reply: Reply) -> None:
        """The first answer counts."""
        if self.reply is None:
            self.reply = reply
            self.wake()

    def wake(self) -> None:
        """Let who sleeps look around."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def sleep(self, timeout: float) -> None:
        """Until the answer is there, or somebody wakes this thread, or the time is up."""
        if self.reply is None:
            self._lock.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))


class _Membership:
    """This rank's presence in one group."""

    def __init__(self, group: Group, on_failure: Callable[[Cause], None]) -> None:
        self.group = group
        self.cause: Cause | None = None
        self.told = threading.Event()
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def fail(self, cause: Cause) -> Callback | None:
        """Keep the first cause; what is then to be called, outside of any lock."""
        with self._lock:
            if self.cause is not None:
                return None
            self.cause = cause
        self.told.set()
        return lambda: self._on_failure(cause)


class Requester(Control, ABC):
    """A rank's handle, but for how messages travel.

    Args:
        patience_s: How long to wait for an answer that nothing holds up.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._numbers = itertools.count(1)
        self._waiters: dict[int, Waiter] = {}
        self._members: dict[str, _Membership] = {}
        self._ended: Cause | None = None
        self._ending = threading.Lock()

    @abstractmethod
    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        """Start a request. Its reply comes to `_receive`, from any thread, even before this returns."""

    def _wait(self, waiter: Waiter, timeout: float) -> bool:
        """Whether the answer has come in time."""
        waiter.sleep(timeout)
        return waiter.reply is not None

    @property
    @abstractmethod
    def _where(self) -> str:
        """What the other side is called in messages."""

    # -- requests and replies ----------------------------------------------------------------------
    def _begin(self, *words: Any) -> Waiter:
        waiter = Waiter(next(self._numbers))
        self._waiters[waiter.number] = waiter
        try:
            # Looked at only now: whoever ends the connection sets it first, and then answers the waiters.
            if self._ended is not None:
                raise error_of(self._ended)
            self._send(waiter.number, words)
        except BaseException:
            self._waiters.pop(waiter.number, None)
            raise
        return waiter

    def _finish(self, waiter: Waiter, timeout: float, group: Group | None = None) -> Any:
        """The value of the answer, or its error."""
        try:
            self._wait(waiter, timeout)
        finally:
            self._waiters.pop(waiter.number, None)
        if waiter.reply is None:
            raise CommTimeoutError(
                f"{self._where} has not answered for {timeout:.1f} s. Is its process alive, and not stopped?",
                waited_s=timeout,
            )
        _, outcome, body = waiter.reply
        if outcome == "failed":
            raise error_of(Cause(*cast("tuple[str, int | None, str]", body)), group)
        return body

    def _ask(self, *words: Any, group: Group | None = None, within_s: float | None = None) -> Any:
        return self._finish(self._begin(*words), self._patience_s if within_s is None else within_s, group)

    def _receive(self, reply: Reply) -> Callback | None:
        """Hand a reply to who waits for it; what is to be called because of it, outside of any lock."""
        number, _, body = reply
        if number:
            waiter = self._waiters.get(number)
            if waiter is not None:
                waiter.answer(reply)
            return None
        name, kind, rank, message = cast("tuple[str, str, int | None, str]", body)
        membership = self._members.get(name)
        return membership.fail(Cause(kind, rank, message)) if membership is not None else None

    def _end(self, cause: Cause, *, fails_groups: bool) -> list[Callback]:
        """No answer will come any more: tell whoever waits for one, and the groups if so wanted."""
        with self._ending:
            if self._ended is not None:
                return []
            self._ended = cause
        callbacks = [m.fail(cause) for m in list(self._members.values())] if fails_groups else []
        for waiter in list(self._waiters.values()):
            waiter.answer((waiter.number, "failed", (cause.kind, cause.rank, cause.message)))
        return [callback for callback in callbacks if callback is not None]

    def give_up(self, error: BaseException | None) -> None:
        """Close, since the process ends: in peace, or telling every group the error that ends it."""
        self._patience_s = min(self._patience_s, _GRACE_S)
        for membership in list(self._members.values()):
            if error is not None and self._ended is None:
                group = membership.group
                message = f"rank {group.rank} failed: {type(error).__name__}: {error}"
                self.fail(group, Cause("PeerLostError", group.rank, message))
        self.close()

    # -- the store ---------------------------------------------------------------------------------
    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str, timeout: float) -> bytes:
        waiter = self._begin("get", key)
        try:
            if not self._wait(waiter, timeout):
                # Answers come in order: after this one, the value either is here or will never come.
                self._ask("forget", waiter.number, within_s=_GRACE_S)
            if waiter.reply is None:
                message = f"waited {timeout:.1f} s for the key {key!r}, which nobody has set"
                raise CommTimeoutError(message, waited_s=timeout)
        finally:
            self._waiters.pop(waiter.number, None)
        value: bytes = self._finish(waiter, 0)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        value: bytes = self._ask("compare_set", key, expected, desired)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def delete(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    # -- groups ------------------------------------------------------------------------------------
    def join(self, group: Group, on_failure: Callable[[Cause], None]) -> None:
        before = self._members.get(group.name)
        self._members[group.name] = _Membership(group, on_failure)
        try:
            self._ask("join", group.name, group.rank, group.size, group=group)
        except BaseException:
            if before is None:
                self._members.pop(group.name, None)
            else:
                self._members[group.name] = before
            raise

    def leave(self, group: Group) -> None:
        if self._members.pop(group.name, None) is not None:
            # Without a control plane there is nothing left to leave.
            with contextlib.suppress(PeerLostError, ClosedError):
                self._ask("leave", group.name, group=group)

    def exchange(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any]:
        contents = self._exchange(group, topic, value, timeout, agree=False)
        return [wire.decode(content) for content in contents]

    def agree(self, group: Group, topic: str, value: Any, timeout: float) -> list[Any] | None:
        contents = self._exchange(group, topic, value, timeout, agree=True)
        return None if contents is None else [wire.decode(content) for content in contents]

    def _exchange(self, group: Group, topic: str, value: Any, timeout: float, *, agree: bool) -> Any:
        known = self._members.get(group.name)
        if known is not None and known.cause is not None:
            raise error_of(known.cause, group)
        waiter = self._begin("exchange", group.name, topic, wire.encode(value), agree)
        try:
            if not self._wait(waiter, timeout):
                # The others learn of it and raise the same; the answer to the exchange says what came of it.
                self._ask("withdraw", group.name, topic, timeout, group=group, within_s=_GRACE_S)
        except BaseException:
            self._waiters.pop(waiter.number, None)
            raise
        return self._finish(waiter, _GRACE_S, group)

    def fail(self, group: Group, cause: Cause) -> Cause:
        membership = self._members.get(group.name)
        if membership is not None and membership.cause is not None:
            return membership.cause
        if self._ended is not None:
            callback = membership.fail(cause) if membership is not None else None
            if callback is not None:
                callback()
            return cause
        return Cause(*self._ask("fail", group.name, cause.kind, cause.rank, cause.message, group=group))

    def cause(self, group: Group, patience: float = 0.0) -> Cause | None:
        membership = self._members.get(group.name)
        if membership is not None:
            membership.told.wait(max(0.0, patience))
            return membership.cause
        told = None if self._ended is not None else self._ask("cause", group.name)
        return None if told is None else Cause(*told)
