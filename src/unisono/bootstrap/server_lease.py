"""The control servers that this process hosts, as rank 0 of one job or several."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from unisono.control.process_exit import CLOSE_SERVERS, close_all, when_process_ends
from unisono.control.server import ControlServer

__all__ = ["LINGER_S", "Lease", "acquire", "hosts_at"]

# Long enough for ranks that end together, short enough for one that does not end at all.
LINGER_S = 5.0


@dataclass(slots=True)
class Lease:
    """Right to use a server of this process, shared by all callers that requested the same key.

    Attributes:
        server: The server.
        secret: The secret that it was started with.
        users: Number of users that have not released it.
        withdraw: Called when the last user has released it, before it ends.
    """

    server: ControlServer
    secret: bytes
    users: int
    withdraw: Callable[[], None]

    def release(self) -> None:
        """Release this use. After the last one, the server ends when its clients have, in the background."""
        with _lock:
            self.users -= 1
            if not self.users:
                self.withdraw()
                self.server.retire(LINGER_S)


_leases: dict[tuple[int, str], Lease] = {}
_lock = threading.Lock()


def acquire(key: str, secret: bytes | None, host: str, port: int, withdraw: Callable[[], None] = lambda: None) -> Lease:
    """The server that this process runs under `key`; a new one if there is none.

    Without a secret, it has one of its own.

    The next `init` of a job finds the server of the last one, even if that is about to end.

    Raises:
        ValueError: It runs, with another secret.
        CommError: A new one cannot listen there.
    """
    with _lock:
        known = _leases.get((os.getpid(), key))
        if known is not None and known.users and secret not in (None, known.secret):
            raise ValueError(f"this process hosts {key} already, with another secret; pass the same secret")
        if known is not None and secret in (None, known.secret) and known.server.stay():
            known.users += 1
            return known
        chosen = secrets.token_hex(32).encode() if secret is None else secret
        made = _leases[os.getpid(), key] = Lease(ControlServer(chosen, host, port), chosen, 1, withdraw)
    when_process_ends(_close_servers, CLOSE_SERVERS)
    return made


def hosts_at(address: tuple[str, int]) -> bool:
    """Return whether a server of this process listens at an address, or did: one that is retired does for a while."""
    return any(process == os.getpid() and held.server.address == address for (process, _), held in _leases.items())


def _close_servers() -> None:
    # This process's own handles close first, whatever the order of its exit hooks.
    close_all()
    mine = [held for (process, _), held in _leases.items() if process == os.getpid()]
    for held in mine:
        if held.users:
            held.withdraw()
        held.server.retire(LINGER_S)
    for held in mine:
        held.server.close(LINGER_S)
