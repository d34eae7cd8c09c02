"""Interface of a checkpoint storage. Each kind of storage is one more file beside this one."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Sink", "Source", "Storage"]


class Sink(Protocol):
    """A new file being written."""

    def write(self, data: memoryview) -> None:
        """Append all of it."""
        ...

    def finish(self) -> None:
        """Return when the file and its name would survive a loss of power."""
        ...

    def abandon(self) -> None:
        """Close the file after a failure; it may stay, or not. Raises nothing."""
        ...


class Source(Protocol):
    """A file being read.

    Attributes:
        size: In bytes.

    If the storage sets `kept`, it may have an `identity` too: integers that are equal in two processes of a host if
    both read the same file from the same memory. One of them then suffices to check what both read.
    """

    size: int

    def read(self, start: int, into: memoryview) -> None:
        """Fill this memory with the bytes from `start` on.

        Raises:
            OSError: They cannot be read, or the file has become shorter.
        """
        ...

    def view(self, start: int, stop: int) -> memoryview:
        """View of these bytes, without a copy where possible; writes to it do not reach the file.

        Raises:
            OSError: As `read`.
        """
        ...

    def prefetch(self, start: int, stop: int) -> None:
        """Start reading these bytes ahead; does not wait for them."""
        ...

    def close(self) -> None:
        """Close the file. Views stay valid."""
        ...


class Storage(Protocol):
    """One directory. Names in it are plain: no separators. Errors are `OSError`.

    Attributes:
        where: The directory, as in messages and as `storage_at` accepts it.
        name: Its last part.

    A storage may set `kept = True`: this host's memory caches bytes that one process has read for a while, for all
    its processes, as it does for file systems. Ranks then each read all bytes that they need, one after another,
    instead of sending them to each other.
    """

    where: str
    name: str

    def make(self) -> None:
        """Create the directory and its parents durably, unless they exist."""
        ...

    def create(self, name: str) -> Sink:
        """Create a file that does not exist yet."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Replace a file atomically: at any instant either the old one or the new one exists.

        Returns when the new file, and every file finished before, would survive a loss of power.
        """
        ...

    def sizes(self) -> dict[str, int]:
        """Size in bytes of every regular file; links do not count. Empty if there is no such directory."""
        ...

    def open(self, name: str) -> Source:
        """Open a regular file for reading."""
        ...

    def remove(self, *names: str) -> None:
        """Remove those of the files that exist."""
        ...

    def discard(self) -> None:
        """Remove the directory if it is empty."""
        ...

    def child(self, name: str) -> Storage:
        """A directory in this one, whether it exists or not."""
        ...

    def parent(self) -> Storage:
        """The directory that this one is in."""
        ...

    def children(self) -> list[str]:
        """Names of the directories in this one."""
        ...
