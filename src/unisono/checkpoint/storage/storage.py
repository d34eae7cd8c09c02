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
            The open file, to be written, and then finished or abandoned.
        """
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Replace a file atomically: at any instant either the old one or the new one exists.

        Returns when the new file, and every file finished before, would survive a loss of power.

        Args:
            name: Name in this directory.
            data: The whole contents.
        """
        ...

    def lock(self, name: str, data: bytes) -> bool:
        """Create a small file, unless there is one of this name. Need not survive a loss of power.

        A storage without this method notices no two writers of one path.

        Args:
            name: Name in this directory.
            data: The whole contents.

        Returns:
            Whether it was created.
        """
        ...

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every regular file, without links; empty if there is no such directory."""
        ...

    def open(self, name: str) -> Source:
        """Open a regular file for reading.

        Args:
            name: Name in this directory.

        Returns:
            The open file, to be closed.

        Raises:
            FileNotFoundError: There is no file of this name.
        """
        ...

    def remove(self, *names: str) -> None:
        """Remove those of the files that exist.

        Args:
            names: Names in this directory.
        """
        ...

    def discard(self) -> None:
        """Remove the directory, which must be empty if it exists."""
        ...

    def child(self, name: str) -> Storage:
        """Return the storage of a directory in this one, whether it exists or not.

        Args:
            name: Name of the directory.
        """
        ...

    def parent(self) -> Storage:
        """Return the storage of the directory that this one is in."""
        ...

    def children(self) -> list[str]:
        """Return the names of the directories in this one; empty if there is no such directory."""
        ...
