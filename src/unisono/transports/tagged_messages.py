"""Tagged messages between ranks over byte streams: rings in shared memory, or connections."""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch.autograd.graph import increment_version

from unisono.collectives.native_calls import DTYPE_CODES, DTYPES
from unisono.core import clock
from unisono.core.numbers import MESSAGE_HEADER
from unisono.core.tensors import view_of
from unisono.core.threads import DaemonThreadPool
from unisono.core.types import Message, Recv, Send, Timeout
from unisono.core.work import CountdownWork, elements, raised_by, resolve_timeout, size_error, timeout_error
from unisono.errors import CommError, CommTimeoutError

__all__ = ["FAREWELL", "HEADER_BYTES", "Bytes", "Incoming", "MessageWork", "Outgoing", "TaggedMessages"]

_NO_TIMEOUT_S = 1e9

_threads = DaemonThreadPool("unisono messages")


class MessageWork(CountdownWork):
    """Work for a batch of messages, which make progress while a thread waits for the work or polls it.

    Args:
        timeout_s: Default timeout in seconds.
        messages: The batch.
        ends: All messages of this rank, which move together.
    """

    def __init__(self, timeout_s: float, messages: Sequence[Message], ends: TaggedMessages) -> None:
        self._ends = ends
        self._is_waited_for = False
        super().__init__(timeout_s, messages)

    def wait(self, timeout: Timeout | None = None) -> None:
        if not self._done.is_set():
            started = clock.now()
            limit = resolve_timeout(timeout, self.timeout_s)
            try:
                while not self._done.is_set():
                    self._ends.wait(started + limit, self._done.is_set, self._awaited)
            except CommTimeoutError:
                raise timeout_error(self._messages, clock.now() - started) from None
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        if not self._done.is_set():
            try:
                self._ends.check(self._done.is_set, self._awaited)
            except CommError as error:
                self.complete(error)
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[None]:
        with self._lock:
            first = not self._is_waited_for
            self._is_waited_for = True
        if first and not self._done.is_set():
            # Report an error through the future, because no caller waits in the pool's thread.
            _threads.run(lambda: self.complete(raised_by(lambda: self.wait(_NO_TIMEOUT_S))))
        return super().get_future()

    def _awaited(self) -> list[int]:
        return [message.peer for message in self._messages]


ItemT = TypeVar("ItemT")

_HEADER = struct.Struct(MESSAGE_HEADER)
"""Format of the header, the first part of each message. The second part is the content."""
HEADER_BYTES = _HEADER.size
FAREWELL = _HEADER.pack(-1 << 62, 0, 0)
"""Header that a rank sends after its last message on a connection."""


class Bytes(Protocol):
    """One direction of a byte stream to or from a peer: one end of a native ring, or a connection."""

    @property
    def available(self) -> int:
        """Return a lower bound on the number of bytes that can be read now."""

    def write(self, content: bytes | memoryview, more: bool = False) -> int:
        """Send as many bytes as fit; return their number.

        Args:
            content: The unsent bytes of a header or of a message's contents.
            more: Whether to hold these bytes back until the next `write`, like `MSG_MORE` on sockets.
        """

    def peek(self) -> memoryview:
        """Return bytes that have arrived, without consuming them. If a whole header has arrived, they contain it."""

    def skip(self, nbytes: int, /) -> None:
        """Consume a header of this length, which `peek` has returned."""

    def read(self, into: memoryview, /) -> int:
        """Read available bytes into the memory for the remaining contents of a message; return their number."""


class Outgoing:
    """Queue of sends to one peer; the first send is being written.

    Attributes:
        pending: Number of unfinished sends.
    """

    def __init__(self, ring: Bytes) -> None:
        self._ring = ring
        self.pending: int = 0
        self._queue: deque[tuple[Send, CountdownWork]] = deque()
        self._rest: memoryview | None = None

    def works(self) -> list[CountdownWork]:
        """Return the `CountdownWork` of each unfinished send."""
        return [work for _, work in self._queue]

    def post(self, message: Send, work: CountdownWork) -> None:
        """Send a message after those posted earlier."""
        self._queue.append((message, work))
        self.pending += 1

    def move(self) -> bool:
        """Write as many bytes as fit; return whether any were written."""
        moved = False
        while self._queue:
            message, work = self._queue[0]
            if self._rest is None:
                tensor = message.tensor
                header = _HEADER.pack(message.tag, tensor.numel(), DTYPE_CODES[tensor.dtype])
                if not self._ring.write(header, more=tensor.numel() > 0):
                    break
                self._rest = view_of(tensor)
                moved = True
            step = self._ring.write(self._rest)
            if step < len(self._rest):
                self._rest = self._rest[step:]
                if not step:
                    break
            else:
                self._rest = None
                self._queue.popleft()
                self.pending -= 1
                work.arrived(message)
            moved = True
        return moved


