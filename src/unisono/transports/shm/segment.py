"""Memory shared by the ranks of one host: anonymous files, found by number, freed with their last user."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeVar

from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, error_of
from unisono.core.group import Group
from unisono.errors import MismatchError, UnavailableError
from unisono.host.network import host_identity, why_no_shm

__all__ = ["PAGE_BYTES", "meet", "neighbours"]

T = TypeVar("T")
_Trouble = tuple[str, str] | None
"""Reason why a rank has no memory: the class of the error, and its text."""

PAGE_BYTES = 4096
_CARD = struct.Struct("<qqq16s")
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def meet(
    group: Group, control: ControlPlane, name: str, nbytes: int, timeout: float, mapped: Callable[[int, int], T]
) -> T:
    """Map the same zeroed memory on every rank of a group. Collective.

    Rank 0 creates an anonymous file and publishes its process and descriptor; the others open it through
    /proc. A random number in it proves that they opened the right file, and so that they share a host.
    The memory is freed when the last process has unmapped it, however that process ends.

    Args:
        group, control, timeout: The ranks that meet, their control plane, and the time limit.
        name: The same on every rank.
        nbytes: Size; the same on every rank.
        mapped: Maps a descriptor, which is closed afterwards, given its size in bytes.

    Raises:
        MismatchError: Not all ranks request the same size; on every rank.
        UnavailableError, CommError: A rank cannot map it; on every rank.
    """
    with ExitStack() as kept:
        card, trouble = _tried(group, lambda: kept.enter_context(_shown(name, nbytes)) if group.rank == 0 else b"")
        told = control.exchange(group, f"memory: {name}", (nbytes, card, trouble), timeout)
        _check(group, [other for *_, other in told])
        if len({wanted for wanted, *_ in told}) > 1:
            found = ", ".join(f"{wanted} on rank {rank}" for rank, (wanted, *_) in enumerate(told))
            raise MismatchError(f"ranks request different amounts of memory (bytes of all ranks together): {found}")
        memory, trouble = _tried(group, lambda: _opened(told[0][1], mapped))
        # It stays open until all ranks have mapped it.
        _check(group, control.exchange(group, f"memory: {name} is there", trouble, timeout))
    assert memory is not None
    return memory


def _tried(group: Group, action: Callable[[], T]) -> tuple[T | None, _Trouble]:
    """Return the result of `action`, or the reason of its failure, to be sent to all ranks."""
    try:
        return action(), None
    except UnavailableError as error:
        return None, (type(error).__name__, error.message)
    except (OSError, RuntimeError, ValueError) as error:
        return None, ("CommError", f"shared memory cannot be allocated on rank {group.rank}: {error}")


def _check(group: Group, troubles: Sequence[_Trouble]) -> None:
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            raise error_of(Cause(trouble[0], rank, trouble[1]), group)


def _opened(card: bytes, mapped: Callable[[int, int], T]) -> T:
    try:
        descriptor, nbytes = _found(card)
    except OSError as error:
        if error.errno in _USED_UP:
            raise
        raise UnavailableError(
            f"rank 0's shared memory cannot be opened ({error}): the ranks are on different hosts or in different "
            "containers. Use backend='gloo'"
        ) from error
    try:
        return mapped(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _found(card: bytes) -> tuple[int, int]:
    """Return a descriptor of the file that a card describes, and its size in bytes."""
    pid, number, nbytes, proof = _CARD.unpack(card)
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.pread(descriptor, len(proof), 0) != proof:
        os.close(descriptor)
        raise OSError("another file was found at its path")
    return descriptor, nbytes


def neighbours(group: Group, control: ControlPlane, timeout: float) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that can map each other's memory.

    The first rank of a seemingly shared host publishes a random number in its own memory. A rank that does not find
    it there (in another container, say, under the same kernel) counts as a host of its own.
    """
    usable = why_no_shm() is None
    seen = control.exchange(group, "finding ranks on one host", (host_identity(), usable), timeout)
    mine = seen[group.rank]
    first = next(rank for rank, other in enumerate(seen) if other == mine)
    with _shown("neighbours", PAGE_BYTES) if usable and first == group.rank else nullcontext(b"") as card:
        cards = control.exchange(group, "publishing shared memory", card, timeout)
        found = usable and _sees(cards[first])
        proven = control.exchange(group, "comparing shared memory", found, timeout)
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank, (other, proof) in enumerate(zip(seen, proven, strict=True)):
        parts.setdefault((*other,) if proof else (rank,), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


@contextmanager
def _shown(name: str, nbytes: int) -> Iterator[bytes]:
    """Keep anonymous memory with a random number open for the block; yield where others find it."""
    proof = secrets.token_bytes(16)
    descriptor = os.memfd_create(f"unisono {name}"[:200], os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        os.pwrite(descriptor, proof, 0)
        yield _CARD.pack(os.getpid(), descriptor, nbytes, proof)
        os.pwrite(descriptor, bytes(len(proof)), 0)
    finally:
        os.close(descriptor)


def _sees(card: bytes) -> bool:
    try:
        os.close(_found(card)[0])
    except (OSError, struct.error):
        return False
    return True
