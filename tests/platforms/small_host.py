"""Two ranks of shared memory in a container: each condition in a child that has it alone, with mounts of its own.

Needs root, for the mounts.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import unisono as un

__all__: list[str] = []

_CLONE_NEWNS = 0x00020000
_MIB = 1 << 20


def mount(*options: str) -> None:
    """Mount a /dev/shm that this process and its children see alone."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "shm", "/dev/shm"], check=True)


def refuse_memfd() -> None:
    """Refuse memfd_create, as a filter of system calls does."""

    def refused(name: str, flags: int = 0) -> int:
        raise PermissionError(1, "Operation not permitted")

    os.memfd_create = refused


def limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def use_shm(comm: un.Communicator) -> str:
    """Use all that is shared: more of it than a /dev/shm of 64 MB holds."""
    short, long = torch.ones(2), torch.ones(20 * _MIB)
    comm.all_reduce(short)
    comm.all_reduce(long)
    assert short.tolist() == [2.0] * 2
    assert bool((long == 2.0).all())
    shared = comm.empty((10 * _MIB,), torch.float32)
    shared.fill_(1.0)
    comm.all_reduce(shared)
    assert bool((shared == 2.0).all())
    other = torch.zeros(_MIB)
    comm.sendrecv(torch.full_like(other, comm.rank), 1 - comm.rank, other, 1 - comm.rank)
    assert bool((other == 1 - comm.rank).all())
    return comm.backend


def outcome(backend: str, rank: int, folder: str) -> str:
    """Return the backend that a rank got, or its error."""
    try:
        with un.init(
            backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=2, timeout=60, secret="s" * 32
        ) as comm:
            return use_shm(comm)
    except un.errors.CommError as error:
        return f"{type(error).__name__}: {error}"


def both(prepare: Callable[[], None], backend: str) -> list[str]:
    """Run both ranks in a child that `prepare` has changed; return their outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        if (child := os.fork()) == 0:
            prepare()
            ranks = [start(backend, rank, folder) for rank in range(2)]
            os._exit(sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks))
        assert os.waitpid(child, 0)[1] == 0
        return [Path(folder, str(rank)).read_text() for rank in range(2)]


def start(backend: str, rank: int, folder: str) -> int:
    """Start a rank that writes its outcome to a file named by its number; return its process id."""
    if (child := os.fork()) == 0:
        try:
            Path(folder, str(rank)).write_text(outcome(backend, rank, folder))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def main() -> None:
    torch.set_num_threads(1)
    works = {
        "64 MB of /dev/shm": (partial(mount, "size=64m"), "shm"),
        "/dev/shm full after one page": (partial(mount, "size=4k"), "shm"),
        "/dev/shm that cannot be written": (partial(mount, "ro"), "shm"),
        "48 open files, shm": (partial(limit_files, 48), "shm"),
        "48 open files, gloo": (partial(limit_files, 48), "gloo"),
    }
    for name, (prepare, backend) in works.items():
        found = both(prepare, backend)
        assert found == [backend] * 2, f"{name}: {found}"
    assert both(refuse_memfd, "auto") == ["tcp"] * 2
    refused = both(refuse_memfd, "shm")
    assert all("this system refuses" in error and "use backend='gloo'" in error for error in refused), refused


if __name__ == "__main__":
    main()
