"""One rank of a pool: its RPC agent, the thread that runs its tasks one at a time, and the encoding of tasks."""

from __future__ import annotations

import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unisono import serialization
from unisono.communicator import Communicator
from unisono.errors import PeerLostError
from unisono.launcher.processes import dump, importable
from unisono.rpc.agent import TIMEOUT_S, Agent
from unisono.rpc.context import unregister
from unisono.rpc.exported import ExportTable, async_execution, name_of
from unisono.rpc.remote_errors import packed
from unisono.serialization.functions import dumps

__all__ = ["Chunk", "ChunkCodec", "PickleCodec", "Report", "Worker"]

Report = tuple[bytes, int, float, Any]
"""Encoded results before the first error, number of calls that did not run, run time in seconds, and the error."""


@dataclass(slots=True)
class Chunk:
    """Calls to one function. Each call has its own positional arguments; all calls share the keyword arguments.

    After `limit_s` seconds, a worker returns the calls that it has not begun, so that other workers can run them.
    """

    fn: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    limit_s: float = math.inf


class ChunkCodec:
    """Encodes chunks and lists of results without pickle. Functions must be exposed, and are sent by name."""

    dumps: Callable[[list[Any]], bytes] = staticmethod(serialization.encode)
    loads: Callable[[bytes], Any] = staticmethod(serialization.decode)

    def pack(self, chunk: Chunk) -> bytes:
        """Encode a chunk. Raises TypeError if the function or an argument cannot be sent."""
        return self.dumps([name_of(chunk.fn), list(chunk.args), chunk.kwargs, chunk.limit_s])

    def unpack(self, content: bytes) -> Chunk:
        """Decode a chunk. Raises NotExposedError if the chunk's function is not exposed."""
        name, *rest = self.loads(content)
        return Chunk(ExportTable(trusted=False).function(name), *rest)


class PickleCodec(ChunkCodec):
    """Pickles chunks. Functions and classes are sent by name if workers can import them, else by value."""

    dumps: Callable[[list[Any]], bytes] = staticmethod(dumps)
    loads: Callable[[bytes], Any] = staticmethod(pickle.loads)

    def __init__(self) -> None:
        self._found: dict[tuple[Any, Any], bool] = {}
        # Pickle one chunk at a time, because cloudpickle's registry of modules to pickle by value is global to the
        # process.
        self._lock = threading.Lock()

    def pack(self, chunk: Chunk) -> bytes:
        """Pickle a chunk."""
        names = getattr(chunk.fn, "__module__", None), getattr(chunk.fn, "__qualname__", None)
        with self._lock:
            if names not in self._found:
                # Workers imported the main module when they started, so they lack functions that it has defined since.
                self._found[names] = importable(chunk.fn)
            try:
                return dump(chunk, self._found[names])
            except Exception as error:
                raise TypeError(
                    "a task cannot be sent to a worker, because its function or one of its arguments cannot be "
                    f"pickled: {error.__cause__ or error}"
                ) from error

    def unpack(self, content: bytes) -> Chunk:
        """Unpickle a chunk."""
        chunk: Chunk = pickle.loads(content)
        return chunk


class Worker:
    """One rank of a pool. Construction is collective.

    All tasks of a rank run in the thread that ran the initializer. Thread-local state that the initializer sets, for
    example with `torch.set_grad_enabled`, therefore applies to the tasks.

    Args:
        comm: Communicator of the ranks; rank 0 distributes the tasks.
        trusted: Whether tasks and results are pickled.
        initialize: Function called before the first task.

    Attributes:
        agent, codec: RPC agent and codec for calls between the ranks.
        start, run, stop: Functions that rank 0 calls remotely on a worker.
    """

    def __init__(self, comm: Communicator, trusted: bool, initialize: Callable[[], object] | None) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Any] | PeerLostError | None] = queue.SimpleQueue()
        self._initialize = initialize
        self.trusted = trusted
        self.codec: ChunkCodec = PickleCodec() if trusted else ChunkCodec()

        # Each rank has its own functions, because ranks may be threads of one process.
        @async_execution
        def start(trusted: bool) -> Any:
            return self._later(partial(self._begin, trusted))

        @async_execution
        def run(content: bytes) -> Any:
            return self._later(partial(self._run, content))

        def stop() -> None:
            self._jobs.put(None)

        self.start: Callable[[bool], Any] = start
        self.run: Callable[[bytes], Any] = run
        self.stop: Callable[[], None] = stop
        expose = (start, run, stop)
        self.agent: Agent = Agent(comm, f"rank{comm.rank}", TIMEOUT_S, trusted=False, expose=expose, workers=1)
        # Keep this agent out of the process's registry, so that the program's own RPC calls do not use it.
        unregister(self.agent)
        self.agent.when_lost.append(self._lose)
        if 0 in self.agent.box.lost:
            self._lose(0)

    def _later(self, job: Callable[[], Any]) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._jobs.put((job, future))
        return future

    def _lose(self, peer: int) -> None:
        if peer == 0:
            lost = self.agent.box.lost[peer]
            self._jobs.put(PeerLostError(f"rank 0, which gives this pool its tasks, was lost: {lost}", peer=peer))

    def loop(self) -> None:
        """Run tasks until rank 0 stops this rank. Raises PeerLostError if rank 0 is lost."""
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PeerLostError):
                raise job
            do, future = job
            future.set_result(do())

    def serve(self) -> None:
        """Run tasks until rank 0 shuts the pool down, and then shut down the agent."""
        try:
            self.loop()
        except BaseException as error:
            self.agent.on_process_exit(error)
            raise
        self.agent.shutdown()

    def _begin(self, trusted: bool) -> Any:
        """Run the initializer; return None if it succeeds, or else its error, encoded by `packed`."""
        try:
            if trusted != self.trusted:
                raise ValueError("ranks passed different values of trusted= to Pool")
            if self._initialize is not None:
                self._initialize()
        except BaseException as error:
            return packed(error)
        return None

    def _run(self, content: bytes) -> Report:
        """Run a chunk of calls until its time limit. Results after the first error are dropped."""
        values: list[Any] = []
        failed = None
        try:
            chunk = self.codec.unpack(content)
        except Exception as error:
            return self.codec.dumps([]), 0, 0.0, packed(error)
        fn = chunk.fn
        kwargs = chunk.kwargs
        left = len(chunk.args)
        seconds = 0.0
        started = time.perf_counter()
        for args in chunk.args:
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:
                # Catch BaseException: asyncio's CancelledError, for example, must not end this rank, because a retry
                # would then end the next worker as well.
                failed = failed or packed(error)
            else:
                if failed is None:
                    values.append(value)
            left = left - 1
            seconds = time.perf_counter() - started
            if seconds > chunk.limit_s:
                break
        try:
            return self.codec.dumps(values), left, seconds, failed
        except Exception as error:
            content, refused = self._sendable(values, error)
            return content, left, seconds, packed(refused)

    def _sendable(self, values: list[Any], error: Exception) -> tuple[bytes, TypeError]:
        """Return the results before the first result that cannot be sent, and the error for that result."""
        for at, value in enumerate(values):
            try:
                self.codec.dumps([value])
            except Exception as reason:
                text = f"a task's result, {type(value).__name__}, cannot be sent back ({reason})"
                return self.codec.dumps(values[:at]), TypeError(text)
        return self.codec.dumps([]), TypeError(f"the results of a chunk of tasks cannot be sent back ({error})")
