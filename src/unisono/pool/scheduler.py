"""Assigns tasks to idle workers, and reassigns a lost worker's tasks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from functools import partial
from typing import Any

from unisono.errors import CommError, PeerLostError
from unisono.pool.batch import Range, TaskBatch
from unisono.pool.worker import Worker
from unisono.rpc.remote_errors import rebuilt

__all__ = ["BrokenPoolError", "CallScheduler"]

_log = logging.getLogger(__name__)

_NO_LIMIT_S = 1e9


class BrokenPoolError(PeerLostError, BrokenExecutor):
    """The pool cannot run tasks: all its workers were lost or could not be initialized.

    Args:
        message, group, call, rank, size, operation, peer, nbytes, waited_s: As for `CommError`.

    Example:
        >>> from concurrent.futures import BrokenExecutor
        >>> issubclass(un.pool.BrokenPoolError, BrokenExecutor)
        True
    """


class CallScheduler:
    """Queue of batches, and the idle workers. Thread-safe.

    Args:
        rank: The `Worker` object of rank 0.
        workers: Ranks that run tasks.
        retries: Number of times that a call is run again after its worker is lost.
    """

    def __init__(self, rank: Worker, workers: Sequence[int], retries: int) -> None:
        self._rank = rank
        self._agent = rank.agent
        self._retries = retries
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._queue: deque[TaskBatch] = deque()
        self._living = set(workers)
        self._sent: dict[int, deque[tuple[TaskBatch, Range]]] = {}
        self._running = 0
        self._here = threading.local()
        self._closed = False
        self._lost: BaseException | None = None
        self._agent.when_lost.append(lambda peer: self._lose(peer, self._agent.box.lost[peer]))
        for worker in workers:
            try:
                future = self._agent.rpc_async(worker, rank.start, (rank.trusted,), timeout=_NO_LIMIT_S)
            except CommError as lost:
                self._lose(worker, lost)
            else:
                future.add_done_callback(partial(self._started, worker))

    def add(self, batch: TaskBatch) -> None:
        """Queue a batch. Raises RuntimeError after `close`, and BrokenPoolError if no workers are left."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot give tasks to a pool that was shut down")
            if not self._living:
                raise self._broken()
            self._queue.append(batch)
        self._dispatch()

    @property
    def ends_here(self) -> bool:
        """Return whether this thread is completing calls, for example running a future's callbacks."""
        return getattr(self._here, "ends", False)

    def close(self) -> None:
        """Accept no more batches."""
        # Don't take the lock: the garbage collector may call `close` in a thread that already holds the lock.
        self._closed = True

    def drop(self, batch: TaskBatch) -> None:
        """Drop the calls of a batch that have not been sent."""
        with self._lock:
            batch.drop()

    def cancel(self) -> None:
        """Drop all calls that have not been sent; they fail with `CancelledError`."""
        self._end_queue(CancelledError)

    def wait(self) -> None:
        """Wait until all calls have completed or failed."""
        with self._quiet:
            self._quiet.wait_for(lambda: not self._running and not any(batch.todo for batch in self._queue))

    # -- workers -------------------------------------------------------------------------------
    def _started(self, worker: int, future: Any) -> None:
        try:
            failed = future.value()
        except Exception as error:
            return self._lose(worker, error)
        if failed is not None:
            _log.warning("rank %d takes no tasks, because its initializer failed:\n%s", worker, failed[3])
            return self._lose(worker, rebuilt(failed, worker))
        with self._lock:
            if worker in self._living:
                self._sent[worker] = deque()
        self._dispatch()

    def _lose(self, worker: int, error: BaseException) -> None:
        with self._lock:
            if worker not in self._living:
                return
            self._living.discard(worker)
            self._lost = error
            broken = not self._living
        if broken:
            self._end_queue(self._broken)

    def _broken(self) -> BrokenPoolError:
        last = f"{type(self._lost).__name__}: {str(self._lost).partition(chr(10))[0]}"
        error = BrokenPoolError(f"the pool has no worker left to run tasks; the last one ended with {last}")
        error.__cause__ = self._lost
        return error

    def _end_queue(self, error: Callable[[], BaseException]) -> None:
        """Fail all calls that have not been sent."""
        with self._lock:
            chunks = [(batch, start) for batch in self._queue for start, _ in batch.todo]
            for batch in self._queue:
                batch.todo.clear()
            self._queue.clear()
        for batch, start in chunks:
            batch.deliver(start, (), error())
        with self._quiet:
            self._quiet.notify_all()

    # -- chunks --------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        """Send chunks until no worker is ready or no calls are left."""
        while (order := self._next()) is not None:
            self._send(*order)

    def _next(self) -> tuple[int, TaskBatch, Range] | None:
        with self._lock:
            while self._queue:
                batch = self._queue[0]
                worker = self._ready(batch)
                if worker is None:
                    break
                if batch.wanted():
                    chunk = batch.take(len(self._living))
                    self._sent[worker].append((batch, chunk))
                    self._running += 1
                    return worker, batch, chunk
                self._queue.popleft()
            self._quiet.notify_all()
            return None

    def _ready(self, batch: TaskBatch) -> int | None:
        """Return an idle worker, or else a worker that is about to finish a chunk of this batch."""
        living = [(worker, sent) for worker, sent in self._sent.items() if worker in self._living]
        idle = (worker for worker, sent in living if not sent)
        soon = (worker for worker, sent in living if len(sent) == 1 and sent[0][0] is batch)
        return next(idle, None) if not batch.short else next(idle, next(soon, None))

    def _send(self, worker: int, batch: TaskBatch, chunk: Range) -> None:
        try:
            future = self._agent.rpc_async(worker, self._rank.run, (batch.pack(*chunk),), timeout=_NO_LIMIT_S)
        except CommError as lost:
            # The chunk was not sent, so no call in it has begun.
            self._took(worker, batch, chunk)
            self._lose(worker, lost)
            self._put_back(batch, chunk)
            self._end_one()
        except Exception as error:
            self._took(worker, batch, chunk)
            batch.deliver(chunk[0], (), error)
            self._end_one()
        else:
            future.add_done_callback(partial(self._ended, worker, batch, chunk))

    def _took(self, worker: int, batch: TaskBatch, chunk: Range) -> None:
        """Remove a chunk from the list of chunks that its worker is to run."""
        with self._lock:
            self._sent[worker].remove((batch, chunk))

    def _ended(self, worker: int, batch: TaskBatch, chunk: Range, future: Any) -> None:
        outer = self.ends_here
        self._here.ends = True
        try:
            self._answered(worker, batch, chunk, future)
        finally:
            self._here.ends = outer
            self._end_one()

    def _end_one(self) -> None:
        with self._quiet:
            self._running -= 1
            self._quiet.notify_all()

    def _answered(self, worker: int, batch: TaskBatch, chunk: Range, future: Any) -> None:
        """Handle a worker's results. Before decoding them, send the worker its next chunk, so that it need not wait."""
        start, stop = chunk
        try:
            content, left, seconds, failed = future.value()
            self._took(worker, batch, chunk)
            batch.seconds = seconds / (stop - left - start)
            self._put_back(batch, (stop - left, stop))
            values = self._rank.codec.loads(content)
        except PeerLostError as lost:
            self._lose(worker, lost)
            # Of the chunks sent to the worker, only the first can have been running when the worker was lost.
            self._retry(batch, chunk, self._sent[worker][0] == (batch, chunk), lost)
        except Exception as error:
            error.add_note(f"while reading the results of {batch.name} from rank {worker}")
            batch.deliver(start, (), error)
        else:
            batch.deliver(start, values, None if failed is None else rebuilt(failed, worker))

    def _retry(self, batch: TaskBatch, chunk: Range, ran: bool, lost: PeerLostError) -> None:
        """Requeue a lost worker's calls, or fail them if too many workers were lost while running them."""
        start, stop = chunk
        batch.deaths.update(range(start, stop if ran else start))
        deaths = batch.deaths[start]
        if deaths <= self._retries:
            # Requeue each call separately, so that a call that kills its worker affects no other call.
            return self._put_back(batch, *((index, index + 1) for index in range(start, stop)))
        calls = f"call {start}" if stop - start == 1 else f"one of the calls {start} to {stop - 1}"
        error = PeerLostError(
            f"{calls} of {batch.name} does not run again, because it seems to end its worker: {deaths} of them were "
            f"lost while they ran it, the last one with: {lost.message}; pass retries= to allow more",
            peer=lost.peer,
        )
        error.__cause__ = lost
        batch.deliver(start, (), error)

    def _put_back(self, batch: TaskBatch, *chunks: Range) -> None:
        """Queue calls that were sent but did not run, ahead of all other calls."""
        with self._lock:
            batch.todo.extendleft(chunk for chunk in reversed(chunks) if chunk[0] < chunk[1])
            if batch.todo and batch not in self._queue:
                self._queue.appendleft(batch)
            broken = not self._living
        if broken:
            return self._end_queue(self._broken)
        self._dispatch()
