"""The control plane of ranks that are threads of one process: the same state machine behind a lock."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from unisono.control.client_base import ControlClient
from unisono.control.state import ControlState, Outgoing
from unisono.core.failure import Cause

__all__ = ["LocalControl", "LocalHub"]

T = TypeVar("T")

_PATIENCE_S = 30.0


class LocalHub:
    """Meeting point of the ranks of one process. Create one hub, and pass each rank its own `control()`.

    Example:
        >>> from unisono.core.group import Group
        >>> control = LocalHub().control()
        >>> alone = Group.world(0, 1)
        >>> control.join(alone, print)
        >>> control.exchange(alone, "who", "me", timeout=1.0)
        ['me']
    """

    def __init__(self) -> None:
        self._state = ControlState(self._group_over)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._controls: dict[int, LocalControl] = {}
        self._objects: dict[str, Any] = {}
        self._making = threading.RLock()

    def control(self) -> LocalControl:
        """Return the handle of one more rank."""
        client = next(self._numbers)
        control = self._controls[client] = self.make(client)
        return control

    def make(self, client: int) -> LocalControl:
        """Return a new handle, which knows the hub and its own number."""
        return LocalControl(self, client)

    def share(self, key: str, make: Callable[[], T]) -> T:
        """As `ControlPlane.share`."""
        with self._making:
            if key not in self._objects:
                self._objects[key] = make()
            shared: T = self._objects[key]
            return shared

    def handle(self, client: int, number: int, words: tuple[Any, ...]) -> None:
        """Handle a request, and deliver the replies."""
        with self._lock:
            callbacks = self._deliver(self._state.handle(client, number, words))
        for callback in callbacks:
            callback()

    def lost(self, client: int) -> None:
        """Fail all groups of a rank that has ended without closing its handle."""
        with self._lock:
            self._controls.pop(client, None)
            callbacks = self._deliver(self._state.lost(client))
        for callback in callbacks:
            callback()

    def forget(self, client: int) -> None:
        """Remove a rank that has closed its handle."""
        self._controls.pop(client, None)

    def _group_over(self, name: str) -> None:
        """Drop the objects that ranks shared as members of a group. (No lock: a thread creating one may call this.)"""
        for key in [key for key in list(self._objects) if key.startswith(f"{name}/")]:
            self._objects.pop(key, None)

    def _deliver(self, out: Outgoing) -> list[Callable[[], None]]:
        addressed = ((self._controls.get(client), reply) for client, reply in out)
        callbacks = (control.receive(reply) for control, reply in addressed if control is not None)
        return [callback for callback in callbacks if callback is not None]


class LocalControl(ControlClient):
    """One rank's handle to its `LocalHub`.

    Callbacks of `join` run in the thread that sent the request that made the group fail.
    """

    def __init__(self, hub: LocalHub, client: int) -> None:
        super().__init__(_PATIENCE_S)
        self._hub = hub
        self._client = client

    @property
    def _where(self) -> str:
        return "the control plane of this process"

    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        self._hub.handle(self._client, number, words)

    def _notify(self, words: tuple[Any, ...]) -> None:
        self._hub.handle(self._client, 0, words)

    def share(self, key: str, make: Callable[[], T]) -> T:
        return self._hub.share(key, make)

    def close(self) -> None:
        if self._ended is None:
            self._request("bye")
            self._end(Cause("ClosedError", None, "this control handle is closed"), fails_groups=False)
            self._hub.forget(self._client)

    def lose(self) -> None:
        """End like a killed process: without leaving. For tests, and for ranks that broke off."""
        if self._ended is None:
            self._end(Cause("ClosedError", None, "this control handle is closed"), fails_groups=False)
            self._hub.lost(self._client)
