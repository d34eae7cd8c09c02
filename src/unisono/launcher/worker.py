"""The life of one rank that is a process."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from unisono.control.client import SocketControl
from unisono.control.process_exit import raise_failed_saves
from unisono.core.group import Group
from unisono.launcher.job import Job, run_reported

__all__ = ["WorkerSpec", "configure_process", "run_job", "run_worker"]


@dataclass(slots=True)
class WorkerSpec:
    """Orders of the launching process to a rank. Multiprocessing passes them from parent to child.

    Attributes:
        job: A `Job`, pickled: it may need the caller's main module, which is imported first.
        environment: The caller's, because the forkserver keeps the one it was started with.
        address, secret: Of the control plane, which the caller hosts.
        outputs: Copies of the caller's standard output and error; None for a closed one.
        start_method: How the caller lets processes start, if it has chosen; None is the platform's way.
    """

    rank: int
    size: int
    job: bytes
    environment: dict[str, str]
    address: tuple[str, int]
    secret: bytes
    threads: int
    outputs: tuple[Any, Any] | None
    start_method: str | None


def run_worker(orders: WorkerSpec, report: Connection) -> None:
    """Run a rank: set up, run the job, send its outcome to the launching process."""
    # An interrupt at the terminal is for the launching process, which then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        # What this rank starts is with it, and ends with it.
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(orders.environment)
    if orders.outputs is not None:
        for number, copy in zip((1, 2), orders.outputs, strict=True):
            if copy is not None:
                os.dup2(copy.detach(), number)
    configure_process(orders.threads)
    # Workers of a loader start as those of a plain script do, not as ranks do.
    multiprocessing.set_start_method(orders.start_method, force=True)
    report.send_bytes(run_job(orders))


def configure_process(threads: int) -> None:
    """Set up how a rank prints and computes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines, so that those of several ranks do not run into each other.
            stream.reconfigure(line_buffering=True, write_through=False)
    torch.set_num_threads(threads)


def run_job(orders: WorkerSpec) -> bytes:
    """Run the job; return its outcome, for the launching process."""

    def program() -> Any:
        job: Job = pickle.loads(orders.job)
        control = SocketControl(orders.address, orders.secret, job.options.timeout_s, on_orphan=_end)
        result = job.run(Group.world(orders.rank, orders.size), control)
        raise_failed_saves()
        return result

    outcome = run_reported(orders.rank, program)
    for stream in (sys.stdout, sys.stderr):
        # A stream may be missing, or its reader gone: the outcome is reported all the same.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    return outcome


def _end() -> None:
    """Exit with all that this rank has started, because the launching process is gone."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
