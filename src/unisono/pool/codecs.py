"""Bytes of tasks and results: plain values and exposed functions, or anything among ranks that trust each other."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono import serialization
from unisono.launcher.processes import dump, importable
from unisono.rpc.exported import ExportTable, name_of
from unisono.serialization.functions import dumps

__all__ = ["Chunk", "ChunkCodec", "PickleCodec"]


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

    dumps = staticmethod(dumps)
    loads = staticmethod(pickle.loads)

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
