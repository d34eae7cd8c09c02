"""Imports, then ranks, as on another system: each part in a child that `hidden` has changed.

The children are forks of this process, which has imported torch once; nothing of unisono is imported before.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import getpass
import importlib
import importlib.metadata
import multiprocessing.connection
import multiprocessing.popen_fork
import os
import pkgutil
import platform
import socket
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import hidden
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

__all__: list[str] = []

# Modules that a program imports sooner or later, and that look at the platform when they are imported.
_BEFORE: tuple[ModuleType, ...] = (
    asyncio, concurrent.futures.thread, getpass, importlib.metadata, multiprocessing.connection,
    multiprocessing.popen_fork, np, platform, torch.distributed.checkpoint,
)  # fmt: skip


def import_all() -> None:
    """Import every module of the package but the native core, which is not compiled there."""
    import unisono

    for module in pkgutil.walk_packages(unisono.__path__, "unisono."):
        if module.name.endswith("__main__") or module.name == "unisono._native":
            continue
        importlib.import_module(module.name)


def run_ranks_in_process() -> None:
    """Run ranks that are threads, and simulated ranks."""
    import unisono as un

    def program(comm: un.Communicator) -> list[float]:
        total = torch.full((3,), comm.rank + 1.0)
        comm.all_reduce(total)
        comm.all_reduce(total, async_op=True).wait()
        comm.split(comm.rank % 2).barrier()
        comm.all_gather_object(comm.rank)
        return total.tolist()

    with un.init() as alone:
        assert alone.size == 1
    for backend in ("thread", "sim"):
        assert un.launch(program, 2, backend) == [[6.0] * 3] * 2


def refuse_shm() -> None:
    """Be refused backend "shm" in one sentence."""
    _refuse("needs Linux", "shm")


def refuse_processes() -> None:
    """Be refused ranks that are processes in one sentence."""
    _refuse("need select.poll", "gloo")


def _refuse(reason: str, backend: str) -> None:
    import unisono as un

    with pytest.raises(un.errors.UnavailableError, match=reason):
        un.init(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1, timeout=10)


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def join(rank: int, folder: str, port: int) -> None:
    """Be one of two ranks of gloo, by each way to start."""
    import unisono as un

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    numbers = {"rank": rank, "world_size": 2}
    starts: dict[str, dict[str, int]] = {
        f"file://{folder}/ranks": numbers,
        f"tcp://127.0.0.1:{port}": numbers,
        "env://": {},
    }
    for init_method, place in starts.items():
        with un.init("gloo", init_method=init_method, timeout=60, secret="s" * 32, **place) as comm:
            total = torch.full((3,), rank + 1.0)
            comm.all_reduce(total)
            assert total.tolist() == [3.0] * 3
            assert comm.backend == "gloo"


def in_children(system: hidden.Platform, *children: Sequence[Callable[[], None]]) -> None:
    """Run the actions of each child, all children at the same time; raise if one fails."""
    fork, wait, leave = os.fork, os.waitpid, os._exit
    numbers = []
    for actions in children:
        number = fork()
        if number == 0:
            try:
                hidden.hide(system)
                for action in actions:
                    action()
            except BaseException:
                print(f"on {system}:", file=sys.stderr)
                traceback.print_exc()
                leave(1)
            leave(0)
        numbers.append(number)
    assert [wait(number, 0)[1] for number in numbers] == [0] * len(numbers)


def main() -> None:
    torch.set_num_threads(1)
    sysconfig.get_config_vars()
    in_children("win32", [import_all, run_ranks_in_process, refuse_processes])
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        first, second = (partial(join, rank, folder, port) for rank in range(2))
        in_children("darwin", [run_ranks_in_process, refuse_shm, first], [second])


if __name__ == "__main__":
    main()
