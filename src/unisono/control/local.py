"""Control plane for ranks that are threads of one process: the same state machine as the server's, behind a lock."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from unisono.control.client_base import CLOSED, ControlClient, SharedObjects
from unisono.control.replies import Outgoing
from unisono.control.state import ControlState

__all__ = ["LocalControl", "LocalHub"]

_PATIENCE_S = 30.0


class LocalControl(ControlClient):
    """One rank's handle to its `LocalHub`.

    Callbacks passed to `join` run in the thread whose request made the group fail.
    """

    def __init__(self, hub: LocalHub, client: int) -> None:
        super().__init__(_PATIENCE_S, hub.shared)
        self._hub = hub
        self._client = client

    @property
    def _where(self) -> str:
        return "the control plane of this process"

    def _send(self, number: int, words: tuple[Any, ...]) -> None:
        self._hub.handle(self._client, number, words)

    def _notify(self, words: tuple[Any, ...]) -> None:
        self._hub.handle(self._client, 0, words)

    def hold(self, reason: str | None) -> None:
        self._hub.hold(reason)

    def close(self) -> None:
        if self._ended is None:
            self._request("bye")
            self._end(CLOSED, fails_groups=False)
            self._hub.forget(self._client)


class LocalHub:
    """Control plane shared by the ranks of one process. Create one hub, and pass each rank its own `control()`.

    Attributes:
        shared: Objects that the ranks share, kept until all members of their group have left.
        state: The state machine. A thread that may change it holds the hub's lock.

    Example:
        >>> from unisono.core.group import Group
        >>> control = LocalHub().control()
        >>> alone = Group.world(0, 1)
        >>> control.join(alone, print)
        >>> control.exchange(alone, "who", "me", timeout=1.0)
        ['me']
    """

    # Class of the handles that `control` returns.
    _kind = LocalControl

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._controls: dict[int, LocalControl] = {}
        self.shared: SharedObjects = SharedObjects()
        self.state: ControlState = ControlState(self.shared.drop)

    def control(self) -> LocalControl:
        """Return the handle for another rank."""
        client = next(self._numbers)
        control = self._controls[client] = self._kind(self, client)
        return control

    def handle(self, client: int, number: int, words: tuple[Any, ...]) -> None:
        """Handle a request, and deliver the replies."""
        self._deliver(lambda: self.state.handle(client, number, words))

    def hold(self, reason: str | None) -> None:
        """Hold all ranks, or release them, without a request: in a simulation, a request would take virtual time."""
        from unisono.control.debug_socket import DEBUGGED

        ranks = [(control, control.activities) for control in list(self._controls.values())]
        DEBUGGED.hold(ranks, f"process {os.getpid()}", reason)

    def lost(self, client: int) -> None:
        """Fail all groups of a rank that has exited without closing its handle."""
        self._controls.pop(client, None)
        self._deliver(lambda: self.state.lost(client))

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
