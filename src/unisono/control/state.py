"""What the control plane knows, as a pure state machine: requests in, replies out, no sockets, threads or clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.control.base import Cause
from unisono.control.groups import Groups, Outgoing, failed
from unisono.control.keys import Keys

__all__ = ["ControlState"]


class ControlState:
    """One for a job. Clients are numbers that whoever carries the messages gives out.

    Requests are tuples, a verb and its arguments: see the methods that begin with `_on_`. Each gets
    one reply, at once or later: `(request, "ok", value)` or `(request, "failed", cause)`. A group's
    failure is told to all members as `(0, "failed", (group, *cause))`.

    Values of an exchange are bytes that nobody looks into, so "equal" means that the bytes are.
    Memory is bounded: finished exchanges are forgotten, and groups that everybody has left.

    Example:
        >>> state = ControlState()
        >>> state.handle(1, 7, ("get", "where"))
        []
        >>> state.handle(2, 3, ("set", "where", b"here"))
        [(1, (7, 'ok', b'here')), (2, (3, 'ok', None))]
    """

    def __init__(self) -> None:
        self._keys = Keys()
        self._groups = Groups()
        self._seats: dict[tuple[str, int], tuple[int, str, int]] = {}
        self._clients: set[int] = set()

    def handle(self, client: int, request: int, words: tuple[Any, ...]) -> Outgoing:
        """What is to be told to whom, in this order. A request out of form raises ValueError or TypeError."""
        self._clients.add(client)
        verb, *arguments = words
        handler: Callable[..., Outgoing] | None = getattr(self, f"_on_{verb}", None)
        if handler is None:
            raise ValueError(f"there is no request {verb!r}")
        return handler(client, request, *arguments)

    def lost(self, client: int) -> Outgoing:
        """A client's connection ended without `bye`."""
        self._forget(client)
        return self._groups.lose(client)

    # -- the store ---------------------------------------------------------------------------------
    def _on_set(self, client: int, request: int, key: str, value: bytes) -> Outgoing:
        return [*_wake(self._keys.set(key, value), value), (client, (request, "ok", None))]

    def _on_get(self, client: int, request: int, key: str) -> Outgoing:
        value = self._keys.get(key, client, request)
        return [] if value is None else [(client, (request, "ok", value))]

    def _on_forget(self, client: int, request: int, other: int) -> Outgoing:
        self._keys.forget(client, other)
        return [(client, (request, "ok", None))]

    def _on_add(self, client: int, request: int, key: str, amount: int) -> Outgoing:
        try:
            total, waiting = self._keys.add(key, amount)
        except ValueError:
            return [(client, failed(request, Cause("CommError", None, f"the key {key!r} holds no number to add to")))]
        return [*_wake(waiting, b"%d" % total), (client, (request, "ok", total))]

    def _on_compare_set(self, client: int, request: int, key: str, expected: bytes, desired: bytes) -> Outgoing:
        value, waiting = self._keys.compare_set(key, expected, desired)
        return [*_wake(waiting, value), (client, (request, "ok", value))]

    def _on_check(self, client: int, request: int, keys: list[str]) -> Outgoing:
        return [(client, (request, "ok", self._keys.check(keys)))]

    def _on_delete(self, client: int, request: int, key: str) -> Outgoing:
        return [(client, (request, "ok", self._keys.delete(key)))]

    def _on_num_keys(self, client: int, request: int) -> Outgoing:
        return [(client, (request, "ok", len(self._keys)))]

    # -- groups ------------------------------------------------------------------------------------
    def _on_join(self, client: int, request: int, name: str, rank: int, size: int) -> Outgoing:
        return self._groups.join(client, request, name, rank, size)

    def _on_leave(self, client: int, request: int, name: str) -> Outgoing:
        return [*self._groups.leave(client, name), (client, (request, "ok", None))]

    def _on_exchange(self, client: int, request: int, name: str, topic: str, content: bytes, agree: bool) -> Outgoing:
        return self._groups.exchange(client, request, name, topic, content, agree)

    def _on_withdraw(self, client: int, request: int, name: str, topic: str, waited_s: float) -> Outgoing:
        return [*self._groups.withdraw(name, topic, waited_s), (client, (request, "ok", None))]

    def _on_fail(self, client: int, request: int, name: str, kind: str, rank: int | None, message: str) -> Outgoing:
        first, out = self._groups.fail(name, Cause(kind, rank, message))
        return [*out, (client, (request, "ok", (first.kind, first.rank, first.message)))]

    def _on_cause(self, client: int, request: int, name: str) -> Outgoing:
        cause = self._groups.cause(name)
        return [(client, (request, "ok", None if cause is None else (cause.kind, cause.rank, cause.message)))]

    # -- clients -----------------------------------------------------------------------------------
    def _on_enrol(self, client: int, request: int, job: str, rank: int, size: int, process: str) -> Outgoing:
        """Join the next world of a job, and be told its name.

        Each `init` of a rank is one world further. A rank's next process may take over after its
        last one has gone; another process beside it is a mistake, which ends a world that is
        still gathering.
        """
        number, holder, last = self._seats.get((job, rank), (0, process, client))
        if holder != process and last in self._clients:
            message = f"two processes claim to be rank {rank} of {job}; give each one its own rank"
            cause = Cause("MismatchError", rank, message)
            name = f"{job}{number}"
            out = [] if self._groups.complete(name) else self._groups.fail(name, cause)[1]
            return [*out, (client, failed(request, cause))]
        self._seats[job, rank] = number + 1, process, client
        name = f"{job}{number + 1}"
        return self._groups.join(client, request, name, rank, size, answer=name)

    def _on_bye(self, client: int, request: int) -> Outgoing:
        """Leave everything in peace; the connection may end now."""
        self._forget(client)
        return [*self._groups.leave_all(client), (client, (request, "ok", None))]

    def _forget(self, client: int) -> None:
        self._clients.discard(client)
        self._keys.forget(client)


def _wake(waiting: list[tuple[int, int]], value: bytes) -> Outgoing:
    return [(client, (request, "ok", value)) for client, request in waiting]
