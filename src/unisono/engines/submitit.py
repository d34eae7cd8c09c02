"""Runs ranks as the tasks of a submitit job, on Slurm or on this host."""

from __future__ import annotations

import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unisono.core import clock
from unisono.core.work import seconds_left
from unisono.engines.engine import Engine, required

__all__ = ["ENGINE", "Submitit", "SubmititJob"]

_LOOK_EVERY_S = 0.1
_LAST_STEPS_S = 0.5
_END_S = 10.0


class Submitit(Engine):
    """Engine for submitit: all ranks are tasks of one job, which Slurm starts together.

    The job is cancelled when the launch ends. A new folder, which only this user can read, contains the job's script,
    pickles and logs.

    Args:
        folder: Parent directory of the new folder, on a file system that all nodes share; created if it does not exist.
        cluster: "slurm", "local" (processes on this host) or "debug" (this process, for one rank). If None, "slurm" if
            Slurm is available, else "local".
        parameters: Parameters of submitit's AutoExecutor: nodes= (default 1), timeout_min= (submitit's default is a few
            minutes), cpus_per_task=, gpus_per_node=, slurm_partition= and so on.

    Example:
        >>> engine = un.engines.Submitit("jobs", nodes=2, timeout_min=60, cpus_per_task=4, slurm_partition="gpu")
    """

    starts_workers = True

    def __init__(self, folder: str | Path = "submitit", *, cluster: str | None = None, **parameters: Any) -> None:
        if "tasks_per_node" in parameters:
            raise ValueError("leave out tasks_per_node: it is the number of ranks, divided by nodes=")
        self._folder = Path(folder)
        self._cluster = cluster
        self._parameters = parameters

    @contextmanager
    def workers(self, size: int, timeout_s: float) -> Iterator[Executor]:
        if self._cluster == "debug" and size > 1:
            raise ValueError(
                f"submitit's cluster 'debug' runs one task, in this process, and cannot be {size} ranks: pass "
                "nprocs=1, or cluster='local'"
            )
        submitit = required("submitit", "submitit")
        nodes = self._parameters.get("nodes", 1)
        if size % nodes:
            raise ValueError(f"{size} ranks cannot be divided equally between nodes={nodes}")
        self._folder.mkdir(parents=True, exist_ok=True)
        # Create a private folder, because the ranks' pickles contain the secret with which ranks authenticate each
        # other.
        folder = Path(tempfile.mkdtemp(prefix="launch-", dir=self._folder.absolute()))
        executor = submitit.AutoExecutor(folder=folder, cluster=self._cluster)
        executor.update_parameters(**{"nodes": 1, **self._parameters, "tasks_per_node": size // nodes})
        job = SubmititJob(executor, size, folder)
        try:
            yield job
        finally:
            job.end()


class SubmititJob(Executor):
    """Executor for a fixed number of tasks, which run as one job.

    Args:
        executor: Submitit's executor.
        size: Number of tasks.
        folder: Folder to which tasks write their results.
    """

    def __init__(self, executor: Any, size: int, folder: Path) -> None:
        self._executor = executor
        self._size = size
        self._folder = folder
        self._calls: list[Callable[[], Any]] = []
        self._futures: list[Future[Any]] = []
        self._job: Any = None
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="unisono submitit", daemon=True)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Assign a call to the next task; submit the job once all tasks have a call."""
        self._calls.append(partial(fn, *args, **kwargs))
        future: Future[Any] = Future()
        self._futures.append(future)
        if len(self._calls) == self._size:
            self._job = self._executor.submit(_run_task, self._calls, self._folder)
            self._watcher.start()
        return future

    def _watch(self) -> None:
        """Complete each future when its result file appears; fail the remaining futures when the job has ended."""
        left = dict(enumerate(self._futures))
        while left and not self._over.wait(_LOOK_EVERY_S):
            over = self._job.done()
            for task in list(left):
                result = _result_file(self._folder, task)
                if over or result.exists():
                    self._settle(left.pop(task), task, result)

    def _settle(self, future: Future[Any], task: int, result: Path) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(pickle.loads(result.read_bytes()))
        except FileNotFoundError:
            job = self._job.task(task) if self._size > 1 else self._job
            words = (job.stderr() or "").strip().splitlines()
            future.set_exception(
                RuntimeError(f"job {self._job.job_id} has ended: {words[-1] if words else 'no output'}")
            )

    def end(self) -> None:
        """Wait for the job to end by itself; after a while, cancel it."""
        self._over.set()
        if self._job is None:
            return
        self._watcher.join()
        finished = all(_result_file(self._folder, task).exists() for task in range(self._size))
        if not self._ends_within(_END_S if finished else _LAST_STEPS_S):
            self._job.cancel(check=False)
            self._ends_within(_END_S)

    def _ends_within(self, seconds: float) -> bool:
        deadline = clock.now() + seconds
        while not self._job.done() and seconds_left(deadline):
            time.sleep(_LOOK_EVERY_S)
        return bool(self._job.done())


def _result_file(folder: Path, task: int) -> Path:
    return folder / f"result-{task}"


def _run_task(calls: list[Callable[[], Any]], folder: Path) -> None:
    """Run this task's call and write its result to a file: submitit returns results only when all tasks have ended."""
    task = required("submitit", "submitit").JobEnvironment().global_rank
    result = _result_file(folder, task)
    unfinished = result.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(calls[task]()))
    unfinished.replace(result)


ENGINE = Submitit
