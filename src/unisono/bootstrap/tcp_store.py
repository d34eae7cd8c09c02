"""Rendezvous through torch's `TCPStore` at MASTER_PORT; rank 0 publishes its own address in the store.

Under torchrun, torchrun's agent serves the store. Otherwise, rank 0 opens the store, or uses the store that torch's
env:// has opened in rank 0's process. Rank 0 closes the store before any rank continues, because torch may open its own
store at the same port next.

The store does not authenticate its clients, but the peer at the published address must still know the secret.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from unisono.bootstrap.rendezvous import (
    LINGER_S,
    MovedError,
    RankClaim,
    Rendezvous,
    acquire,
    claim_rank,
    confirm,
    hosts_at,
    meet,
)
from unisono.bootstrap.tcp import plain_host
from unisono.control.client import SocketControl, reach
from unisono.control.encryption import UntrustedError
from unisono.control.handshake import AuthenticationError, dial
from unisono.control.sockets import find_secret, listen
from unisono.core import clock
from unisono.core.group import Group
from unisono.core.threads import DaemonThreadPool
from unisono.errors import CommError, CommTimeoutError
from unisono.host.network import address_for_others, address_towards, host_in, in_zone_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["find_in_store", "published_address"]

_LOOK_EVERY_S = 0.05
_REACH_WITHIN_S = 1.0
_MOVES_WITHIN_S = 3.0
_ANSWERS_WITHIN_S = 10.0

_threads = DaemonThreadPool("unisono store")


def find_in_store(claim: RankClaim, host: str, port: int, secret: str | bytes | None, *, agent: bool) -> Rendezvous:
    """Return the rendezvous that rank 0 publishes in the store at this address.

    Rank 0 removes its address from the store once all ranks have joined. After a restart by torchrun, the store may
    still contain the previous address. Restart counts cannot tell the previous address from a new one, because each
    agent counts restarts separately. If rank 0 cannot be reached at the address in the store, the address is retried
    until rank 0 publishes another.

    Args:
        claim: This process's claim.
        host, port: MASTER_ADDR and MASTER_PORT.
        secret: As for `find`.
        agent: Whether torchrun's agent owns the store.
    """
    host = plain_host(host)
    known = find_secret(secret)
    # The key does not contain the host, because ranks may use different names for the host.
    key = f"unisono/{os.environ.get('TORCHELASTIC_RUN_ID', '')} at {port}/rank 0"
    at = _StoreAt(host, port, f"torchrun's agent at {host}:{port}" if agent else f"the store at {host}:{port}", agent)
    found = _follow(at, key, claim, known) if claim.rank else _lead(at, key, claim, known)
    try:
        # This exchange serves as a barrier: it ends when every rank has closed the store.
        found.control.exchange(Group.world(claim.rank, claim.size, found.name), "store closed", None, claim.left_s)
    except BaseException:
        found.close()
        raise
    return found


class _StoreAt(NamedTuple):
    host: str
    port: int
    where: str
    agent: bool


def _lead(at: _StoreAt, key: str, claim: RankClaim, secret: bytes) -> Rendezvous:
    """Publish the address of this process's server, and return the rendezvous at that address."""
    # torchrun sets GROUP_WORLD_SIZE to the number of its agents. With a single agent, no other host needs to reach this
    # rank.
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    outward = (address_towards if alone else address_for_others)(at.host, at.port) if at.agent else at.host
    # Start the server before publishing its address: if starting it fails, no rank has read the address yet.
    hosted = acquire(f"{key} at {at.host}", secret, outward, 0, restarts=claim.restarts)
    try:
        store = _connected(claim, at) if at.agent else _opened(claim, at, secret, key)
        with _losses_named(at):
            store.set(key, " ".join(map(str, hosted.server.address)))
    except BaseException:
        hosted.release()
        raise
    found = meet(claim, hosted.server.address, secret, hosted)
    with contextlib.suppress(RuntimeError):
        store.delete_key(key)
    return found


