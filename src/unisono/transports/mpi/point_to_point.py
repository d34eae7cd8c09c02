"""Sends and receives messages through MPI, directly from and to the tensors' memory.

In MPI, receiving a message that is longer than the receive buffer is an error, and Open MPI 5 then writes past the end
of the buffer. Therefore, an envelope announces the length of a user's long message before its content is received.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from unisono.core import clock
from unisono.core.threads import DaemonThreadPool
from unisono.core.types import COLLECTIVE_TAG, Message, Recv, Timeout
from unisono.core.work import CountdownWork, raised_by, resolve_timeout, timeout_error
from unisono.errors import CommError, PeerLostError
from unisono.transports.mpi.communicators import MpiCommunicators
from unisono.transports.mpi.requests import (
    ENVELOPE_BYTES,
    MessageRequest,
    envelope_of,
    post_direct,
    post_recv,
    post_send,
)

__all__ = ["LAST_LOOKS", "MpiMessages", "Posted", "keep"]

_MANY = 64
LAST_LOOKS = 100
_BYTES_A_ROUND = 1 << 20
_FOREVER_S = 1e9
_threads = DaemonThreadPool("unisono MPI messages")

# MPI requests that no caller waits for any more, and memory that MPI may still access for them. Kept globally, because
# requests outlive communicators.
_unfinished: dict[int, tuple[Any, object]] = {}
# Lock that allows one sweep over `_unfinished` at a time.
_sweeping = threading.Lock()


class MpiMessages:
    """Posts a group's messages, and keeps them alive while they are in flight.

    A user's message starts with an envelope: the number of elements, their dtype, and the content itself if it has at
    most 4056 bytes. Longer content follows separately, and the receiver accepts it only after checking that it fits. In
    collectives, sender and receiver know the lengths of messages, so these messages have no envelope. The tag of a
    collective's message encodes the message's length, so that messages of different lengths never match. Messages
    longer than 1 GiB are split.

    Args:
        comms: The communicators to send on.
        timeout_s: Default timeout of a wait.
        look: Function called during long waits, with the awaited ranks as its argument; may raise an error to end the
            wait.
        spins: Number of MPI polls before yielding.

    Attributes:
        numbers: Counter that numbers users' sends, so that a long message's body can have its own tag.
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
        # Keep the memory of messages in flight alive longer than this object, because MPI may still access it.
        for work in self.__dict__.get("_open", ()):
            work.keep()

    def post(self, batch: Sequence[Message]) -> Posted:
        """Start all messages of a batch."""
        work = Posted(self, [self._part(message) for message in batch], batch)
        if not work.move():
            # MPI may access a tensor after the caller has dropped it, so keep the work while it is in flight.
            self._open.add(work)
            work.when_done(lambda: self._open.discard(work))
            if len(self._open) > _MANY:
                self.move()
        return work

    def _part(self, message: Message) -> MessageRequest:
        comms = self.comms
        if message.tag == COLLECTIVE_TAG:
            return MessageRequest(message, message.tensor, partial(post_direct, comms, message))
        if isinstance(message, Recv):
            arriving = bytearray(ENVELOPE_BYTES)
            return MessageRequest(message, (message.tensor, arriving), partial(post_recv, comms, message, arriving))
        number = next(self.numbers) % comms.largest_tag
        envelope = envelope_of(message, number)
        return MessageRequest(message, (message.tensor, envelope), partial(post_send, comms, message, envelope, number))

    def iprobe(self, peer: int, tag: int) -> bool:
        """Return whether the envelope of a user's message with this tag has arrived, but no receive waits for it."""
        comms = self.comms
        try:
            with comms.turn:
                return bool(comms.users.Iprobe(peer, 2 * tag))
        except comms.mpi.Exception as error:
            raise comms.error_of(error, peer) from error

    def end(self, cause: BaseException) -> None:
        """Complete all messages in flight with an error."""
        for work in list(self._open):
            work.give_up(cause)

    def move(self) -> None:
        """Make progress on all messages in flight. Must be called in every long wait of this rank.

        `move` posts the receive for a long message's body once the message's envelope has arrived. The sender may be
        blocked until this receive is posted, even while this rank is waiting for something else.
        """
        for work in list(self._open):
            work.move()

    @property
    def idle(self) -> bool:
        """Return whether no message is in flight."""
        self.move()
        return not self._open


class Posted(CountdownWork):
    """Work for a batch of messages, which make progress while a thread waits for the work or polls it."""

    def __init__(self, messages: MpiMessages, parts: list[MessageRequest], batch: Sequence[Message]) -> None:
        super().__init__(messages.timeout_s, batch)
        self._all = messages
        self._moving = threading.Lock()
        self._parts = parts
        # Post all messages before polling any: a message that does not fit must not keep the others from being posted.
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
        """Complete this work with any MPI error or `CommError` that the `with` block raises."""
        try:
            yield
        except self._all.comms.mpi.Exception as error:
            self.keep()
            self.complete(self._all.comms.error_of(error))
        except CommError as error:
            self.keep()
            self.complete(error)

    def keep(self) -> None:
        """Keep the memory of messages in flight alive until MPI has finished with it, even if this work is dropped."""
        parts = self._parts
        self._parts = []
        keep([(request, part.held) for part in parts for request in part.requests], self._all.comms.turn)

    def give_up(self, cause: BaseException) -> None:
        """Complete the work with an error, even if messages have arrived."""
        self.complete(cause)
        with self._moving, self._all.comms.turn:
            self.keep()

    def wait(self, timeout: Timeout | None = None) -> None:
        if not self._done.is_set():
            started = clock.now()
            limit = resolve_timeout(timeout, self.timeout_s)
            try:
                # Poll more often before yielding for long messages, because only polling moves bytes.
                nbytes = sum(message.tensor.nbytes for message in self._messages)
                spins = self._all.spins * (1 + nbytes // _BYTES_A_ROUND)
                over = clock.poll_until(self.move, started + limit, self._look, spins)
            except PeerLostError:
                # Poll again, because the peer may have sent the messages before it left.
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
            _threads.run(lambda: raised_by(lambda: self.wait(_FOREVER_S)))
        return super().get_future()


def keep(held: Iterable[tuple[Any, object]], turn: AbstractContextManager[object]) -> None:
    """Keep MPI's requests, and the memory that each request accesses, alive until the requests are done."""
    for request, touched in held:
        _unfinished[id(request)] = request, touched
    # Skip the sweep if one is already in progress, even in this same thread: the sweep may trigger destructors, which
    # call this function.
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
        # Count a failed request as done: its error has already been reported or no longer matters.
        return True
