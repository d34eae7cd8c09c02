"""Storage for checkpoints: a directory on this host, or a URL for fsspec (`s3://...`, `memory://...`).

In a directory, acknowledged writes survive a crash or a power failure. Each kind of storage other than a directory has
its own module in this package.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat
import sys
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

__all__ = ["LocalSink", "LocalSource", "LocalStorage", "Sink", "Source", "Storage", "contents", "storage_at"]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_POPULATE_READ = 22
"""Flag of madvise (Linux 5.14): read pages now, and report unreadable pages; accessing one would kill the process."""
_WRITEBACK = 16 << 20
_NEW = ".new"


class Sink(Protocol):
    """A new file being written."""

    def write(self, data: memoryview) -> None:
        """Append all of the data."""
        ...

    def finish(self) -> None:
        """Return once the file and its name would survive a power failure."""
        ...

    def abandon(self) -> None:
        """Close the file after a failure; the file may or may not remain. Never raises."""
        ...


class Source(Protocol):
    """A file being read.

    Attributes:
        size: Size in bytes.

    If the storage sets `kept`, the source may also have an `identity`: integers that are equal in two processes of a
    host if both read the same cached copy of a file. Of processes that read the same cached copy, only one needs to
    check the bytes.
    """

    size: int

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes from `start` on.

        Raises:
            OSError: The bytes cannot be read, or the file has become shorter.
        """
        ...

    def view(self, start: int, stop: int) -> memoryview:
        """Return a view of bytes `start` to `stop`, copied only if necessary; writes to the view do not reach the file.

        Raises:
            OSError: As `read`.
        """
        ...

    def prefetch(self, start: int, stop: int) -> None:
        """Start to prefetch bytes `start` to `stop`, without waiting for them."""
        ...

    def close(self) -> None:
        """Close the file. Views remain valid."""
        ...


class Storage(Protocol):
    """One directory. File names contain no separators. Methods raise `OSError` on failure.

    Attributes:
        where: Path or URL of the directory, for messages and `storage_at`.
        name: Last part of the path.

    A storage may set `kept = True` to declare that bytes read by one process are cached for all processes of the host,
    as in the page cache. If `kept` is set, each rank reads all bytes that it needs, instead of receiving some of them
    from other ranks.

    Example:
        >>> import tempfile
        >>> from unisono.checkpoint.storage import storage_at
        >>> storage: Storage = storage_at(tempfile.mkdtemp()).child("run-7")
        >>> storage.make()
        >>> file = storage.create("first")
        >>> file.write(memoryview(b"abc"))
        >>> file.finish()
        >>> storage.publish("second", b"defgh")
        >>> storage.open("first").size, sorted(storage.sizes().items())
        (3, [('first', 3), ('second', 5)])
        >>> storage.lock("third", b"mine"), storage.lock("third", b"yours")
        (True, False)
        >>> storage.parent().children()
        ['run-7']
        >>> storage.remove("first", "second", "third")
        >>> storage.discard()
        >>> storage.parent().children()
        []
    """

    where: str
    name: str

    def make(self) -> None:
        """Create the directory and its parents durably, unless they exist."""
        ...

    def create(self, name: str) -> Sink:
        """Create a file that does not exist yet.

        Args:
            name: Name in this directory.

        Returns:
            The open file, to be written and then finished or abandoned.
        """
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Replace a file atomically: at any time, either the old file or the new file exists.

        Returns once the new file, and every file finished before, would survive a power failure.

        Args:
            name: Name in this directory.
            data: The whole contents.
        """
        ...

    def lock(self, name: str, data: bytes) -> bool:
        """Create a small file unless a file of this name exists. The new file need not survive a power failure.

        A storage without `lock` does not detect two writers on one path.

        Args:
            name: Name in this directory.
            data: The whole contents.

        Returns:
            Whether the file was created.
        """
        ...

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every regular file, excluding links; empty if the directory does not exist."""
        ...

    def open(self, name: str) -> Source:
        """Open a regular file for reading.

        Args:
            name: Name in this directory.

        Returns:
            The open file, to be closed.

        Raises:
            FileNotFoundError: No file of this name exists.
        """
        ...

    def remove(self, *names: str) -> None:
        """Remove files; names of missing files are ignored.

        Args:
            names: Names in this directory.
        """
        ...

    def discard(self) -> None:
        """Remove the directory, which must be empty if it exists."""
        ...

    def child(self, name: str) -> Storage:
        """Return the storage for a subdirectory, whether or not it exists.

        Args:
            name: Name of the directory.
        """
        ...

    def parent(self) -> Storage:
        """Return the storage of the parent directory."""
        ...

    def children(self) -> list[str]:
        """Return the names of the subdirectories; empty if this directory does not exist."""
        ...


