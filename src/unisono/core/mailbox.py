"""Messages of any length between any two ranks; the loss of one rank does not affect the others."""

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
        peer: The sender's rank.
        head: The bytes of the message.
        bodies: The tensors sent with it: one-dimensional, of uint8, in memory of their own.
    """

    peer: int
    head: bytes
    bodies: Sequence[torch.Tensor]


class Mailbox(ABC):
    """One rank's queue of unsolicited messages. Messages from one rank to another arrive in order.

    Unlike a transport, it has no posted receives, and no failure of the whole: a lost rank is
    `mark_lost`d, and the others continue. Any thread may send; one thread at a time may `poll`; only the permanent
    service thread may `wait`. A thread that is about to poll by itself calls `mute_wakeups`, so that the waiting
    thread stays asleep.

    Attributes:
        group: Group of the ranks.
        eager: Whether a thread that waits for a message should first poll for it for a while.
        lost: The lost ranks, each with the error that reports it.
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
        """Send a message; return when the bodies may be changed.

        Args:
            peer: Another rank.
            head: Bytes, preferably few.
            bodies: One-dimensional contiguous tensors of uint8 on the CPU.
            timeout: Seconds that the receiver may take to make room.

        Raises:
            PeerLostError: The peer has gone.
            CommTimeoutError: The peer receives nothing. It is lost then; otherwise the message arrives later.
        """

    @abstractmethod
    def poll(self) -> list[Envelope]:
        """Return the messages that have arrived. Never blocks."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when a message may have arrived, another thread calls `wake`, or the timeout expires."""

    def mute_wakeups(self) -> None:
        """Declare that the caller polls from now on: no thread needs to be woken."""

    def unmute(self) -> None:
        """Declare that the caller has stopped polling."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait`. From any thread, and from a finalizer: takes no lock."""

    def mark_lost(self, peer: int, error: BaseException) -> None:
        """Mark a rank as lost: sends to it fail, including those in progress."""
        self.lost.setdefault(peer, error)
        self.wake()

    def abort_message(self, peer: int, error: BaseException) -> None:
        """Handle an aborted or interrupted send: part of the message was sent, so no message can follow it."""
        if not isinstance(error, CommError):
            error = PeerLostError(f"a message to rank {peer} was aborted by {type(error).__name__}", peer=peer)
        self.mark_lost(peer, error)

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self.closed = True
        closers, self._closers = self._closers, []
        for closer in closers:
            closer()

    def on_close(self, closer: Callable[[], None]) -> None:
        """Register a function that `close` calls too."""
        self._closers.append(closer)

    def check(self, peer: int) -> None:
        """Raise if nothing can be sent to this rank."""
        if peer in self.lost:
            error = self.lost[peer]
            raise PeerLostError(str(error), peer=peer) from error
        if self.closed:
            raise ClosedError("this mailbox is closed")


def _nothing() -> None:
    """Do nothing: the default of `on_stall`."""