class Incoming:
    """Incoming messages from one peer, and the receives that wait for them, by tag.

    Attributes:
        pending: Number of unfinished receives, plus one while an early message is being read.
        early: Messages that arrived before their receive was posted, by tag.
        probed: Tag that `iprobe` is looking for; None if no probe is in progress.
    """

    def __init__(self, ring: Bytes, peer: int, rank: int) -> None:
        self._ring = ring
        self._peer = peer
        self._rank = rank
        self.pending: int = 0
        self._posted: dict[int, deque[tuple[Recv, CountdownWork]]] = {}
        self.early: dict[int, deque[torch.Tensor]] = {}
        self.probed: int | None = None
        self._tag = 0
        self._target: torch.Tensor | None = None
        self._rest = memoryview(b"")
        self._end: tuple[Recv, CountdownWork] | None = None

    def works(self) -> list[CountdownWork]:
        """Return the `CountdownWork` of each unfinished receive."""
        waiting = [work for queue in self._posted.values() for _, work in queue]
        return waiting + ([self._end[1]] if self._end is not None else [])

    def post(self, message: Recv, work: CountdownWork) -> None:
        """Complete a receive with an early message, or let it wait for the next message with its tag."""
        if message.tag not in self.early:
            self._posted.setdefault(message.tag, deque()).append((message, work))
            self.pending += 1
            return
        early = _next(self.early, message.tag)
        if early.dtype is not message.tensor.dtype or early.numel() != message.tensor.numel():
            self._refuse(message, work, early.numel(), early.dtype)
        else:
            view_of(message.tensor)[:] = view_of(early)
            increment_version(message.tensor)
            work.arrived(message)

    def move(self) -> bool:
        """Read messages as long as receives or a probe wait for them; return whether anything was read."""
        moved = False
        while (self.pending or self.probed is not None) and self._ring.available:
            if self._target is None and not self._begin():
                break
            moved = True
            step = self._ring.read(self._rest)
            if step < len(self._rest):
                self._rest = self._rest[step:]
            else:
                self._finish()
        return moved

    def _begin(self) -> bool:
        """Read a header, and choose the destination of the message.

        Returns False if the header is incomplete, or belongs to the probed message, which remains unread.
        """
        coming = self._next_tag()
        if coming is None or (not self._posted and coming == self.probed):
            return False
        tag, numel, code = _HEADER.unpack_from(self._ring.peek())
        if not (0 < code <= len(DTYPES) and numel >= 0):
            raise CommError(f"rank {self._peer} sent what is no message", peer=self._peer)
        self._ring.skip(_HEADER.size)
        dtype = DTYPES[code - 1]
        if tag in self._posted:
            self._end = _next(self._posted, tag)
        else:
            # Store this message in `early`: no receive waits for it, but a receive or probe waits for one with another
            # tag behind it.
            self._end = None
            self.pending = self.pending + 1
        target = None if self._end is None else self._end[0].tensor
        if target is None or target.dtype is not dtype or target.numel() != numel:
            target = torch.empty(numel, dtype=dtype, device="cpu")
            if self._end is not None:
                self._refuse(*self._end, numel, dtype)
        self._tag = tag
        self._target = target
        self._rest = view_of(target)
        return True

    def _next_tag(self) -> int | None:
        """Return the tag of the next message, or None if its header has not arrived."""
        head = self._ring.peek()
        return _HEADER.unpack_from(head)[0] if len(head) >= HEADER_BYTES else None

    def _finish(self) -> None:
        end = self._end
        content = self._target
        assert content is not None
        self._target = self._end = None
        self.pending -= 1
        increment_version(content)
        if end is not None:
            end[1].arrived(end[0])
            return
        self.early.setdefault(self._tag, deque()).append(content)
        if self._tag in self._posted:
            # A receive for this message was posted while the message was being read.
            self.pending -= 1
            self.post(*_next(self._posted, self._tag))

    def _refuse(self, message: Recv, work: CountdownWork, numel: int, dtype: torch.dtype) -> None:
        """Fail a receive because the sender's dtype or number of elements differs."""
        sent = elements(numel, str(dtype))
        expected = elements(message.tensor.numel(), str(message.tensor.dtype))
        work.complete(size_error(self._peer, sent, self._rank, expected, message.tag, self._peer))

    def holds(self, tag: int) -> bool:
        """Return whether a message with this tag has arrived, and no receive is waiting for it."""
        return tag in self.early or (self._target is None and self._ring.available > 0 and self._next_tag() == tag)


