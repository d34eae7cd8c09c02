"""Messages through MPI's sends and receives, directly on the tensors' memory; a user's long message is announced first.

In MPI a message longer than its receive is an error, and Open MPI 5 then writes past the end of the receive. So no
message is received before its length is known.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from unisono.core import clock
from unisono.core.threads import DaemonThreadPool
from unisono.core.types import COLLECTIVE_TAG, Message, Recv, Timeout
from unisono.core.work import CountdownWork, resolve_timeout, timeout_error
from unisono.errors import CommError, PeerLostError
from unisono.transports.mpi.communicators import MpiCommunicators
from unisono.transports.mpi.requests import DirectMessage, MessageRequest, RendezvousRecv, RendezvousSend

if TYPE_CHECKING:
    import torch

__all__ = ["LAST_LOOKS", "MpiMessages", "Posted", "keep"]

_MANY = 64
LAST_LOOKS = 100
_BYTES_A_ROUND = 1 << 20
_FOREVER_S = 1e9
_threads = DaemonThreadPool("unisono MPI messages")

# Memory that MPI may still access although no caller waits for it. MPI's requests outlive communicators.
_unfinished: dict[int, tuple[Any, object]] = {}
# One sweep at a time, over all communicators of the process.
_sweeping = threading.Lock()


class MpiMessages:
    """Posts messages, and keeps messages in flight alive.

    A user's message is an envelope with the number of elements, their dtype, and up to 4056 bytes of them. A longer
    body follows separately, once the receiver has checked that it fits. The lengths of collectives' messages are known
    at both ends; they are sent unchanged, with tags that encode the length, so that messages of different lengths never
    match. Messages longer than 1 GiB are split.

    Args:
        comms: The communicators to send on.
        timeout_s: Default timeout of a wait.
        look: Called during long waits with the awaited ranks; may raise.
        spins: Number of MPI polls before yielding.

    Attributes:
        numbers: Numbers of users' long messages.
    """

    def __init__(
        self, comms: MpiCommunicators, timeout_s: float, look: Callable[[Sequence[int]], object], spins: int
    ) -> None:
        self.comms = comms
        self.timeout_s = timeout_s
        self.look = look
        self.spins = spins
        self._open: set[Posted] = set()
        self.numbers: itertools.count[int] = itertools.count()

    def __del__(self) -> None:
        # The memory of messages in flight must not be freed before they have arrived.
        for work in self.__dict__.get("_open", ()):
            work.keep()

    def post(self, batch: Sequence[Message]) -> Posted:
        """Start all messages of a batch."""
        work = Posted(self, [self._part(message) for message in batch], batch)
        if not work.move():
            # MPI may access a tensor after its owner has dropped it, so the work is kept while it is in flight.
            self._open.add(work)
            work.when_done(lambda: self._open.discard(work))
            if len(self._open) > _MANY:
                self.move()
        return work

    def _part(self, message: Message) -> MessageRequest:
        if message.tag == COLLECTIVE_TAG:
            return DirectMessage(self.comms, message)
        if isinstance(message, Recv):
            return RendezvousRecv(self.comms, message)
        return RendezvousSend(self.comms, message, next(self.numbers) % self.comms.largest_tag)

    def iprobe(self, peer: int, tag: int) -> bool:
        """Return whether MPI has the envelope of a user's message with this tag that has no receive."""
        comms = self.comms
        try:
            with comms.turn:
                return bool(comms.users.Iprobe(peer, 2 * tag))
        except comms.mpi.Exception as error:
            raise comms.error_of(error, peer) from error

    def spins_for(self, nbytes: int) -> int:
        """Number of polls before yielding: enough to transfer this many bytes, because polling makes progress."""
        return self.spins * (1 + nbytes // _BYTES_A_ROUND)

    def end(self, cause: BaseException) -> None:
        """Fail all messages that are not done."""
        for work in list(self._open):
            work.give_up(cause)

    def move(self) -> None:
        """Make progress on all messages in flight. Must be called in every long wait, whatever the wait is for.

        A long message arrives in two steps, and the second is posted here: its sender may be waiting for this rank.
        """
        for work in list(self._open):
            work.move()

    @property
    def idle(self) -> bool:
        """Return whether no message is in flight."""
        self.move()
        return not self._open


class Posted(CountdownWork):
    """The messages of one batch; they make progress when a caller waits for them or polls them."""

    def __init__(self, messages: MpiMessages, parts: list[MessageRequest], batch: Sequence[Message]) -> None:
        super().__init__(messages.timeout_s, batch)
        self._all = messages
        self._moving = threading.Lock()
        self._parts = parts
        with self._failing(), messages.comms.turn:
            for part in parts:
                part.start()

    def move(self) -> bool:
        """Make progress. Return whether all messages are done."""
        if not self._done.is_set() and self._moving.acquire(blocking=False):
            try:
                with self._failing(), self._all.comms.turn:
                    for part in list(self._parts):
                        self._advance(part)
            finally:
                self._moving.release()
        return self._done.is_set()

    def _advance(self, part: MessageRequest) -> None:
        if part.move():
            self._parts.remove(part)
            self.arrived(part.message)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Complete the work with any error raised inside."""
        try:
            yield
        except self._all.comms.mpi.Exception as error:
            self.keep()
            self.complete(self._all.comms.error_of(error))
        except CommError as error:
            self.keep()
            self.complete(error)

    def keep(self) -> None:
        """Keep the memory of messages in flight alive, although no caller waits for them any more."""
        parts = self._parts
        self._parts = []
        keep([(request, part.held) for part in parts for request in part.requests], self._all.comms.turn)

    def give_up(self, cause: BaseException) -> None:
        """Complete the work with an error, no matter what has arrived."""
        self.complete(cause)
        with self._moving, self._all.comms.turn:
            self.keep()

    def wait(self, timeout: Timeout | None = None) -> None:
        if not self._done.is_set():
            started = clock.now()
            limit = resolve_timeout(timeout, self.timeout_s)
            try:
                spins = self._all.spins_for(sum(message.tensor.nbytes for message in self._messages))
                over = clock.poll_until(self.move, started + limit, self._look, spins)
            except PeerLostError:
                # Messages that the peer sent before it left may have arrived.
                over = any(self.move() for _ in range(LAST_LOOKS))
                if not over:
                    raise
            if not over:
                raise timeout_error(self._messages, clock.now() - started)
        super().wait(0.0)

    def _look(self) -> None:
        self._all.look([message.peer for message in self._messages])

    def is_completed(self) -> bool:
        return self.move()

    def get_future(self) -> torch.futures.Future[None]:
        if not self._done.is_set():
            _threads.run(self._wait_until_done)
        return super().get_future()

    def _wait_until_done(self) -> None:
        with contextlib.suppress(CommError):
            self.wait(_FOREVER_S)


def keep(held: Iterable[tuple[Any, object]], turn: AbstractContextManager[object]) -> None:
    """Keep MPI's requests, and the memory that each of them touches, alive until they are done."""
    for request, touched in held:
        _unfinished[id(request)] = request, touched
    # May run in any thread, and in destructors called from this function, so it must not disturb a sweep in progress.
    if _unfinished and _sweeping.acquire(blocking=False):
        try:
            with turn:
                for request, _ in list(_unfinished.values()):
                    if _is_done(request):
                        del _unfinished[id(request)]
        finally:
            _sweeping.release()


def _is_done(request: Any) -> bool:
    try:
        return bool(request.Test())
    except Exception:
        # Its error has already been reported, or no longer matters.
        return True
