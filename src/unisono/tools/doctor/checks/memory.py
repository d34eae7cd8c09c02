"""Check that processes can share memory: memfd for backend shm, and /dev/shm for NCCL and data loaders."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from unisono.core.work import format_bytes
from unisono.host.network import why_no_shm
from unisono.tools.doctor.examination import Finding, Target, info, ok, problem

__all__ = ["ORDER", "check"]

ORDER = 41
_FOLDER = Path("/dev/shm")
# This is enough for a DataLoader worker's batch, or for shared memory of NCCL or Open MPI. Docker's default size is 64
# MiB.
_WANTED_BYTES = 32 << 20
_TRIED_BYTES = 8 << 20
_FIX = "mount -o remount,size=2G /dev/shm   # in a container instead: docker run --shm-size=2g ... (or --ipc=host)"


def check(target: Target) -> Iterator[Finding]:
    """Allocate a memfd, and check how much space /dev/shm has."""
    if target.wants("shm"):
        yield _memfd()
    if sys.platform == "linux":
        yield _folder()


def _memfd() -> Finding:
    obstacle = why_no_shm()
    if obstacle is not None:
        return info(obstacle)
    descriptor = os.memfd_create("unisono doctor")
    try:
        os.ftruncate(descriptor, _TRIED_BYTES)
        # Allocate with a system call, which reports an error if memory is short; writing to the mapping would kill the
        # process.
        os.posix_fallocate(descriptor, 0, _TRIED_BYTES)
        mmap.mmap(descriptor, _TRIED_BYTES).close()
    except OSError as error:
        return problem(f"{_TRIED_BYTES >> 20} MiB of a memfd cannot be allocated: {error}", "ulimit -v unlimited")
    finally:
        os.close(descriptor)
    return ok("memfd works, as backend shm needs; it uses no /dev/shm")


def _folder() -> Finding:
    needs = "DataLoader workers, NCCL and Open MPI need it (backend shm does not)"
    if not os.access(_FOLDER, os.W_OK):
        return problem(
            f"{_FOLDER} does not exist or cannot be written; {needs}", f"mount -t tmpfs -o size=2G shm {_FOLDER}"
        )
    size, _, free = shutil.disk_usage(_FOLDER)
    # A tmpfs without a size limit reports a size of 0.
    if size and free < _WANTED_BYTES:
        return problem(
            f"{_FOLDER} has {format_bytes(free)} free of {format_bytes(size)}; {needs}, and die of SIGBUS when it is "
            "full",
            _FIX,
        )
    return ok(f"{_FOLDER} has {format_bytes(free)} free" if size else f"{_FOLDER} has no limit")
