"""Anonymous files that processes on one host map as shared memory; a file is freed when no process uses it."""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["create_file", "open_file"]

_HANDLE = struct.Struct("<qqq16s")


@contextmanager
def create_file(name: str, nbytes: int) -> Iterator[bytes]:
    """Keep a zeroed anonymous file open during a `with` block; yield a handle with which other processes open it.

    During the block, the file begins with a random number, by which `open_file` recognizes it; afterwards, this number
    is zero again.

    Args:
        name: Name of the file in /proc.
        nbytes: Size in bytes.
    """
    token = secrets.token_bytes(16)
    descriptor = os.memfd_create(f"unisono {name}"[:200], os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        os.pwrite(descriptor, token, 0)
        yield _HANDLE.pack(os.getpid(), descriptor, nbytes, token)
        os.pwrite(descriptor, bytes(len(token)), 0)
    finally:
        os.close(descriptor)


def open_file(handle: bytes) -> tuple[int, int]:
    """Open the file that a handle describes; return a descriptor and the file's size in bytes.

    Raises:
        OSError: The file cannot be opened, or another file was found at its path, for example because this process runs
            in another container.

    Example:
        >>> with create_file("example", 4096) as handle:
        ...     descriptor, nbytes = open_file(handle)
        >>> nbytes
        4096
        >>> os.close(descriptor)
    """
    pid, number, nbytes, token = _HANDLE.unpack(handle)
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.pread(descriptor, len(token), 0) != token:
        os.close(descriptor)
        raise OSError("another file was found at its path")
    return descriptor, nbytes
