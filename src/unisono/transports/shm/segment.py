"""Memory shared by the ranks on one host: anonymous files, opened through /proc and freed by the last process."""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TypeVar

from unisono.core.control import ControlPlane
from unisono.core.failure import Cause, error_of
from unisono.core.group import Group
from unisono.errors import MismatchError, UnavailableError
from unisono.host.anonymous_files import create_file, open_file
from unisono.host.native import core_build
from unisono.host.network import host_identity, why_no_shm

__all__ = ["PAGE_BYTES", "map_shared", "neighbours", "open_pipes"]

T = TypeVar("T")
_Failure = tuple[str, str] | None
"""Reason why a rank could not create or map the memory: class and text of the error; None if it could."""

PAGE_BYTES = 4096
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def map_shared(
    group: Group, control: ControlPlane, name: str, nbytes: int, timeout: float, map_file: Callable[[int, int], T]
) -> T:
    """Map the same zeroed memory on every rank of a group. Collective.

    Rank 0 creates an anonymous file and publishes its own process ID and the descriptor; the other ranks open the file
    through /proc. A random number in the file proves that they opened the right file, and therefore share a host. The
    memory is freed when the last process has unmapped it, even if that process is killed.

    Args:
        group, control, timeout: The ranks that share the memory, their control plane, and the time limit in seconds.
        name: Name of the memory; the same on every rank.
        nbytes: Size in bytes; the same on every rank.
        map_file: Function that maps the file, given a descriptor and a size in bytes. The descriptor is closed after
            the function returns.

    Raises:
        MismatchError: Ranks request different sizes. Raised on every rank.
        UnavailableError, CommError: A rank cannot map the memory. Raised on every rank.
    """
    with ExitStack() as stack:
        handle, failure = _attempt(
            group, lambda: stack.enter_context(create_file(name, nbytes)) if group.rank == 0 else b""
        )
        replies = control.exchange(group, f"memory: {name}", (nbytes, handle, failure), timeout)
        _check(group, [other for *_, other in replies])
        if len({requested for requested, *_ in replies}) > 1:
            found = ", ".join(f"{requested} on rank {rank}" for rank, (requested, *_) in enumerate(replies))
            raise MismatchError(f"ranks request different amounts of memory (bytes of all ranks together): {found}")
        memory, failure = _attempt(group, lambda: _map(replies[0][1], map_file))
        # Rank 0 must keep the file open until all ranks have mapped it.
        _check(group, control.exchange(group, f"memory: {name} mapped", failure, timeout))
    assert memory is not None
    return memory


def open_pipes(group: Group, control: ControlPlane, name: str, timeout: float) -> list[io.FileIO]:
    """Open the same pipes on every rank of a group, one per rank: non-blocking, for reading and writing. Collective.

    Args:
        group, control, timeout: As for `map_shared`, which must have shown that these ranks share a host.
        name: Name of the pipes; the same on every rank.

    Raises:
        CommError: A rank cannot open the pipes. Raised on every rank.
    """
    made: list[int] = []
    opened: list[io.FileIO] = []
    try:
        _, failure = _attempt(
            group, lambda: made.extend(end for _ in group.members if group.rank == 0 for end in os.pipe())
        )
        replies = control.exchange(group, f"pipes: {name}", (os.getpid(), made, failure), timeout)
        _check(group, [other for *_, other in replies])
        pid, ends, _ = replies[0]
        _, failure = _attempt(group, lambda: opened.extend(_open_pipe(pid, end) for end in ends[::2]))
        # Rank 0 must keep the pipes open until all ranks have opened them.
        _check(group, control.exchange(group, f"pipes: {name} opened", failure, timeout))
    except BaseException:
        for pipe in opened:
            pipe.close()
        raise
    finally:
        for end in made:
            os.close(end)
    return opened


def _open_pipe(pid: int, end: int) -> io.FileIO:
    return io.FileIO(f"/proc/{pid}/fd/{end}", "r+", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def _attempt(group: Group, action: Callable[[], T]) -> tuple[T | None, _Failure]:
    """Return the result of `action`, or the reason for its failure, which the caller sends to all ranks."""
    try:
        return action(), None
    except UnavailableError as error:
        return None, (type(error).__name__, error.message)
    except (OSError, RuntimeError, ValueError) as error:
        return None, ("CommError", f"shared memory cannot be allocated on rank {group.rank}: {error}")


def _check(group: Group, failures: Sequence[_Failure]) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise error_of(Cause(failure[0], rank, failure[1]), group)


def _map(handle: bytes, map_file: Callable[[int, int], T]) -> T:
    try:
        descriptor, nbytes = open_file(handle)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        raise UnavailableError(
            f"rank 0's shared memory cannot be opened ({error}): the ranks are on different hosts or in different "
            "containers. Use backend='gloo'"
        ) from error
    try:
        return map_file(descriptor, nbytes)
    finally:
        os.close(descriptor)


def neighbours(group: Group, control: ControlPlane, timeout: float) -> tuple[tuple[int, ...], ...]:
    """Return the ranks, grouped into sets that can map each other's memory. Collective.

    Among ranks that seem to share a host, the first publishes a random number in its memory. A rank that cannot read
    this number, for example because it runs in another container, counts as a separate host.
    """
    # Compare builds of the native core as well, because ranks with different builds cannot share memory.
    usable = why_no_shm() is None
    seen = control.exchange(group, "finding ranks on one host", (host_identity(), usable and core_build()), timeout)
    mine = seen[group.rank]
    first = next(rank for rank, other in enumerate(seen) if other == mine)
    with create_file("neighbours", PAGE_BYTES) if usable and first == group.rank else nullcontext(b"") as handle:
        handles = control.exchange(group, "publishing shared memory", handle, timeout)
        found = usable and _can_open(handles[first])
        proven = control.exchange(group, "comparing shared memory", found, timeout)
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank, (other, found) in enumerate(zip(seen, proven, strict=True)):
        parts.setdefault((*other,) if found else (rank,), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


def _can_open(handle: bytes) -> bool:
    try:
        os.close(open_file(handle)[0])
    except (OSError, struct.error):
        return False
    return True
