"""Engines to run ranks on, and programs for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as un
from unisono.engines import Submitit
from unisono.errors import PeerLostError


def new_pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unisono.launcher.preload"])
    return ProcessPoolExecutor(workers, mp_context=context)


def train(comm: un.Communicator, steps: int) -> tuple[str, list[list[float]]]:
    """Return the backend, and the weights after some steps."""
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3)
    averager = un.GradientAverager(model, comm)
    for step in range(steps):
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        model.zero_grad()
        model(data).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    averager.remove()
    return comm.backend, [parameter.flatten().tolist() for parameter in model.parameters()]


def die(comm: un.Communicator, note: Path | None = None) -> float:
    """Kill rank 1, note the time, and return how long it took on the others until they knew."""
    comm.barrier()
    if comm.rank == 1:
        if note is not None:
            note.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1"):
        comm.barrier()
    return time.monotonic() - begin


ENDING = threading.Event()


def host_rank(function: Any, args: Any) -> None:
    """Be a worker that runs a rank in a thread, until it is told to end."""
    threading.Thread(target=function, args=args, daemon=True).start()
    ENDING.wait()


def close_and_work_on(comm: un.Communicator, end: str) -> None:
    comm.close()
    if comm.rank == 1 and end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        ENDING.set()
        threading.Event().wait()


@contextmanager
def on_ray(size: int, folder: Path) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="runs ranks on Ray")
    ray.init(num_cpus=size, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield "ray"
    finally:
        ray.shutdown()


@contextmanager
def on_dask(size: int, folder: Path) -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="runs ranks on Dask")
    import dask

    options = {"processes": True, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    # A cluster gives up a worker that a nanny does not start again within 15 s, which a busy machine does not manage.
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "300s"})
    with patient, distributed.LocalCluster(n_workers=size, **options) as cluster, distributed.Client(cluster):
        yield "dask"


@contextmanager
def on_submitit(size: int, folder: Path) -> Iterator[Any]:
    pytest.importorskip("submitit", reason="runs ranks as a job of submitit")
    yield Submitit(folder, cluster="local", timeout_min=10)


ON: dict[str, Callable[[int, Path], Any]] = {"ray": on_ray, "dask": on_dask, "submitit": on_submitit}
