"""Opens a mailbox for a communicator's ranks, with detection of lost peers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from unisono.comm.engine import Engine
from unisono.core import clock
from unisono.core.failure import Cause, error_of, to_cause
from unisono.core.garbage import weak_method
from unisono.core.group import Group
from unisono.core.mail import pack, parse
from unisono.core.tensors import view_of
from unisono.core.transport import Envelope, Mailbox, Transport
from unisono.core.types import Message, Recv, Send, Work
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.wrappers.consistency import Checked

__all__ = ["ENVELOPE_BYTES", "IncomingStream", "PointToPointMailbox", "open_mailbox"]

ENVELOPE_BYTES = 2048
_LOOK_EVERY_S = 0.05


class IncomingStream:
    """Incoming stream from one rank: an envelope, the rest of the head, the bodies, then the next envelope.

    Attributes:
        peer: The other rank.
        wanted: Tensors to receive next.
        work: The receives in flight; None after an error.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._envelope = torch.empty(ENVELOPE_BYTES, dtype=torch.uint8, device="cpu")
        self.wanted: list[torch.Tensor] = [self._envelope]
        self._begin: bytes = b""
        self._message: Envelope | None = None
        self.work: Work | None = None

    def arrived(self) -> Envelope | None:
        """Process the data of the completed receives. Return the message if it is complete.

        Raises:
            ValueError: The message is invalid, or there is not enough memory for it.
        """
        if self._message is None:
            (arrived,) = self.wanted
            self._begin += bytes(view_of(arrived))
            self._message, end = parse(self.peer, self._begin)
            if self._message is None:
                self.wanted = [torch.empty(end - len(self._begin), dtype=torch.uint8, device="cpu")]
                return None
            self._begin = b""
            self.wanted = [body for body in self._message.bodies if body.numel()]
            if self.wanted:
                return None
        message = self._message
        self._message = None
        self.wanted = [self._envelope]
        return message


