"""Rendezvous under torchrun: its agent's store occupies MASTER_PORT; rank 0 publishes its own address there.

That store does not authenticate; the peer at the published address still has to know the secret.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from unisono.bootstrap.rendezvous import Claim, MovedError, confirm, meet
from unisono.bootstrap.result import Rendezvous
from unisono.bootstrap.server_lease import acquire
from unisono.control.client import SocketControl
from unisono.control.secret import find_secret
from unisono.errors import CommError, CommTimeoutError, MismatchError
from unisono.host.network import address_for_others, address_towards

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["find_by_agent"]

_LOOK_EVERY_S = 0.05
_REACH_WITHIN_S = 1.0
_MOVES_WITHIN_S = 3.0


def find_by_agent(claim: Claim, host: str, port: int, secret: str | bytes | None) -> Rendezvous:
    """Return the rendezvous that rank 0 publishes in the agent's store at this address.

    After a restart, the store still holds rank 0's earlier address; each agent counts restarts by itself, so these
    counts do not tell old from new. An address that fails is therefore retried until rank 0 publishes another.
    """
    import torch.distributed as dist

    known = find_secret(secret)
    key = f"unisono/{os.environ.get('TORCHELASTIC_RUN_ID')}/rank 0"
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(1.0, claim.left_s)))
        if claim.rank:
            return _follow(store, key, claim, known, f"{host}:{port}")
        # torchrun sets the number of agents; on one host no other host needs to reach this rank.
        alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        own = address_towards(host, port) if alone else address_for_others(host, port)
        hosted = acquire(f"{key} at {host}:{port}", known, own, 0)
        try:
            store.set(key, " ".join(map(str, hosted.server.address)))
        except BaseException:
            hosted.release()
            raise
        return meet(claim, hosted.server.address, known, hosted)
    except dist.DistError as error:
        raise CommTimeoutError(
            f"torchrun's agent at {host}:{port} does not answer ({error}). Is it running?"
        ) from error


def _follow(store: TCPStore, key: str, claim: Claim, secret: bytes, where: str) -> Rendezvous:
    """Try the address that rank 0 has published, repeatedly."""
    last = "it has published nothing yet"
    while claim.left_s:
        published = _read(store, key)
        if published:
            try:
                return _try(store, key, published, claim, secret)
            except MovedError:
                continue
            except MismatchError as error:
                # An earlier run's ranks may be there still, but not for long.
                if not _moves(store, key, published, claim):
                    raise
                last = error.message
            except CommError as error:
                last = error.message
        time.sleep(_LOOK_EVERY_S)
    raise CommTimeoutError(
        f"rank 0 was not reached in time at the address published through torchrun's agent at {where} ({last}). Is "
        "it running?"
    )


def _read(store: TCPStore, key: str) -> str:
    """Return what rank 0 published last, or an empty string."""
    return store.get(key).decode() if store.check([key]) else ""


def _try(store: TCPStore, key: str, published: str, claim: Claim, secret: bytes) -> Rendezvous:
    host, port = published.rsplit(" ", 1)
    control = SocketControl(
        (host, int(port)),
        secret,
        max(claim.left_s, 1.0),
        reach_within_s=min(max(claim.left_s, 0.1), _REACH_WITHIN_S),
        host_rank=0,
        rank=claim.rank,
    )
    return confirm(claim, control, moved=lambda: _read(store, key) != published)


def _moves(store: TCPStore, key: str, published: str, claim: Claim) -> bool:
    """Return whether rank 0 publishes another address soon."""
    deadline = time.monotonic() + min(_MOVES_WITHIN_S, claim.left_s)
    while time.monotonic() < deadline:
        if _read(store, key) != published:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False
