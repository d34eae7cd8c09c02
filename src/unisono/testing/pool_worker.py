"""One rank of a pool: takes programs, runs them, and tells what came of them."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path

import cloudpickle

from unisono.communicator import Communicator
from unisono.errors import CommError
from unisono.launcher.job import Outcome

__all__ = ["PoolWorker", "serve"]


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """Where a rank of a pool gets its work.

    Attributes:
        address, key: Of the connection.
        folder: Where to write, on SIGUSR1, what every thread is doing.
    """

    address: str
    key: bytes
    folder: str


def serve(comm: Communicator, service: PoolWorker) -> None:
    """Run programs until the one who gives them hangs up."""
    stacks = (Path(service.folder) / f"stacks-{comm.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    parts: dict[int, Communicator | None] = {comm.size: comm}
    with stacks, Client(service.address, authkey=service.key) as link:
        link.send((comm.rank, os.getpid()))
        while True:
            try:
                size, program = pickle.loads(link.recv_bytes())
            except EOFError:
                return
            if size not in parts:
                parts[size] = comm.subgroup(range(size))
            part = parts[size]
            if part is not None:
                link.send_bytes(_perform(part, program))


def _perform(comm: Communicator, program: bytes) -> bytes:
    """The pickled outcome of one program, and whether the communicator can be used again."""
    try:
        fn, args = pickle.loads(program)
        outcome = Outcome(comm.rank, fn(comm, *args))
    except BaseException as error:
        # As at the end of a launched rank: the others learn of it, and do not wait for this one.
        comm.__exit__(type(error), error, error.__traceback__)
        outcome = Outcome.failed(comm.rank, error)
    try:
        comm.release_thread()
    except CommError:
        usable = False
    else:
        usable = comm.exception() is None
    return _packed(outcome, usable)


def _packed(outcome: Outcome, usable: bool) -> bytes:
    try:
        data = bytes(cloudpickle.dumps((outcome, usable)))
        pickle.loads(data)
    except Exception as problem:
        # What cannot travel is told of in words.
        error = outcome.error
        said = f"the result cannot be sent back: {problem}" if error is None else f"{type(error).__name__}: {error}"
        plain = Outcome(outcome.rank, error=RuntimeError(said), trace=outcome.trace or said)
        return bytes(cloudpickle.dumps((plain, usable)))
    return data