class PointToPointMailbox(Mailbox):
    """Mailbox that uses one stream of tag-0 messages per ordered pair of ranks.

    Each message is an envelope of 2 KiB, followed by the bytes that do not fit into it. A mailbox's messages all pass
    through the transport's `post`, so wrappers of the transport see them. Cost: two thread switches per message, in
    addition to the transport's own cost.

    Args:
        transport: Transport of a separate group, for this mailbox only; closed with the mailbox.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.group)
        self._transport = transport
        self._bell: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._locks = [threading.Lock() for _ in range(transport.size)]
        self._incoming = {peer: IncomingStream(peer) for peer in range(transport.size) if peer != transport.rank}
        # Some transports connect two ranks at their first message, and connect one pair at a time, so use the same
        # order of pairs on all ranks: in each round, the pairs whose ranks have the same sum, modulo the size.
        for total in range(transport.size):
            peer = (total - transport.rank) % transport.size
            if peer != transport.rank:
                hello = torch.zeros(2, 1, dtype=torch.uint8, device="cpu")
                transport.post([Recv(hello[0], peer), Send(hello[1], peer)]).wait()
        for incoming in self._incoming.values():
            self._post(incoming)

    def _post(self, incoming: IncomingStream) -> None:
        incoming.work = self._transport.post([Recv(tensor, incoming.peer) for tensor in incoming.wanted])
        peer = incoming.peer
        incoming.work.get_future().add_done_callback(lambda _: self._bell.put(peer))

    def send(self, peer: int, head: bytes, bodies: Sequence[torch.Tensor], timeout: float) -> None:
        frame = pack(head, bodies)
        batch: list[Message] = [Send(_tensor(frame[:ENVELOPE_BYTES].ljust(ENVELOPE_BYTES, b"\0")), peer)]
        if len(frame) > ENVELOPE_BYTES:
            batch.append(Send(_tensor(frame[ENVELOPE_BYTES:]), peer))
        batch += [Send(body, peer) for body in bodies if body.numel()]
        self.check(peer)
        # Messages from one rank to another arrive in posting order, so post the whole batch at once.
        with self._locks[peer]:
            work = self._transport.post(batch)
        try:
            self._wait_for(work, peer, timeout)
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
            # After an interrupt, the message may or may not arrive, so no message can follow it. After a timeout, by
            # contrast, posted messages remain in flight.
            self.abort_message(peer, error)
            raise

    def _wait_for(self, work: Work, peer: int, timeout: float) -> None:
        deadline = clock.now() + timeout
        patience = min(timeout, _LOOK_EVERY_S)
        while True:
            try:
                return work.wait(patience)
            except CommTimeoutError:
                self.on_stall()
                self.check(peer)
                patience = min(deadline - clock.now(), _LOOK_EVERY_S)
                if patience <= 0:
                    raise
            except CommError as error:
                # The peer has closed its end, or is about to be reported as lost.
                self.mark_lost(peer, error)
                raise PeerLostError(f"rank {peer} has left: {error.message}", peer=peer) from error

    def poll(self) -> list[Envelope]:
        mails: list[Envelope] = []
        # Only what has arrived so far, because receives posted here may complete immediately.
        for _ in range(self._bell.qsize()):
            try:
                peer = self._bell.get_nowait()
            except queue.Empty:
                # Meanwhile, `wait` in another thread has taken an item, which it puts back.
                break
            if peer >= 0:
                self._advance(self._incoming[peer], mails)
        return mails

    def _advance(self, incoming: IncomingStream, mails: list[Envelope]) -> None:
        if self.closed or incoming.peer in self.lost or incoming.work is None:
            return
        error = incoming.work.exception()
        if error is not None:
            incoming.work = None
            self.mark_lost(incoming.peer, error)
            return
        try:
            mail = incoming.arrived()
            self._post(incoming)
        except (CommError, ValueError, RuntimeError, MemoryError) as failure:
            self.mark_lost(incoming.peer, failure)
            return
        if mail is not None:
            mails.append(mail)

    def wait(self, timeout: float) -> None:
        with suppress(queue.Empty):
            # Put the peer back for `poll`. The order of peers does not matter, and no peer is in the queue twice.
            self._bell.put(self._bell.get(timeout=max(timeout, 0.0)))

    def wake(self) -> None:
        # A finalizer may call `wake`, because a SimpleQueue's `put` is reentrant.
        self._bell.put(-1)

    def release(self) -> None:
        self._transport.close()


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def open_mailbox(engine: Engine, number: int, metadata: Any) -> tuple[Mailbox, list[Any]]:
    """Return a mailbox, and the metadata that each rank passed. Collective.

    Args:
        engine: Engine of the communicator.
        number: Index of the mailbox among the communicator's mailboxes.
        metadata: See `Communicator.mailbox`.
    """
    control = engine.control
    timeout = engine.options.timeout_s
    group = engine.group.child(f"mail{number}", range(engine.group.size))
    transport = engine.transport.inner if isinstance(engine.transport, Checked) else engine.transport
    control.join(group)
    pairs: list[Group] = []
    box: Mailbox | None = None
    try:
        # Allocate only after all ranks have joined, so that no rank waits for a missing rank's memory.
        values = control.exchange(group, "cards", metadata, timeout)
        box = transport.mailbox(group)
        if box is None:
            box = PointToPointMailbox(transport.split(group))
        # The open mailbox keeps the engine and its control plane alive, whatever happens to the communicator.
        box.on_close = partial(_leave, engine, pairs)
        for peer in range(group.size):
            if peer != group.rank:
                pairs.append(_pair(group, peer))
                control.join(pairs[-1], _loser(box, peer, group))
        control.exchange(group, "mailboxes", None, timeout)
    except BaseException as error:
        if box is not None:
            box.close()
        control.report_failure(group, to_cause(error, group.rank, "mailbox"))
        raise
    finally:
        control.leave(group)
    return box, values


def _pair(group: Group, peer: int) -> Group:
    """Return a group of two ranks, which fails when one of them exits, without affecting other ranks."""
    low, high = sorted((group.rank, peer))
    return group.child(f"{low}-{high}", (low, high))


def _leave(engine: Engine, pairs: Sequence[Group]) -> None:
    for pair in pairs:
        engine.control.leave(pair)


def _loser(box: Mailbox, peer: int, group: Group) -> Callable[[Cause], None]:
    """Return a function that marks a rank as lost, and does not keep the mailbox alive."""
    # Within the pair, ranks are numbered 0 and 1, so the text of the pair's cause would name the wrong ranks.
    reason = Cause(
        "PeerLostError", peer, f"rank {peer} was lost: its process ended or failed, or the connection to it broke"
    )
    mark_lost = weak_method(box.mark_lost)
    return lambda cause: mark_lost(peer, error_of(reason, group))
