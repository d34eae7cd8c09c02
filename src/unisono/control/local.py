"""Control plane for ranks that are threads of one process: the same state machine as the server's, behind a lock."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from unisono.control.client_base import CLOSED, ControlClient, SharedObjects
from unisono.control.replies import Outgoing
from unisono.control.state import ControlState
from unisono.core.flight_recorder import ActivityRegistry

__all__ = ["LocalControl", "LocalHub"]

T = TypeVar("T")

_PATIENCE_S = 30.0


class LocalHub:
    """Control plane shared by the ranks of one process. Create one hub, and pass each rank its own `control()`.

    Attributes:
        shared: Objects that the ranks share, kept until all members of their group have left.

    Example:
        >>> from unisono.core.group import Group
        >>> control = LocalHub().control()
        >>> alone = Group.world(0, 1)
        >>> control.join(alone, print)
        >>> control.exchange(alone, "who", "me", timeout=1.0)
        ['me']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._controls: dict[int, LocalControl] = {}
        self.shared: SharedObjects = SharedObjects()
        self._state = ControlState(self.shared.drop)

    def control(self) -> LocalControl:
        """Return the handle for another rank."""
        client = next(self._numbers)
        control = self._controls[client] = self.make(client)
        return control

    def make(self, client: int) -> LocalControl:
        """Return a new handle for this hub, which sends requests as client number `client`."""
        return LocalControl(self, client)

    def share(self, key: str, make: Callable[[], T]) -> T:
        """Implement `ControlPlane.share`."""
        return self.shared.get(key, make)

    def handle(self, client: int, number: int, words: tuple[Any, ...]) -> None:
        """Handle a request, and deliver the replies."""
        self._deliver(lambda: self._state.handle(client, number, words))

    def hold(self, reason: str | None) -> None:
        """Hold all ranks, or release them, without a request: in a simulation, a request would take virtual time."""
        from unisono.control.debug_socket import DEBUGGED

        ranks = [control.as_held() for control in list(self._controls.values())]
        DEBUGGED.hold(ranks, f"process {os.getpid()}", reason)

    def lost(self, client: int) -> None:
        """Fail all groups of a rank that has exited without closing its handle."""
        self._controls.pop(client, None)
        self._deliver(lambda: self._state.lost(client))

    def forget(self, client: int) -> None:
        """Remove a rank that has closed its handle."""
        self._controls.pop(client, None)

    def _deliver(self, change: Callable[[], Outgoing]) -> None:
        """Change the state, and deliver the replies; callbacks run outside the lock."""
        with self._lock:
            addressed = [(self._controls.get(client), reply) for client, reply in change()]
            callbacks = [control.receive(reply) for control, reply in addressed if control is not None]
        for callback in callbacks:
            if callback is not None:
                callback()


class LocalControl(ControlClient):
    """One rank's handle to its `LocalHub`.

    Callbacks passed to `join` run in the thread whose request made the group fail.
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

    def hold(self, reason: str | None) -> None:
        self._hub.hold(reason)

    def as_held(self) -> tuple[LocalControl, ActivityRegistry]:
        """Return the debugger's view of this rank."""
        return self, self._activities

    def close(self) -> None:
        if self._ended is None:
            self._request("bye")
            self._end(CLOSED, fails_groups=False)
            self._hub.forget(self._client)

    def lose(self) -> None:
        """Disconnect abruptly, as if the process had been killed; for tests, and for ranks that were aborted."""
        if self._ended is None:
            self._end(CLOSED, fails_groups=False)
            self._hub.lost(self._client)
