"""Messages of any length between any two ranks, where the end of one rank is no matter of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.errors import ClosedError, CommError, PeerLostError

if TYPE_CHECKING:
    import torch

    from unisono.core.group import Group

__all__ = ["Envelope", "Mailbox"]


class Envelope(NamedTuple):
    """One message as it arrived.

    Attributes:
        peer: Who sent it.
        head: Its bytes.
        bodies: What came with it: one-dimensional tensors of uint8, in memory of their own.
    """

    peer: int
    head: bytes
    bodies: Sequence[torch.Tensor]


class Mailbox(ABC):
    """One rank's place for messages that nobody has asked for. Those of one rank to another arrive in order.

    Unlike a transport, it has no receives to be posted, and no failure of the whole: a rank that has gone is
    `mark_lost`d, and the rest goes on. Sending is for any thread; `poll` for one thread at a time; `wait` for
    one thread only, which is the one that is always there. Who is about to poll by itself says `mute_wakeups`, so
    that the waiting thread sleeps on.

    Attributes:
        group: Whose ranks these are.
        eager: Whether who waits for a message should poll for it himself for a while.
        lost: The ranks that have gone, each with the error that tells of it.
        on_stall: Called in the sending thread when a send has to wait until the receiver makes room.
    """

    eager: bool = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lost: dict[int, BaseException] = {}
        self.on_stall: Callable[[], None] = _nothing
        self.closed = False
        self._closers: list[Callable[[], None]] = []

    @abstractmethod
    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        """Send; when it returns, the bodies may be changed.

        Args:
            peer: Another rank.
            head: Bytes, best few.
            bodies: One-dimensional contiguous tensors of uint8 on the CPU.
            timeout: Seconds that the receiver may take to make room.

        Raises:
            PeerLostError: The peer has gone.
            CommTimeoutError: It takes nothing. Then it is lost; or, where it is not, the message arrives when it does.
        """

    @abstractmethod
    def poll(self) -> list[Envelope]:
        """What has come. Never blocks."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when something may have come, or somebody nudges, or the time is up."""

    def mute_wakeups(self) -> None:
        """From now on the caller polls: nobody need be woken."""

    def unmute(self) -> None:
        """The caller polls no more."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait`. From any thread, and from a finalizer: takes no lock."""

    def mark_lost(self, peer: int, error: BaseException) -> None:
        """A rank has gone: sends to it fail, those in progress too."""
        self.lost.setdefault(peer, error)
        self.wake()

    def abort_message(self, peer: int, error: BaseException) -> None:
        """A send has been given up, also by an interrupt: half a message has gone, and nothing can follow it."""
        if not isinstance(error, CommError):
            error = PeerLostError(f"a message to rank {peer} was broken off by {type(error).__name__}", peer=peer)
        self.mark_lost(peer, error)

    def close(self) -> None:
        """Let go. Again is harmless."""
        self.closed = True
        closers, self._closers = self._closers, []
        for closer in closers:
            closer()

    def on_close(self, closer: Callable[[], None]) -> None:
        """Also do this at the end."""
        self._closers.append(closer)

    def check(self, peer: int) -> None:
        """Raise if nothing can be sent to this rank."""
        if peer in self.lost:
            error = self.lost[peer]
            raise PeerLostError(str(error), peer=peer) from error
        if self.closed:
            raise ClosedError("this mailbox is closed")


def _nothing() -> None:
    """Nobody wants to know."""
