"""One rank's part in a pool: its agent, the thread that runs tasks one after the other, and their bytes."""

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
"""Results up to the first error, number of calls that did not run, seconds of those that did, and the error."""


@dataclass(slots=True)
class Chunk:
    """Calls of one function: each has its own positional arguments, and all have the same keyword arguments.

    After `limit_s` seconds a worker gives back those that it has not begun.
    """

    fn: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    limit_s: float = math.inf


class ChunkCodec:
    """Chunks, and lists of results, as bytes: values without pickle, and functions that are exposed, by name."""

    dumps: Callable[[list[Any]], bytes] = staticmethod(serialization.encode)
    loads: Callable[[bytes], Any] = staticmethod(serialization.decode)

    def pack(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk. Raises TypeError if something in it cannot be sent."""
        return self.dumps([name_of(chunk.fn), list(chunk.args), chunk.kwargs, chunk.limit_s])

    def unpack(self, content: bytes) -> Chunk:
        """Return the chunk of these bytes. Raises NotExposedError."""
        name, *rest = self.loads(content)
        return Chunk(ExportTable(trusted=False).function(name), *rest)


class PickleCodec(ChunkCodec):
    """Pickles, with functions and classes as `launch` sends them: by name where workers can import them."""

    dumps: Callable[[list[Any]], bytes] = staticmethod(dumps)
    loads: Callable[[bytes], Any] = staticmethod(pickle.loads)

    def __init__(self) -> None:
        self._found: dict[tuple[Any, Any], bool] = {}
        # The registry of modules that cloudpickle sends by value is one of the process.
        self._lock = threading.Lock()

    def pack(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk."""
        names = getattr(chunk.fn, "__module__", None), getattr(chunk.fn, "__qualname__", None)
        with self._lock:
            if names not in self._found:
                # Workers have imported the main module as it was when they started.
                self._found[names] = importable(chunk.fn)
            try:
                return dump(chunk, self._found[names])
            except Exception as error:
                raise TypeError(
                    "a task cannot be sent to a worker, because its function or one of its arguments cannot be "
                    f"pickled: {error.__cause__ or error}"
                ) from error

    def unpack(self, content: bytes) -> Chunk:
        """Return the chunk of these bytes."""
        chunk: Chunk = pickle.loads(content)
        return chunk


class Worker:
    """One rank of a pool. Collective.

    All tasks of a rank run in one thread, which also runs the initializer: what this sets for its thread, such as
    `torch.set_grad_enabled`, holds for the tasks.

    Args:
        comm: Communicator of the ranks; rank 0 gives tasks.
        trusted: Whether tasks and results are pickled.
        initialize: Called before the first task.

    Attributes:
        agent, codec, trusted: For calls between the ranks, and for their contents.
        start, run, stop: Functions that rank 0 calls on a worker.
    """

    def __init__(self, comm: Communicator, trusted: bool, initialize: Callable[[], object] | None) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Any] | PeerLostError | None] = queue.SimpleQueue()
        self._initialize = initialize
        self.trusted = trusted
        self.codec: ChunkCodec = PickleCodec() if trusted else ChunkCodec()
        self.start: Callable[[bool], Any]
        self.run: Callable[[bytes], Any]
        self.stop: Callable[[], None]
        self.start, self.run, self.stop = self._calls()
        expose = (self.start, self.run, self.stop)
        self.agent: Agent = Agent(comm, f"rank{comm.rank}", TIMEOUT_S, trusted=False, expose=expose, workers=1)
        # Calls of the program itself are not for this agent.
        unregister(self.agent)
        self.agent.when_lost.append(self._lose)
        if 0 in self.agent.box.lost:
            self._lose(0)

    def _calls(self) -> tuple[Callable[[bool], Any], Callable[[bytes], Any], Callable[[], None]]:
        """Return what this rank exposes: functions of its own, since ranks may be threads of one process."""

        @async_execution
        def start(trusted: bool) -> Any:
            return self._later(partial(self._begin, trusted))

        @async_execution
        def run(content: bytes) -> Any:
            return self._later(partial(self._run, content))

        def stop() -> None:
            self._jobs.put(None)

        return start, run, stop

    def _later(self, job: Callable[[], Any]) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._jobs.put((job, future))
        return future

    def _lose(self, peer: int) -> None:
        if peer == 0:
            lost = self.agent.box.lost[peer]
            self._jobs.put(PeerLostError(f"rank 0, which gives this pool its tasks, was lost: {lost}", peer=peer))

    def loop(self) -> None:
        """Run jobs until rank 0 stops this rank. Raises PeerLostError if it is lost."""
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PeerLostError):
                raise job
            do, future = job
            future.set_result(do())

    def serve(self) -> None:
        """Run jobs until the pool is shut down on rank 0, and end."""
        try:
            self.loop()
        except BaseException as error:
            self.agent.on_process_exit(error)
            raise
        self.agent.shutdown()

    def _begin(self, trusted: bool) -> Any:
        """Run the initializer; return its error as `packed`, or None."""
        try:
            if trusted != self.trusted:
                raise ValueError("ranks passed different values of trusted= to Pool")
            if self._initialize is not None:
                self._initialize()
        except BaseException as error:
            return packed(error)
        return None

    def _run(self, content: bytes) -> Report:
        """Run a chunk of calls, until its time is over. Results that follow an error are dropped."""
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
                # Also one such as asyncio's CancelledError must not end this rank, and then the next one.
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
        """Return the results before the first one that cannot be sent, and the error of that one."""
        for at, value in enumerate(values):
            try:
                self.codec.dumps([value])
            except Exception as reason:
                text = f"a task's result, {type(value).__name__}, cannot be sent back ({reason})"
                return self.codec.dumps(values[:at]), TypeError(text)
        return self.codec.dumps([]), TypeError(f"the results of a chunk of tasks cannot be sent back ({error})")
