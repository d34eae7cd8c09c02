"""One rank of a pool: receives programs, runs them, and reports their outcomes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch

from unisono.communicator import Communicator, boundaries_of
from unisono.errors import CommError
from unisono.launcher.job import run_reported
from unisono.launcher.linked_ranks import own_link

__all__ = ["LEAVE", "serve"]


LEAVE = b""
"""Message that is sent instead of a program to make a rank exit."""


def serve(comm: Communicator, folder: str) -> None:
    """Run programs until the driver tells this rank to exit, or the driver has exited.

    Programs get their own communicators, so that a failing program does not break `comm`.

    Args:
        comm: Communicator of all ranks.
        folder: Folder to which the stacks of all threads are written on SIGUSR1.
    """
    link = own_link()
    stacks = (Path(folder) / f"stacks-{comm.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    randomness = torch.get_rng_state()
    parts: dict[tuple[int, int], Communicator | None] = {}
    # The link ends when the driver has exited.
    with stacks, suppress(EOFError):
        link.send_bytes(run_reported(comm.rank, os.getpid))
        while order := link.recv_bytes():
            size, failures, program = pickle.loads(order)
            if (size, failures) not in parts:
                parts = {key: part for key, part in parts.items() if key[1] == failures}
                parts[size, failures] = comm.split(0 if comm.rank < size else None)
            part = parts[size, failures]
            if part is not None:
                torch.set_rng_state(randomness)
                outcome, usable = _perform(part, program)
                link.send_bytes(outcome)
                link.send(usable)


def _perform(comm: Communicator, program: bytes) -> tuple[bytes, bool]:
    """Run one program; return its serialized outcome, and whether the communicator is still usable."""

    def run() -> Any:
        try:
            fn, args = pickle.loads(program)
            return fn(comm, *args)
        except BaseException as error:
            # Notify the peers of the failure, as a launched rank does at its end, so that they do not wait for this
            # rank.
            comm.__exit__(type(error), error, error.__traceback__)
            if type(error).__name__ == "Skipped":
                # Pytest makes the class `Skipped` look like a Python built-in, so pickle cannot find the class by name.
                raise SkipTest(str(error)) from None
            raise

    outcome = run_reported(comm.rank, run)
    sys.stdout.flush()
    try:
        comm.release_thread()
    except CommError:
        usable = False
    else:
        # Do not reuse a communicator that has counted training steps: a stop request is permanent, and the ranks'
        # counts may differ.
        usable = comm.exception() is None and boundaries_of(comm).unused
    return outcome, usable
