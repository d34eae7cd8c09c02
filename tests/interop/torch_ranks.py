"""Ranks that have torch's default group on unisono, and a gloo group beside it."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono as un
from unisono.interop import GroupOptions
from unisono.testing import pool

__all__ = ["SHORT", "message", "on_ranks", "reserved_ports", "summed"]

Program = Callable[..., Any]
SHORT = timedelta(seconds=0.5)


def on_ranks(program: Program, size: int, folder: Path, *args: Any, transport: str = "auto", **how: Any) -> list[Any]:
    """`program(*args)` on each rank, in a default group of torch's; on new ranks if there are options of `launch`."""
    given = program, str(folder / "store"), transport, args
    if how:
        return un.launch(_inside, size, "shm", given, timeout=30, **how)
    return pool("shm", 4, timeout=30).run(_inside, *given, size=size)


def _inside(comm: un.Communicator, program: Program, path: str, transport: str, args: tuple[Any]) -> Any:
    # Some of what is tested is about to be renamed by torch.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        "unisono",
        init_method=f"file://{path}",
        rank=comm.rank,
        world_size=comm.size,
        pg_options=GroupOptions(transport),
    )
    try:
        return program(*args)
    finally:
        dist.destroy_process_group()


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports that the system assigns to no other socket meanwhile; a server that requests one by its number gets it."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            # Bound, but not listening: then a server with the same option may bind it too, as torch's stores do.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in held]


def message(call: Callable[[], object]) -> str:
    """Return the text of an error and its class."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def summed(group: Any = None) -> float:
    t = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(t, group=group)
    return t.item()
