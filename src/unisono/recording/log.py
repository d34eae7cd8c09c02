"""The recording's file format: keyed entries, each with a value and the bytes of tensors."""

from __future__ import annotations

import mmap
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from unisono import errors
from unisono.core.tensors import view_of
from unisono.errors import CommError
from unisono.serialization import decode, encode

__all__ = ["Log", "LogEntry", "LogWriter", "error_from", "path_of", "words_of"]

_Key = tuple[Any, ...]

_SIZES = struct.Struct("<QQQ")
"""Header of an entry: size in bytes of its key and value, size of its tensors, and a hash of all these bytes."""
_MAGIC = b"unisono record 1\n"


def path_of(folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's recording in a folder."""
    return Path(folder) / f"rank{rank}.record"


class LogWriter:
    """File to which a rank appends entries. Written entries survive even if the process is killed. Thread-safe.

    Args:
        path: File to create; it must not exist.

    Attributes:
        nbytes: Bytes written.
        closed: Whether the log is closed, so that new entries are dropped.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._lock = threading.Lock()
        self._file.write(_MAGIC)
        self.nbytes: int = len(_MAGIC)
        self.closed: bool = False

    def put(self, key: _Key, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Append an entry: a value of a type that `unisono.serialization` supports, and the bytes of tensors."""
        if self.closed:
            return
        head = encode((key, value))
        # Keep the copies: a view does not keep its tensor alive.
        arrays = [tensor.detach().contiguous().cpu() for tensor in tensors]
        bodies = [memoryview(view_of(array)) if array.numel() else memoryview(b"") for array in arrays]
        length = sum(map(len, bodies))
        content = xxhash.xxh3_64(head)
        for body in bodies:
            content.update(body)
        with self._lock:
            if self.closed:
                return
            self._file.write(_SIZES.pack(len(head), length, content.intdigest()) + head)
            for body in bodies:
                self._file.write(body)
            self._file.flush()
            self.nbytes += _SIZES.size + len(head) + length

    def close(self) -> None:
        """Close the log; later entries are dropped."""
        with self._lock:
            self.closed = True
            self._file.close()


class LogEntry(NamedTuple):
    """One entry of a recording.

    Attributes:
        value: The decoded value.
        body: The concatenated bytes of the tensors.
    """

    value: Any
    body: memoryview

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the recorded bytes into tensors.

        Raises:
            ValueError: The tensors' total size differs from the recorded size.
        """
        if sum(tensor.nbytes for tensor in tensors) != len(self.body):
            raise ValueError(f"{len(self.body)} bytes were recorded for {sum(t.nbytes for t in tensors)}")
        begin = 0
        for tensor in tensors:
            part = self.body[begin : begin + tensor.nbytes]
            begin += tensor.nbytes
            if tensor.numel():
                tensor.copy_(torch.frombuffer(bytearray(part), dtype=tensor.dtype).view(tensor.shape))


class Log:
    """All entries of a recording. An incomplete last entry is ignored.

    Args:
        path: The file.

    Raises:
        ValueError: The file is not a recording.
    """

    def __init__(self, path: Path) -> None:
        self._entries: defaultdict[_Key, deque[LogEntry]] = defaultdict(deque)
        self._lock = threading.Lock()
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{path} is not the file of a recording of this version")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole = memoryview(data)
        begin = len(_MAGIC)
        while begin + _SIZES.size <= len(whole):
            head, body, content = _SIZES.unpack_from(whole, begin)
            start = begin + _SIZES.size
            middle = start + head
            if middle + body > len(whole):
                break
            if xxhash.xxh3_64_intdigest(whole[start : middle + body]) != content:
                raise ValueError(f"{path} is damaged at byte {begin}")
            try:
                key, value = decode(bytes(whole[start:middle]))
                self._entries[key].append(LogEntry(value, whole[middle : middle + body]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} is damaged at byte {begin}: {error}") from error
            begin = middle + body

    def take(self, key: _Key) -> LogEntry | None:
        """Remove and return the next entry with this key, or None if no entry is left."""
        with self._lock:
            entries = self._entries.get(key)
            return entries.popleft() if entries else None

    def peek(self, key: _Key) -> LogEntry | None:
        """Return the next entry with this key without removing it, or None if no entry is left."""
        with self._lock:
            entries = self._entries.get(key)
            return entries[0] if entries else None

    def holds(self, *beginnings: _Key) -> bool:
        """Return whether entries are left whose keys have one of these prefixes."""
        with self._lock:
            return any(left and key[: len(each)] == each for key, left in self._entries.items() for each in beginnings)


def words_of(error: BaseException) -> tuple[Any, ...]:
    """Return a description from which `error_from` can recreate the error, with the same class and text."""
    if isinstance(error, CommError):
        return type(error).__name__, error.message, error.peer, error.nbytes, error.waited_s
    return type(error).__name__, str(error), None, None, None


def error_from(words: Sequence[Any]) -> Exception:
    """Recreate the error that `words_of` described, as a `CommError` if its class is unknown in this process."""
    name, message, peer, nbytes, waited_s = words
    if name in ("TypeError", "ValueError"):
        return TypeError(message) if name == "TypeError" else ValueError(message)
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if kind is None:
        return CommError(f"{name}: {message}")
    made: CommError = kind(message, peer=peer, nbytes=nbytes, waited_s=waited_s)
    return made