@contextlib.contextmanager
def _losses_named(at: _StoreAt) -> Iterator[None]:
    """Raise `MovedError` if the store's process has exited, because a restarted process opens a new store."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        raise MovedError(f"{at.where} was lost: the process that served it has ended") from error


def _connected(claim: RankClaim, at: _StoreAt) -> TCPStore:
    """Return the store that another process serves."""
    from torch.distributed import DistError

    def knock(timeout_s: float) -> str:
        # Test the address first, because torch's wait for a server cannot be interrupted.
        with dial((at.host, at.port), timeout_s) as peer:
            return host_in(peer.getpeername())

    def client() -> TCPStore:
        # Use the address that has answered: given a host name, torch would wait for each of the host's addresses in
        # turn.
        host = reach((at.host, at.port), max(claim.left_s, 0.1), knock)
        return _client(host, at.port, at.where, _ANSWERS_WITHIN_S)

    try:
        return client()
    except CommTimeoutError as error:
        if not isinstance(error.__cause__, DistError):
            raise
    # Try once more: the process that has closed the connection may have been killed and restarted.
    return client()


def _client(host: str, port: int, where: str, timeout_s: float) -> TCPStore:
    """Return a client of the store.

    Raises:
        CommTimeoutError: No store answers, although a process listens on the port.
    """
    import torch.distributed as dist

    made: Future[TCPStore] = Future()

    def make() -> None:
        try:
            made.set_result(dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s)))
        except Exception as error:
            made.set_exception(error)

    # Connect in another thread, because torch waits forever for an answer.
    _threads.run(make)
    try:
        return made.result(timeout_s)
    except (TimeoutError, dist.DistError) as error:
        raise CommTimeoutError(
            f"{where} does not answer ({str(error) or 'silence'}). Is it running, or is the port another program's?"
        ) from error


def _opened(claim: RankClaim, at: _StoreAt, secret: bytes, key: str) -> TCPStore:
    """Return the store that this process serves on this port: a store opened by torch, or a new store.

    Raises:
        CommError: Another process listens on the port.
        MismatchError: The process that listens on the port has already claimed rank 0.
    """
    import torch.distributed as dist

    host, port, *_ = at
    listener: int | None = None
    taken: CommError | None = None
    deadline = clock.now() + min(claim.left_s, LINGER_S)
    while listener is None:
        try:
            # Pass a socket to torch, because torch's own socket would listen on all interfaces.
            listener = listen(host, port).detach()
        except CommError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            taken = error
            if not hosts_at((host, port)) or clock.now() > deadline:
                break
            # An earlier `init` with tcp:// started this process's control plane on this port, so wait until the control
            # plane shuts down.
            time.sleep(_LOOK_EVERY_S)
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=_ANSWERS_WITHIN_S),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        if taken is None:
            raise CommError(f"torch cannot open its store at {host}:{port}: {error}") from error
        _claim_there(claim, at, secret, key)
        raise taken from None


def _claim_there(claim: RankClaim, at: _StoreAt, secret: bytes, key: str) -> None:
    """If another process has published an address, call `claim_rank` at that address."""
    try:
        published = _read(_client(at.host, at.port, "the store", _REACH_WITHIN_S), key, at)
    except CommError:
        return
    if published:
        claim_rank(claim, published_address(published), secret)


def _follow(at: _StoreAt, key: str, claim: RankClaim, secret: bytes) -> Rendezvous:
    """Keep trying rank 0's published address. If rank 0 is lost, try the address of its restarted process."""
    last = "it has published nothing yet"
    lost = ""
    store: TCPStore | None = None
    while claim.left_s:
        try:
            store = store or _connected(claim, at)
            published = _read(store, key, at)
            if published:
                return _try(store, key, published, claim, secret, at)
        except MovedError as error:
            # A restarted rank 0 may publish its address in a new store.
            store = None
            last = lost = error.message or last
        except CommTimeoutError:
            # If rank 0 was lost before, ignore this timeout, so that the final error reports the loss.
            if not lost:
                raise
        time.sleep(_LOOK_EVERY_S)
    raise CommTimeoutError(
        f"rank 0 was not reached in time at the address published through {at.where} ({last}). Is it running?"
    )


def _read(store: TCPStore, key: str, at: _StoreAt) -> str:
    """Return rank 0's latest address, or an empty string."""
    with _losses_named(at):
        return store.get(key).decode(errors="replace") if store.check([key]) else ""


def published_address(published: str) -> tuple[str, int]:
    """Return the address that was published.

    Raises:
        MovedError: The text is not an address; any process that reaches the store can write to it.
    """
    host, _, port = published.rpartition(" ")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise MovedError(f"{published[:80]!r} was published as the address of rank 0, which is not an address")
    return host, int(port)


def _try(store: TCPStore, key: str, published: str, claim: RankClaim, secret: bytes, at: _StoreAt) -> Rendezvous:
    host, port = published_address(published)
    control: SocketControl | None = None
    try:
        control = SocketControl(
            (in_zone_of(host, at.host), port),
            secret,
            max(claim.left_s, 1.0),
            reach_within_s=min(max(claim.left_s, 0.1), _REACH_WITHIN_S),
            host_rank=0,
            rank=claim.rank,
        )
        return confirm(claim, control, moved=lambda: _read(store, key, at) != published)
    except MovedError:
        raise
    except CommError as error:
        refusal = error.__cause__
        refused = isinstance(refusal, AuthenticationError) and (refusal.other_secret or refusal.versions)
        settled = control is not None or refused or isinstance(refusal, UntrustedError)
        # In an agent's store, the address may be from an earlier run, whose ranks may take a while to exit.
        if not settled or (at.agent and _moves(store, key, published, claim, at)):
            raise MovedError(error.message) from error
        raise


def _moves(store: TCPStore, key: str, published: str, claim: RankClaim, at: _StoreAt) -> bool:
    """Return whether rank 0 will publish another address soon."""
    deadline = clock.now() + min(_MOVES_WITHIN_S, claim.left_s)
    while clock.now() < deadline:
        if _read(store, key, at) != published:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False
