"""Executor in the style of `concurrent.futures`, whose workers are ranks."""

from __future__ import annotations

import math
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

from unisono.bootstrap.rendezvous import RankClaim, confirm
from unisono.communicator import Communicator
from unisono.control.client import SocketControl
from unisono.control.process_exit import close_at_exit
from unisono.control.server import ControlServer
from unisono.core import clock
from unisono.core.types import Timeout
from unisono.core.work import resolve_timeout
from unisono.engines import Engine
from unisono.errors import CommError, PeerLostError
from unisono.host.native import core_build
from unisono.host.network import why_no_shm
from unisono.host.processors import cores
from unisono.launcher.api import CHUNK_BYTES, TIMEOUT_S, communicator_at, launch, network_of
from unisono.launcher.engines import address_for_workers, resolve
from unisono.pool.batch import LONGEST_S, Part, TaskBatch, results
from unisono.pool.scheduler import CallScheduler
from unisono.pool.worker import Chunk, Worker
from unisono.transports.hierarchical import transport_named

__all__ = ["OwnRanks", "Pool"]

T = TypeVar("T")
_Meeting = tuple[tuple[str, int], bytes, int, str]
"""The control plane's address and secret, the number of ranks, and the backend."""
_Initialize = Callable[[], object] | None


class Pool(Executor):
    """`concurrent.futures` executor whose workers are new processes or the ranks of a communicator.

    `Pool(4)` starts 4 processes, on this host or on the engine or executor passed as `on`. The processes exit when the
    pool shuts down. Tasks and results are pickled, and functions are sent as in `launch`.

    `Pool(comm)` is collective: rank 0 submits tasks, and the other ranks run them. If rank 0 is the only rank, it runs
    the tasks in a thread. In a `with` statement, the other ranks run tasks until rank 0 shuts the pool down; their
    `with` block then gets None as the pool. Without `with`, the other ranks must call `shutdown`, which runs tasks
    until rank 0 shuts the pool down.

    An idle worker gets the next tasks, and runs them one at a time in its main thread. If a worker dies, other workers
    run its unfinished tasks. Each task's result arrives once, but if a task runs again, its side effects occur again.
    If a pool is garbage-collected, or is still open when its process exits without an error, it runs all accepted tasks
    and then shuts down.

    Args:
        workers: A communicator, or the number of processes to start; if None, one per core.
        backend: Transport between this process and the workers: "shm", "gloo", or "thread" for threads of this process.
            "auto" chooses "shm" if it is available, else "gloo".
        initializer: Function called once on each worker, before its first task. A worker on which the initializer fails
            gets no tasks.
        initargs: Arguments of `initializer`.
        retries: How many times a task is run again after its worker is lost. If no retry is left, the task fails with
            `PeerLostError`, because the task itself may have killed its workers.
        trusted: Whether the ranks of a communicator exchange pickles, which allow a sender to run any code on the
            receiver. If False, functions must be exposed (`unisono.rpc.expose`), and arguments and results must be
            plain values, as in `unisono.rpc`. All ranks must pass the same value.
        on: Engine or executor that starts the processes, as for `launch`; allowed only if `workers` is a number. With
            `on`, backend "auto" chooses "tcp", or "gloo" without a native core.

    Raises:
        ValueError: The number of workers or retries is invalid, or a pool cannot start ranks on this backend.
        CommTimeoutError: The engine did not start all workers within 300 s.
        TypeError: `workers` is neither a number nor a communicator, or `initializer` is not callable.

    Cost: about 1 s to start processes, and 0.1 ms to exchange a chunk of tasks. Arguments and results are copied, even
    between threads.

    Example:
        >>> with un.Pool(2, backend="thread") as pool:
        ...     future = pool.submit(pow, 2, exponent := 10)
        ...     list(pool.map(abs, [-1, 2, -3])), future.result()
        ([1, 2, 3], 1024)
    """

    def __init__(
        self,
        workers: Communicator | int | None = None,
        *,
        backend: str = "auto",
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        retries: int = 1,
        trusted: bool = False,
        on: Executor | Engine | str | None = None,
    ) -> None:
        workers = cores() if workers is None else workers
        if not isinstance(workers, Communicator | int) or isinstance(workers, bool):
            raise TypeError(f"workers must be a communicator or a number, not {type(workers).__name__}")
        if isinstance(workers, int) and workers < 1:
            raise ValueError(f"the number of workers must be at least 1, not {workers}")
        if not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be an int of at least 0, not {retries!r}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a function, not {type(initializer).__name__}")
        initialize = None if initializer is None else partial(initializer, *initargs)
        self._own: OwnRanks | None = None
        if isinstance(workers, int):
            self._own = OwnRanks(workers, backend, initialize, None if on is None else resolve(on))
            self._rank = self._own.rank
        elif on is not None:
            raise ValueError("ranks of a communicator run already: pass on= with a number of workers")
        else:
            self._rank = Worker(workers, trusted, initialize)
        self._lock = threading.Lock()
        self._served = False
        self._end: threading.Thread | None = None
        self._scheduler: CallScheduler | None = None
        if self._rank.agent.rank == 0:
            others = range(1, self._rank.agent.size)
            if not others:
                self._rank.agent.thread(self._rank.loop)
            self._scheduler = CallScheduler(self._rank, others or (0,), retries)
            close_at_exit(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn(*args, **kwargs)` on a worker, and return a future for its result.

        Args:
            fn: Function to run; sent by value if workers cannot import it. In `Pool(comm, trusted=False)`, the function
                must be exposed.
            args: Positional arguments, which are copied before `submit` returns.
            kwargs: Keyword arguments.

        Returns: The future. `cancel()` works until the task is sent to a worker. `result()` raises the function's
        error, with the worker's traceback in its text. The error has its original class if this process knows that
        class.

        Raises:
            RuntimeError: The pool has been shut down.
            BrokenPoolError: The pool has no workers left.
            TypeError: The function or an argument cannot be sent.
        """
        scheduler = self._tasks()
        content = self._rank.codec.pack(Chunk(fn, [args], kwargs))
        future: Future[T] = Future()
        batch = TaskBatch(
            _name("submit", fn),
            1,
            lambda *_: content,
            partial(_settle, future),
            future.set_running_or_notify_cancel,
        )
        scheduler.add(batch)
        return future

    def map(
        self,
        fn: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        timeout: Timeout | None = None,
        chunksize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[T]:
        """Return an iterator over `fn(*items)` for each `items` in `zip(*iterables)`.

        Args:
            fn: As for `submit`.
            iterables: Iterables, which are read immediately. Don't modify mutable items until all results have arrived.
            timeout: Time from now, in seconds or as a `timedelta`, after which waiting for a result raises
                `TimeoutError`; None for no limit.
            chunksize: Number of calls to send together. If None, the number adapts to how long the calls take and how
                many remain, so that all workers finish at about the same time. Calls that are stuck behind unexpectedly
                long calls are moved to other workers.
            unordered: Whether to yield results as they arrive, instead of in the order of the items.

        Returns: The iterator. If a call fails, the iterator yields the results of the calls before it and then raises
        its error; calls that have not been sent by then never run.

        Raises:
            RuntimeError, BrokenPoolError: As for `submit`.
            ValueError: `chunksize` is less than 1.
        """
        return self.starmap(fn, zip(*iterables, strict=False), timeout, chunksize, unordered)

    def starmap(
        self,
        fn: Callable[..., T],
        /,
        items: Iterable[Iterable[Any]],
        timeout: Timeout | None = None,
        chunksize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[T]:
        """Return an iterator over `fn(*item)`, as `map` does.

        Args:
            fn, timeout, chunksize, unordered: As for `map`.
            items: The arguments of each call.

        Returns: The iterator, as for `map`.

        Raises:
            RuntimeError, BrokenPoolError, ValueError: As for `map`.

        Example:
            >>> with un.Pool(2, backend="thread") as pool:
            ...     list(pool.starmap(pow, [(2, 3), (3, 2)]))
            [8, 9]
        """
        until = None if timeout is None else clock.now() + resolve_timeout(timeout)
        if chunksize is not None and chunksize < 1:
            raise ValueError(f"chunksize must be at least 1, not {chunksize}")
        scheduler = self._tasks()
        calls = [tuple(item) for item in items]
        # If a chunk takes longer than `limit_s`, its worker returns the calls that it has not begun, and other workers
        # run them.
        codec = self._rank.codec
        limit_s = LONGEST_S if chunksize is None else math.inf
        arrived: queue.SimpleQueue[Part] = queue.SimpleQueue()
        batch = TaskBatch(
            _name("map", fn),
            len(calls),
            lambda start, stop: codec.pack(Chunk(fn, calls[start:stop], limit_s=limit_s)),
            lambda *part: arrived.put(part),
            chunksize=chunksize,
        )
        if calls:
            scheduler.add(batch)
        return results(arrived, len(calls), until, unordered, partial(scheduler.drop, batch))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop accepting tasks, and stop the workers once all accepted tasks are done. Idempotent.

        On the communicator's other ranks, run tasks until rank 0 calls `shutdown`.

        Args:
            wait: Whether to wait until the workers have stopped.
            cancel_futures: Whether to cancel the tasks that have not been sent to a worker.

        Raises:
            PeerLostError: Rank 0 was lost. Raised on all ranks except rank 0.
            RuntimeError: A future's callback called `shutdown(wait=True)`, which would deadlock. The pool nevertheless
                shuts down.
        """
        if self._scheduler is None:
            first = not self._served
            self._served = True
            return self._rank.serve() if first else None
        self._scheduler.close()
        if cancel_futures:
            self._scheduler.cancel()
        with self._lock:
            if self._end is None:
                self._end = threading.Thread(target=self._finish, args=(self._scheduler,), daemon=True)
                self._end.start()
        if wait:
            if self._scheduler.ends_here:
                raise RuntimeError("the callback of a future cannot wait for the end of its pool: pass wait=False")
            self._end.join()

    def __enter__(self) -> Any:
        if self._scheduler is None:
            self.shutdown()
            return None
        return self

    def __del__(self) -> None:
        if getattr(self, "_scheduler", None) is not None and not sys.is_finalizing():
            self.shutdown(wait=False)

    def on_process_exit(self, error: BaseException | None) -> None:
        """Complete the accepted tasks, as standard executors do, unless the process exits with an error.

        Args:
            error: The error with which the process exits, or None.
        """
        if self._scheduler is not None and error is None:
            self.shutdown()

    def _tasks(self) -> CallScheduler:
        if self._scheduler is None:
            raise RuntimeError(f"rank {self._rank.agent.rank} runs the tasks of this pool; only rank 0 submits them")
        return self._scheduler

    def _finish(self, scheduler: CallScheduler) -> None:
        agent = self._rank.agent
        scheduler.wait()
        try:
            for rank in agent.alive() if agent.size == 1 else agent.alive()[1:]:
                agent.rpc_async(rank, self._rank.stop)
            agent.shutdown()
        except CommError:
            # A worker was lost during the collective shutdown, so close only this rank's agent.
            agent.close()
        if self._own is not None:
            self._own.close()


def _name(method: str, fn: Any) -> str:
    return f"{method}({getattr(fn, '__qualname__', type(fn).__qualname__)})"


def _settle(future: Future[Any], _start: int, values: Sequence[Any], error: BaseException | None) -> None:
    """Complete the future of a task."""
    if error is None:
        future.set_result(values[0])
    elif type(error) is CancelledError and future.cancel():
        future.set_running_or_notify_cancel()
    elif future.running() or future.set_running_or_notify_cancel():
        future.set_exception(error)


class OwnRanks:
    """Workers that the pool starts, and that stop when it shuts down.

    Args:
        size: Number of workers.
        backend: Name of the transport to the workers.
        initialize: Function called on each worker before its first task.

    Attributes:
        rank: The `Worker` object of rank 0, which distributes the tasks.
    """

    def __init__(self, size: int, backend: str, initialize: _Initialize, on: Executor | Engine | None) -> None:
        if backend == "auto":
            backend = _backend(on)
        kind = transport_named(backend)
        if kind.simulated or kind.launcher == "mpirun":
            raise ValueError(
                f"a pool cannot start ranks of backend {backend!r} itself: pass it the communicator of ranks that are "
                "running, as in Pool(comm)"
            )
        if kind.in_process and on is not None:
            raise ValueError(f"workers of backend {backend!r} are threads of this process: leave out on=, or backend=")
        self._resources = ExitStack()
        self._begun: queue.SimpleQueue[Worker | BaseException] = queue.SimpleQueue()
        self._over = threading.Event()
        if kind.in_process:
            lives: list[Callable[[], object]] = [lambda: launch(self._be, size + 1, backend, (initialize,))]
        else:
            secret = secrets.token_bytes(32)
            address = "127.0.0.1" if on is None else address_for_workers(on)
            server = self._resources.enter_context(closing(ControlServer(secret, address)))
            meeting = server.address, secret, size + 1, backend
            lives = [lambda: self._start(size, meeting, initialize, on), lambda: self._lead(meeting)]
        self._threads = [threading.Thread(target=self._live, args=(life,), daemon=True) for life in lives]
        for thread in self._threads:
            thread.start()
        first = self._begun.get()
        if isinstance(first, BaseException):
            self._over.set()
            self._resources.close()
            raise first
        self.rank = first

    def close(self) -> None:
        """Wait until the workers have stopped and the communicator is closed."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._resources.close()

    def _live(self, life: Callable[[], object]) -> None:
        try:
            life()
        except BaseException as error:
            # If the constructor is still waiting for the pool, it raises this error. A later error is never read, but
            # the tasks of a lost worker fail anyway.
            self._begun.put(error)

    def _be(self, comm: Communicator, initialize: _Initialize) -> None:
        """Run one rank of the pool in the current thread."""
        rank = Worker(comm, True, initialize)
        if comm.rank:
            return rank.serve()
        self._begun.put(rank)
        self._over.wait()

    def _start(self, size: int, meeting: _Meeting, initialize: _Initialize, on: Executor | Engine | None) -> None:
        """Start the worker processes, and raise an error when they have exited.

        If the constructor is still waiting for the workers, it raises this error; otherwise, the error is ignored.
        """
        ended: list[object] = launch(_serve, size, meeting[-1], (meeting, initialize), on_failure="continue", on=on)
        failures = [end for end in ended if isinstance(end, BaseException)]
        raise failures[0] if failures else PeerLostError("the workers of the pool ended before they began")

    def _lead(self, meeting: _Meeting) -> None:
        """Connect to the worker processes as rank 0, and run this rank."""
        with _join(0, *meeting) as comm:
            self._be(comm, None)


def _backend(on: Executor | Engine | None) -> str:
    """Return the backend to use between the caller and its workers."""
    if on is None and why_no_shm() is None:
        return "shm"
    return "gloo" if on is None else network_of([core_build()])


def _join(rank: int, address: tuple[str, int], secret: bytes, size: int, backend: str) -> Communicator:
    claim = RankClaim(rank, size, None, clock.now() + TIMEOUT_S, "a pool", "pool", restarts=False)
    place = confirm(claim, SocketControl(address, secret, TIMEOUT_S, rank=rank))
    return communicator_at(
        place,
        backend,
        device="cpu",
        timeout_s=TIMEOUT_S,
        check="auto",
        deterministic=False,
        chunk_bytes=CHUNK_BYTES,
        wrap=None,
    )


def _serve(comm: Communicator, meeting: _Meeting, initialize: _Initialize) -> None:
    """Join the pool as a worker in a new process, and run tasks."""
    with _join(comm.rank + 1, *meeting) as whole:
        Worker(whole, True, initialize).serve()
