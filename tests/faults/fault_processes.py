"""Callers without permission: closed communicators, other threads, forks, a second process for one rank."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from fault_rows import DEATH_S, LONG_S, fault

import unisono as un
from unisono.errors import ClosedError, CommError, MismatchError


@fault("a call after close", ClosedError, names_odd=False, breaks=False)
def _(comm: Any) -> None:
    comm.close()
    comm.all_reduce(torch.ones(4))


@fault("a second thread", CommError, names_odd=False, breaks=False)
def _(comm: Any) -> None:
    comm.barrier()
    raise _of_a_thread(comm.barrier)


@fault(
    "a call in a forked child",
    CommError,
    within_s=DEATH_S,
    names_odd=False,
    breaks=False,
    impossible={
        "thread": "a fork keeps only the forking thread",
    },
)
def _(comm: Any) -> None:
    comm.barrier()
    raise _of_a_fork(lambda: comm.split(0), comm)


@fault(
    "a second process for one rank",
    MismatchError,
    names_odd=False,
    breaks=False,
    impossible={
        "thread": "all thread ranks share one process",
    },
)
def _(comm: Any) -> None:
    # Rank 0 hosts a small job, in which both others claim to be rank 1.
    address = comm.broadcast_object(_free_port() if comm.rank == 0 else None)
    claimed = 0 if comm.rank == 0 else 1
    found, made = MismatchError("the other one was refused"), None
    try:
        made = un.init("gloo", init_method=address, rank=claimed, world_size=2, timeout=5.0, secret="of a test")
    except MismatchError as error:
        found = error
    # The job stays until the other one has come.
    comm.barrier()
    if made is not None:
        made.close()
    raise found.locate(rank=comm.rank, size=comm.size, operation="init", call=1, group="world")


# -- helpers ---------------------------------------------------------------------------------------
def _of_a_thread(call: Callable[[], object]) -> BaseException:
    """Return the error of a call in another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG_S)
    return raised[0] if raised else AssertionError("nothing was raised in the other thread")


def _of_a_fork(call: Callable[[], object], comm: Any) -> BaseException:
    """Return the error of a call in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing was raised"
        try:
            call()
        except CommError as error:
            said = str(error)
        except BaseException as error:
            said = f"not a CommError but {error!r}"
        os.write(writer, said.encode()[:1000])
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 2000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    if "fork" not in said:
        return AssertionError(said)
    return CommError(said, rank=comm.rank, size=comm.size, operation="split", call=1, group="world")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
