"""Memory that the ranks of one host share: anonymous files, found by number, gone with their last user."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.control import Control
from unisono.control.failure import error_of
from unisono.errors import CommError, UnavailableError
from unisono.group import Group
from unisono.hosts import host_identity, shm_obstacle

__all__ = ["PAGE_BYTES", "meet", "neighbours"]

PAGE_BYTES = 4096
_CARD = struct.Struct("<qqq16s")

_PATIENCE_S = 1.0
"""Within this time it is known that a rank has died."""


def meet(group: Group, control: Control, name: str, nbytes: int, timeout: float) -> mmap.mmap:
    """The same zeroed memory on every rank of a group. Collective.

    Rank 0 makes an anonymous file and tells its process and descriptor; the others open it through
    /proc. A random number in it proves that they found the right one, and so that they share a host.
    The memory goes when the last process has unmapped it, however that ends.
    """
    key = f"{group.name}/{name}"
    if group.rank == 0:
        proof = secrets.token_bytes(16)
        descriptor = os.memfd_create(f"unisono {key}"[:200], os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
            memory[:16] = proof
            control.set(key, _CARD.pack(os.getpid(), descriptor, nbytes, proof))
            _all_here(group, control, key, timeout)
            memory[:16] = bytes(16)
        except CommError:
            # Some of ours are of that kind, too.
            raise
        except OSError as error:
            raise CommError(f"{nbytes} bytes of shared memory cannot be had: {error}") from error
        finally:
            os.close(descriptor)
        return memory
    card = _CARD.unpack(control.get(key, timeout, group))
    try:
        memory = _open(*card)
    except UnavailableError as error:
        # It is not there either if rank 0 has died, or given up, since it told of it.
        cause = control.cause(group, _PATIENCE_S)
        if cause is None:
            raise
        raise error_of(cause, group) from error
    _all_here(group, control, key, timeout)
    return memory


def _open(pid: int, number: int, size: int, proof: bytes) -> mmap.mmap:
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _elsewhere(str(error)) from error
    try:
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError) as error:
        raise _elsewhere(str(error)) from error
    finally:
        os.close(descriptor)
    if memory[:16] != proof:
        raise _elsewhere("another file was found in its place")
    return memory


def neighbours(group: Group, control: Control, timeout: float) -> tuple[tuple[int, ...], ...]:
    """Who can map whose memory. The first of those who seem to share a host shows a random number in memory of its own.

    Who does not find it there (in another container, say, under the same kernel) counts as a host of its own.
    """
    usable = shm_obstacle() is None
    seen = control.exchange(group, "who seems to be where", (host_identity(), usable), timeout)
    mine = seen[group.rank]
    first = next(rank for rank, other in enumerate(seen) if other == mine)
    with _shown(usable and first == group.rank) as card:
        cards = control.exchange(group, "what is shown in memory", card, timeout)
        found = usable and _sees(cards[first])
        proven = control.exchange(group, "what was found in memory", found, timeout)
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank, (other, proof) in enumerate(zip(seen, proven, strict=True)):
        parts.setdefault((*other,) if proof else (rank,), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


@contextmanager
def _shown(shows: bool) -> Iterator[bytes]:
    """A random number in anonymous memory, and where others find it."""
    if not shows:
        yield b""
        return
    proof = secrets.token_bytes(16)
    descriptor = os.memfd_create("unisono neighbours", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, proof.ljust(PAGE_BYTES, b"\0"))
        yield _CARD.pack(os.getpid(), descriptor, PAGE_BYTES, proof)
    finally:
        os.close(descriptor)


def _sees(card: bytes) -> bool:
    try:
        _open(*_CARD.unpack(card)).close()
    except (CommError, struct.error):
        return False
    return True


def _elsewhere(why: str) -> UnavailableError:
    return UnavailableError(
        f"rank 0's shared memory cannot be opened ({why}): the ranks are on different hosts or in different "
        "containers. Use backend='gloo'"
    )


def _all_here(group: Group, control: Control, key: str, timeout: float) -> None:
    """Return when every rank has mapped the memory, so that its maker may forget the descriptor."""
    if control.add(f"{key}/mapped", 1) == group.size:
        control.set(f"{key}/all", b"")
    control.get(f"{key}/all", timeout, group)
