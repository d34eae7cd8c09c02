"""One rank of a pool: receives programs, runs them, and reports their outcomes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch

from unisono.communicator import Communicator, boundaries_of
from unisono.errors import CommError
from unisono.launcher.job import run_reported

__all__ = ["PoolWorker", "serve"]


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """Source of work for a rank of a pool.

    Attributes:
        address, key: Address and key of the connection.
        folder: Folder to write the stacks of all threads to, on SIGUSR1.
    """

    address: str
    key: bytes
    folder: str


def serve(comm: Communicator, service: PoolWorker) -> None:
    """Run programs until the driver closes the connection.

    Programs get communicators of their own, so that a program that fails does not break `comm`.
    """
    stacks = (Path(service.folder) / f"stacks-{comm.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    randomness = torch.get_rng_state()
    parts: dict[tuple[int, int], Communicator | None] = {}
    with stacks, Client(service.address, authkey=service.key) as link:
        link.send((comm.rank, os.getpid()))
        while True:
            try:
                size, failures, program = pickle.loads(link.recv_bytes())
            except EOFError:
                return
            if (size, failures) not in parts:
                parts = {key: part for key, part in parts.items() if key[1] == failures}
                parts[size, failures] = comm.split(0 if comm.rank < size else None)
            part = parts[size, failures]
            if part is not None:
                torch.set_rng_state(randomness)
                link.send_bytes(_perform(part, program))


def _perform(comm: Communicator, program: bytes) -> bytes:
    """Run one program; return its outcome as `reported` reads it, and whether the communicator is still usable."""

    def run() -> Any:
        try:
            fn, args = pickle.loads(program)
            return fn(comm, *args)
        except BaseException as error:
            # As at the end of a launched rank: notify the peers, so that they do not wait for this rank.
            comm.__exit__(type(error), error, error.__traceback__)
            if type(error).__name__ == "Skipped":
                # Pytest says that its class is one of Python's own, so that pickle cannot name it.
                raise SkipTest(str(error)) from None
            raise

    outcome = run_reported(comm.rank, run)
    sys.stdout.flush()
    try:
        comm.release_thread()
    except CommError:
        usable = False
    else:
        # A request to stop is for good, and ranks may have counted different numbers of steps.
        usable = comm.exception() is None and boundaries_of(comm).unused
    return pickle.dumps((outcome, usable))