_End = Outgoing | Incoming


def _next(queues: dict[int, deque[ItemT]], tag: int) -> ItemT:
    """Pop the first item of a tag's queue. Deletes an emptied queue, because its tag may never be used again."""
    queue = queues[tag]
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


class TaggedMessages(ABC):
    """All messages of one rank. A thread that waits for one message moves the messages of all peers.

    Args:
        outgoing, incoming: Byte streams to and from each peer.
        rank: This rank.

    Attributes:
        lock, idle, held: See `MessageEnds`.
        broken: Error passed to `abort`; None while messages can still be sent and received.
    """

    def __init__(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], rank: int) -> None:
        self._out = {peer: Outgoing(carrier) for peer, carrier in outgoing.items()}
        self._in = {peer: Incoming(carrier, peer, rank) for peer, carrier in incoming.items()}
        self._sending: dict[int, _End] = {}
        self._receiving: dict[int, _End] = {}
        self.lock: threading.RLock = threading.RLock()
        self.idle: bool = True
        self.held = False
        self.broken: BaseException | None = None

    def post(self, batch: Sequence[Message], timeout_s: float) -> CountdownWork:
        """Post messages, and move as many bytes as possible; waiting for the returned work moves the rest."""
        work = MessageWork(timeout_s, batch, self)
        if self.broken is not None:
            work.complete(self.broken)
            return work
        with self.lock:
            if self.held:
                raise CommError("a message was begun inside another message, as by a signal handler")
            for message in batch:
                peer = message.peer
                self.open(peer)
                if isinstance(message, Send):
                    self._sending[peer] = self._out[peer]
                    self._out[peer].post(message, work)
                else:
                    self._receiving[peer] = self._in[peer]
                    self._in[peer].post(message, work)
            self.move()
        return work

    def has_read(self, peer: int, tag: int) -> bool:
        """Implement `MessageEnds`."""
        return tag in self._in[peer].early

    def holds(self, peer: int, tag: int) -> bool:
        """Return whether a message with this tag has arrived, and no receive is waiting for it.

        If the message cannot arrive any more, raises the same error as `check`.
        """
        found = self._holds(peer, tag)
        if not found and (self.broken or self.end_of(peer)):
            self.check(lambda: self._holds(peer, tag), lambda: [peer])
        return found

    def _holds(self, peer: int, tag: int) -> bool:
        with self.lock:
            self.open(peer)
            self._receiving[peer] = end = self._in[peer]
            end.probed = tag
            self.move()
            end.probed = None
            return end.holds(tag)

    def move(self) -> bool:
        """Send and receive without blocking; return whether any bytes moved."""
        moved = False
        with self.lock:
            for ends in (self._sending, self._receiving):
                for peer, end in list(ends.items()):
                    if end.move():
                        moved = True
                        self.wake(peer)
                    if not end.pending:
                        ends.pop(peer, None)
            self.idle = not self._sending and not self._receiving
        return moved

    def check(self, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Send and receive without blocking; raise an error if the messages cannot complete any more."""
        if self.move() or done():
            return
        if self.broken is not None:
            raise self.broken
        for rank in missing():
            error = self.end_of(rank)
            # Look again before raising: the peer's last messages may have arrived after the `move` above, and another
            # thread may have received them.
            if error is not None and not self.move() and not done() and rank in missing():
                raise error

    def abort(self, cause: BaseException) -> None:
        """End every current and later wait with an error. May be called from any thread."""
        self.broken = cause
        with self.lock:
            ends: list[_End] = [*self._out.values(), *self._in.values()]
            unfinished = [work for end in ends for work in end.works()]
        for work in unfinished:
            work.complete(cause)

    # -- implemented by each transport ---------------------------------------------------------
    @abstractmethod
    def wait(self, deadline: float, done: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until messages have moved or `done` returns true.

        Args:
            deadline: Deadline on the library's clock.
            done: Returns whether the awaited condition holds.
            missing: Returns the ranks whose loss ends the wait.
        """

    @abstractmethod
    def end_of(self, peer: int) -> CommError | None:
        """Return the error to raise if nothing more can arrive from a peer; None if more can arrive."""

    def open(self, peer: int) -> None:
        """Create the byte streams to and from a peer, for transports that create streams on demand."""

    def wake(self, peer: int) -> None:
        """Wake a peer that may be asleep, waiting for bytes to read or for room to write."""
