"""Message routing of an agent: sending, dispatch of received messages, and handling of lost ranks."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from unisono import serialization
from unisono.core.mailbox import Envelope
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.rpc import protocol
from unisono.rpc.protocol import HEADER, NO_CONTEXT
from unisono.rpc.receiver import Task
from unisono.rpc.serialize import pack

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["SEND_S", "Router", "rollback"]

SEND_S = 60.0
"""Seconds to wait for a rank to make room for a message."""
_BYE_S = 0.5
_PROTOCOL = (protocol.ADD, protocol.ADD_ACK, protocol.DROP, protocol.RELEASE)


class Router:
    """Sends messages, and dispatches received ones.

    Attributes:
        gone: Ranks with an end that has been handled, or is about to be.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent, self._box, self._rank = agent, agent.box, agent.rank
        self.gone: set[int] = set()
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._posting = threading.Lock()

    # -- out -----------------------------------------------------------------------------------
    def send(self, peer: int, kind: int, number: int, values: Sequence[object], within: int = NO_CONTEXT) -> None:
        """Send an answer."""
        head, bodies, undo = pack(self._agent, peer, kind, number, within, values)
        try:
            self.post(peer, head, bodies, SEND_S)
        except BaseException as error:
            # Also on an interrupt: references that were not sent would stay counted permanently.
            if not self.may_arrive(peer, error):
                rollback(undo)
            raise

    def may_arrive(self, peer: int, error: BaseException) -> bool:
        """Return whether the message may arrive despite an error in `post`, because its receiver is only slow."""
        return isinstance(error, CommTimeoutError) and peer not in self._box.lost

    def post(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        """Send a message; a message of this rank to itself is served by another thread."""
        if peer != self._rank:
            self._box.send(peer, head, bodies, timeout)
            return
        found = self.dispatch(Envelope(peer, head, [body.clone() for body in bodies]))
        if found is not None:
            self._agent.workers.run(found[0])

    def send_control(self, peer: int, kind: int, *words: int) -> None:
        """Send a few numbers, in order; nothing if the rank is gone. During a dispatch they are sent soon after."""
        self._outbox.append((peer, _plain(kind, words)))
        if not self._agent.receiver.dispatching:
            self.empty_outbox()

    def empty_outbox(self) -> None:
        """Send queued messages, unless another thread is doing so, and release freed objects."""
        while self._outbox and self._posting.acquire(blocking=False):
            try:
                self._empty()
            finally:
                self._posting.release()
        self._agent.references.collect_freed()

    def _empty(self) -> None:
        while self._outbox:
            peer, head = self._outbox.popleft()
            # Nothing is sent to a rank that is gone.
            with contextlib.suppress(CommError):
                self.post(peer, head, (), SEND_S)

    def announce_exit(self, reason: str) -> None:
        """Notify every rank that this rank has stopped serving."""
        for peer in self._agent.alive():
            if peer != self._rank:
                with contextlib.suppress(CommError):
                    self._box.send(peer, _plain(protocol.EXIT, (reason,)), (), _BYE_S)

    # -- in ------------------------------------------------------------------------------------
    def dispatch(self, mail: Envelope) -> tuple[Task, bool] | None:
        """Handle one message, in order. Return the remaining task, and whether it is short."""
        if mail.peer in self.gone:
            return None
        try:
            return self._sorted(mail)
        except (ValueError, TypeError, LookupError, struct.error) as error:
            # Not a valid message: receive nothing more from this rank.
            self._box.mark_lost(
                mail.peer, CommError(f"rank {mail.peer} sent an invalid message: {error}", peer=mail.peer)
            )
            return None

    def _sorted(self, mail: Envelope) -> tuple[Task, bool] | None:
        agent = self._agent
        kind, number, _, _ = HEADER.unpack_from(mail.head)
        if kind in (protocol.REQUEST, protocol.REMOTE):
            return agent.serving.accept(mail)
        if kind in (protocol.REPLY, protocol.ERROR):
            return agent.caller.answered(number, mail)
        words = serialization.decode(mail.head[HEADER.size :])
        if kind in _PROTOCOL:
            agent.references.arrived(mail.peer, kind, words)
            return self.empty_outbox, True
        if kind == protocol.CANCEL:
            agent.serving.cancel(mail.peer, words[0])
        elif kind == protocol.EXIT:
            self._box.mark_lost(
                mail.peer, PeerLostError(f"rank {mail.peer} no longer serves calls: {words[0]}", peer=mail.peer)
            )
        elif kind == protocol.DISCARD:
            return lambda: agent.contexts.discard(words[0]), True
        else:
            return lambda: agent.closing.arrived(mail.peer, kind, words), True
        return None

    def clock(self) -> tuple[float, list[Task]]:
        """Return when to check the clock next, and the tasks that are due now."""
        agent = self._agent
        tasks = [_calling(agent.caller.give_up, call, call.late()) for call in agent.calls.late()]
        for peer in self._box.lost.keys() - self.gone:
            self.gone.add(peer)
            tasks.append(_calling(self._lose, peer))
        if agent.references.waiting:
            tasks.append(agent.references.flush)
        return agent.calls.next_due, tasks

    def _lose(self, peer: int) -> None:
        agent, error = self._agent, self._box.lost[peer]
        agent.caller.lose(peer, error)
        agent.serving.lose(peer)
        agent.references.lose(peer, PeerLostError(f"rank {peer} died before the object was created", peer=peer))
        agent.contexts.lose(peer)
        self.empty_outbox()
        agent.closing.look()


def rollback(undo: Sequence[Callable[[], None]]) -> None:
    """Undo the preparation of a message that is not sent."""
    for action in undo:
        action()


def _calling(function: Callable[..., object], *args: object) -> Task:
    def task() -> None:
        function(*args)

    return task


def _plain(kind: int, words: tuple[object, ...]) -> bytes:
    return HEADER.pack(kind, 0, NO_CONTEXT, 0) + serialization.encode(words)
