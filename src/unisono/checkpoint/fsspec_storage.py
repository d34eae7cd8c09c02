"""Storage through fsspec: object stores, remote file systems, memory. Needs `pip install fsspec`.

Durability and atomicity depend on the backend; object stores write an object completely or not at all.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from unisono.host.distribution import required

__all__ = ["FsspecSink", "FsspecSource", "FsspecStorage"]


class FsspecStorage:
    """A `Storage` at a URL.

    Args:
        url: URL with a scheme that fsspec knows, such as "s3://bucket/runs/7".
    """

    def __init__(self, url: str) -> None:
        fsspec = required("fsspec", f"{url!r} is no local path and needs fsspec", "remote")
        self.where: str = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.where)
        self.name: str = self._root.rpartition("/")[2]

    def make(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def create(self, name: str) -> FsspecSink:
        return FsspecSink(self._fs, self._path(name))

    def publish(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)

    def lock(self, name: str, data: bytes) -> bool:
        # fsspec has no conditional put. Of two concurrent writers, the later one wins; the earlier one notices, because
        # it reads back different data.
        path = self._path(name)
        if self._fs.exists(path):
            return False
        self._fs.pipe_file(path, data)
        return bytes(self._fs.cat_file(path)) == data

    def sizes(self) -> dict[str, int]:
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._listing() if entry["type"] == "file"}

    def open(self, name: str) -> FsspecSource:
        return FsspecSource(self._fs, self._path(name))

    def remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            self._fs.rmdir(self._root)

    def child(self, name: str) -> FsspecStorage:
        return FsspecStorage(f"{self.where}/{name}")

    def parent(self) -> FsspecStorage:
        above = self.where.rpartition("/")[0]
        return FsspecStorage(self.where if above.endswith("/") else above)

    def children(self) -> list[str]:
        return sorted(entry["name"].rpartition("/")[2] for entry in self._listing() if entry["type"] == "directory")

    def _listing(self) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return [entry for entry in self._fs.ls(self._root, detail=True) if isinstance(entry, dict)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class FsspecSink:
    """A `Sink` that uploads the file in parts as it is written."""

    def __init__(self, fs: Any, path: str) -> None:
        self._file = fs.open(path, "wb")

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        discard = getattr(self._file, "discard", self._file.close)
        with suppress(Exception):  # a failed discard must not replace the original failure, which the caller raises
            discard()


class FsspecSource:
    """A `Source` that downloads the bytes of each view separately."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self.size: int = int(fs.info(path)["size"])

    def view(self, start: int, stop: int) -> memoryview:
        data = self._fs.cat_file(self._path, start=start, end=stop) if stop > start else b""
        if len(data) != stop - start:
            raise OSError(f"{self._path} ends before byte {stop}")
        return memoryview(bytearray(data))

    def read(self, start: int, into: memoryview) -> None:
        into[:] = self.view(start, start + len(into))

    def prefetch(self, start: int, stop: int) -> None:
        """Do nothing: a view is read immediately."""

    def close(self) -> None:
        """Do nothing: no resource is held."""