def storage_at(path: str | os.PathLike[str] | Storage) -> Storage:
    """Return the storage for a path or URL; a custom storage is returned unchanged.

    Example:
        >>> storage_at("/tmp/run-7").name
        'run-7'
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "publish"):
            raise TypeError(f"a path must be a str, a pathlib.Path or a storage, not a {type(path).__name__}")
        return path
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise TypeError(f"a path must be a non-empty str or a pathlib.Path, not {text!r}")
    scheme = _URL.match(text)
    if scheme and scheme[1] != "file":
        from unisono.checkpoint.fsspec_storage import FsspecStorage

        return FsspecStorage(text)
    return LocalStorage(text.removeprefix("file://"))


def contents(storage: Storage, name: str, most: int = sys.maxsize) -> bytearray:
    """Return the bytes of a small file, or the first `most` bytes of any file.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read.
    """
    with closing(storage.open(name)) as source:
        data = bytearray(min(source.size, most))
        source.read(0, memoryview(data))
    return data


class LocalStorage:
    """A `Storage` in a directory, local or mounted from another host.

    Args:
        path: The directory; it need not exist.
        root: Absolute path of the directory, if `path` is relative to an earlier working directory.
    """

    kept = True

    def __init__(self, path: str, root: Path | None = None) -> None:
        self.where: str = os.path.normpath(path)
        # Use an absolute path, so that a later change of the working directory has no effect.
        self._root = root or Path(path).absolute()
        self.name: str = self._root.name

    def make(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.is_dir()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            _sync_directory(path.parent)
        # If the directory's creator has crashed, the directory may exist without being durable.
        _sync_directory(self._root.parent)

    def create(self, name: str) -> LocalSink:
        return LocalSink(self._root / name)

    def publish(self, name: str, data: bytes) -> None:
        path = self._root / name
        new = self._root / f"{name}{_NEW}"
        new.unlink(missing_ok=True)
        sink = LocalSink(new)
        try:
            sink.write(memoryview(data))
            sink.settle()
            new.replace(path)
        except BaseException:
            sink.abandon()
            raise
        _sync_directory(self._root)

    def lock(self, name: str, data: bytes) -> bool:
        try:
            fd = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(fd, data)
        except BaseException:
            self.remove(name)
            raise
        finally:
            os.close(fd)
        return True

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                # Another process may have removed a file, such as its lock, in the meantime.
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def open(self, name: str) -> LocalSource:
        return LocalSource(self._root / name)

    def remove(self, *names: str) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            self._root.rmdir()

    def child(self, name: str) -> LocalStorage:
        return LocalStorage(str(Path(self.where) / name), self._root / name)

    def parent(self) -> LocalStorage:
        where = Path(self.where)
        return LocalStorage(str(where.parent if where.name else self._root.parent), self._root.parent)

    def children(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


class LocalSink:
    """A `Sink` that writes a new file, and starts to flush it to disk before all bytes are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._written = self._sent = 0

    def write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._fd, data)
            self._written += count
            data = data[count:]
        if self._written - self._sent >= _WRITEBACK:
            _start_writeback(self._fd, self._sent, self._written - self._sent)
            self._sent = self._written

    def finish(self) -> None:
        self.settle()
        _sync_directory(self._path.parent)

    def settle(self) -> None:
        """Make the file's contents durable, but not yet its directory entry."""
        os.fsync(self._fd)
        fd = self._fd
        self._fd = -1
        # Some network file systems report failed writes only on close.
        os.close(fd)

    def abandon(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        with suppress(OSError):
            self._path.unlink()


class LocalSource:
    """A `Source` for a regular file, mapped into memory where possible.

    Attributes:
        size: Size in bytes.
        identity: The file's device, inode and modification time; see `Source`.
    """

    def __init__(self, path: Path) -> None:
        # Open the file without blocking on a pipe or following a link.
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        self._path = path
        found = os.fstat(self._fd)
        self.size: int = found.st_size
        self.identity: list[int] = [found.st_dev, found.st_ino, found.st_mtime_ns]
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))

    def read(self, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], start + done)
            if not count:
                raise OSError(errno.EIO, f"the file ends at byte {start + done}", str(self._path))
            done += count

    def view(self, start: int, stop: int) -> memoryview:
        low = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if start < stop <= os.fstat(self._fd).st_size:
            with suppress(OSError, ValueError, AttributeError):
                mapped = mmap.mmap(self._fd, stop - low, access=mmap.ACCESS_COPY, offset=low)
                mapped.madvise(_POPULATE_READ)
                return memoryview(mapped)[start - low :]
        # The file cannot be mapped, or part of it is unreadable; a plain read of an unreadable part reports the error.
        data = memoryview(bytearray(stop - start))
        self.read(start, data)
        return data

    def prefetch(self, start: int, stop: int) -> None:
        if stop > start and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    # Close the file even if the caller never closes the archive, for example after reading one tensor.
    __del__ = close


def _sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that its entries would survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _start_writeback(fd: int, start: int, length: int) -> None:
    """Hint to the kernel to start writing a byte range of a file, so that `fsync` has less to do."""
    hint = _sync_file_range()
    if hint is not None:
        hint(fd, ctypes.c_int64(start), ctypes.c_int64(length), 2)


@cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None), "sync_file_range", None) if Path("/proc").exists() else None
