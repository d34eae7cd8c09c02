"""Runs ranks as Dask tasks, each on a separate worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from unisono.core import clock
from unisono.core.work import seconds_left
from unisono.engines.engine import Engine, required
from unisono.errors import CommError, CommTimeoutError

__all__ = ["ENGINE", "Dask", "DaskWorkers"]

_LOOK_EVERY_S = 0.1


class Dask(Engine):
    """Engine for Dask: each rank is a task on a separate worker. The least busy workers are used first.

    Tasks are pinned to their workers and not retried. Workers exist before the launch and outlive it: changes that a
    rank makes to its process remain, and a rank cannot be stopped before its next call on the communicator.

    Args:
        client: A `dask.distributed.Client`, or a scheduler's address. If None, the first available of: this process's
            client, the scheduler in Dask's configuration, and a new cluster on this host that is closed after the
            launch.
        resources: Abstract resources per rank, which workers declare; same format as for Dask's client.

    Example:
        >>> engine = un.engines.Dask("tcp://10.1.1.20:8786", resources={"GPU": 1})
    """

    replaces = True

    def __init__(self, client: Any = None, *, resources: Mapping[str, float] | None = None) -> None:
        self._client = client
        self._resources = dict(resources or {})

    @contextmanager
    def workers(self, size: int, timeout_s: float) -> Iterator[Executor]:
        distributed = required("distributed", "dask")
        deadline = clock.now() + timeout_s
        with _connected(distributed, self._client, size) as client, _scaled(client, size):
            found = self._suitable(client)
            while len(found) < size:
                if not seconds_left(deadline):
                    raise CommTimeoutError(self._shortage(client, len(found), size, timeout_s), waited_s=timeout_s)
                time.sleep(_LOOK_EVERY_S)
                found = self._suitable(client)
            executor = DaskWorkers(client, found[:size], self._resources, partial(self._spare, client, timeout_s))
            try:
                yield executor
            finally:
                # Release the tasks: until then, workers keep the tasks' results.
                executor.shutdown(wait=False)

    def _suitable(self, client: Any) -> list[str]:
        """Return the addresses of workers that have the required resources, the least busy first."""
        try:
            known = client.scheduler_info(n_workers=-1)["workers"]
            busy = {address: len(tasks) for address, tasks in client.processing().items()}
        except (OSError, KeyError) as error:
            # A client that has lost its scheduler reports no workers (KeyError) or closes itself (OSError).
            raise CommError(f"Dask's scheduler does not answer {client!r}: start it, and make a new client") from error
        has = {address: facts.get("resources", {}) for address, facts in known.items()}
        suitable = [
            address
            for address, stock in has.items()
            if all(stock.get(name, 0) >= amount for name, amount in self._resources.items())
        ]
        return sorted(suitable, key=lambda address: busy.get(address, 0))

    def _spare(self, client: Any, timeout_s: float, taken: Set[str]) -> str:
        """Wait for an idle worker not in `taken`, because Dask's nanny restarts a lost worker within seconds."""
        deadline = clock.now() + timeout_s
        while True:
            busy = {address for address, tasks in client.processing().items() if tasks}
            idle = [address for address in self._suitable(client) if address not in busy and address not in taken]
            if idle:
                return idle[0]
            if not seconds_left(deadline):
                raise CommTimeoutError(
                    f"a lost rank was not started again: no worker of Dask was idle within {timeout_s:g} s; start "
                    "workers with a nanny, or one more than there are ranks",
                    waited_s=timeout_s,
                )
            time.sleep(_LOOK_EVERY_S)

    def _shortage(self, client: Any, found: int, size: int, timeout_s: float) -> str:
        of_all = f" of {len(client.nthreads())}" if self._resources else ""
        having = f" with {self._resources}" if self._resources else ""
        return (
            f"Dask has {found}{of_all} workers{having} for {size} ranks after {timeout_s:g} s; start more workers, "
            "each a process (--nthreads 1), or pass a smaller nprocs, or a longer timeout="
        )


@contextmanager
def _connected(distributed: Any, client: Any, size: int) -> Iterator[Any]:
    """Provide the client that an engine was given, or the first that is available; see `Dask`.

    The context closes the client if it made it, and a new cluster on this host.
    """
    if isinstance(client, str):
        with distributed.Client(client, set_as_default=False) as connected:
            yield connected
        return
    existing = client
    if existing is None:
        with suppress(ValueError):
            existing = distributed.get_client()
    if existing is not None:
        yield existing
        return
    configured = required("dask.config", "dask").get("scheduler-address", None)
    if configured:
        with distributed.Client(configured, set_as_default=False) as connected:
            yield connected
        return
    options = {"n_workers": size, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster, set_as_default=False) as connected:
        yield connected


@contextmanager
def _scaled(client: Any, size: int) -> Iterator[None]:
    """Make an adaptive cluster keep at least `size` workers.

    An adaptive cluster scales with the number of tasks, but ranks need all workers from the start.
    """
    # Dask has no public name for an adaptive cluster's `Adaptive` object. Other kinds of clusters, and clients that
    # were created from an address, have no `Adaptive` object.
    adaptive = getattr(client.cluster, "_adaptive", None) or SimpleNamespace(minimum=0, maximum=0)
    minimum = adaptive.minimum
    adaptive.minimum = max(minimum, min(size, adaptive.maximum))
    try:
        yield
    finally:
        adaptive.minimum = minimum


class DaskWorkers(Executor):
    """Executor that runs each task on the next worker in a list and, once the list is used up, on spare workers.

    Args:
        client: Dask's client.
        workers: Addresses of workers.
        resources: Resources for each task.
        spare: Function that returns the address of a worker that is not in the given set.
    """

    def __init__(
        self, client: Any, workers: list[str], resources: Mapping[str, float], spare: Callable[[Set[str]], str]
    ) -> None:
        self._client = client
        self._bound = {"retries": 0, "pure": False, "allow_other_workers": False, "resources": resources or None}
        self._workers = workers
        self._spare = spare
        self._executors: list[Any] = []
        self._tasks: list[tuple[str, Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a task on the next worker."""
        if len(self._tasks) < len(self._workers):
            address = self._workers[len(self._tasks)]
        else:
            address = self._spare({taken for taken, task in self._tasks if not task.done()})
        executor = self._client.get_executor(workers=[address], **self._bound)
        self._executors.append(executor)
        future: Future[Any] = executor.submit(fn, *args, **kwargs)
        self._tasks.append((address, future))
        return future

    def why_lost(self, future: Future[Any]) -> str | None:
        """Return why a task is lost if its worker has left the cluster; otherwise, return None.

        Dask itself would wait forever for another worker at the same address.
        """
        address = next(address for address, task in self._tasks if task is future)
        return None if address in self._client.nthreads() else f"its worker {address} was retired, restarted or killed"

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Release all tasks: wait until they have completed if `wait` is true, or else cancel them."""
        for executor in self._executors:
            executor.shutdown(wait=wait)


ENGINE = Dask
