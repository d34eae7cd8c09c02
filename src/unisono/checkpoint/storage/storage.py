"""What a place for checkpoints must be able to do. Another kind of storage is one more file beside this one."""

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
        """Let go of it after a failure; the file may stay, or not. Raises nothing."""
        ...


class Source(Protocol):
    """A file being read.

    Attributes:
        size: In bytes.

    Where the storage says `kept`, it may have an `identity` too: integers that are equal in two processes of a host if
    both read the same file from the same memory. Then it is enough that one of them checks what both read.
    """

    size: int

    def read(self, start: int, into: memoryview) -> None:
        """Fill this memory with the bytes from `start` on.

        Raises:
            OSError: They cannot be read, or the file has become shorter.
        """
        ...

    def view(self, start: int, stop: int) -> memoryview:
        """These bytes, without a copy where that can be; what is written there does not get into the file.

        Raises:
            OSError: As `read`.
        """
        ...

    def prefetch(self, start: int, stop: int) -> None:
        """These bytes are wanted soon; does not wait for them."""
        ...

    def close(self) -> None:
        """No more is wanted. Views stay."""
        ...


class Storage(Protocol):
    """One directory. Names in it are plain: no separators. Errors are `OSError`.

    Attributes:
        where: The directory, as messages call it and as `storage_at` takes it.
        name: Its last part.

    A storage may say `kept = True`: what one process has read of a file, this host's memory keeps for a while, for all
    its processes, as it does for file systems. Then ranks read all that they want, one after another, instead of
    telling each other.
    """

    where: str
    name: str

    def make(self) -> None:
        """Make the directory, unless it is there, and those above it; durably."""
        ...

    def create(self, name: str) -> Sink:
        """Begin a file that is not there yet."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Put a file in the place of one that may be there: at any instant the old one is there, or the new one.

        Returns when the new one would survive a loss of power, and with it every file finished before.
        """
        ...

    def sizes(self) -> dict[str, int]:
        """Every regular file, and its bytes. Empty if there is no such directory; links are no files."""
        ...

    def open(self, name: str) -> Source:
        """Begin to read a regular file."""
        ...

    def remove(self, *names: str) -> None:
        """Take files away, those that are there."""
        ...

    def discard(self) -> None:
        """Take the directory away if it is empty."""
        ...

    def child(self, name: str) -> Storage:
        """A directory in this one, whether it is there or not."""
        ...

    def parent(self) -> Storage:
        """The directory that this one is in."""
        ...

    def children(self) -> list[str]:
        """Names of the directories in this one."""
        ...
