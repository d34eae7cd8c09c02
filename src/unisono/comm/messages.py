"""Point-to-point messages of a communicator: argument checks, `Work` handles, and receives from any source."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from unisono.collectives.arguments import check_rank
from unisono.comm.engine import Engine
from unisono.core import clock
from unisono.core.failure import raise_caused
from unisono.core.flight_recorder import PendingMessage, Place, callers_place
from unisono.core.staging import Staging
from unisono.core.tensors import Buffer, check_tensor
from unisono.core.tracing import observed_now, span
from unisono.core.types import MAX_TAG, Message, Recv, Timeout, Work
from unisono.core.work import ChainedWork, Completion, Deferred, format_bytes, resolve_timeout
from unisono.diagnostics.hang_report import with_hang_report
from unisono.errors import CommError, CommTimeoutError, PeerLostError
from unisono.wrappers.trace import traced

__all__ = ["AnySource", "Matching", "Messages", "PointToPointWork"]

_FOREVER_S = 1e9
_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 0.01
_TAGS = 256
_NAMED = 8


class AnySource:
    """Queue of one communicator's any-source receives, which probes the transport for ranks that have sent.

    Receives with the same tag are served in call order. If several ranks have sent, they are served round-robin, so
    that no rank starves the others.
    """

    def __init__(self, engine: Engine) -> None:
        # The lock is reentrant, because serving a receive may run callbacks that call the communicator.
        self._engine = engine
        self._lock = threading.RLock()
        self._queues: dict[int, deque[Matching]] = {}
        self._found: dict[int, int] = {}

    def join(self, tag: int, src: int | None, begin: Callable[[int], Work]) -> Matching:
        """Queue a receive, and return its `Work`. Once a message has arrived, `begin` receives it from its sender.

        Args:
            tag: Tag of the message.
            src: The sender's rank; any rank if None.
            begin: Function that starts the receive from a given sender, and returns its `Work`; called while the queue
                is locked.
        """
        peers = [src] if src is not None else list(range(self._engine.group.size))
        work = Matching(self, tag, peers, begin, self._engine.options.timeout_s)
        with self._lock:
            self._queues.setdefault(tag, deque()).append(work)
        return work

    def leave(self, work: Matching) -> bool:
        """Remove a receive from the queue; return whether it was still there."""
        with self._lock:
            queue = self._queues.get(work.tag, deque())
            found = work in queue
            if found:
                queue.remove(work)
            if not queue:
                self._queues.pop(work.tag, None)
            return found

    def serve(self, tag: int) -> None:
        """Start the receives with tag `tag` that have a sender now; fail the others if no more messages can arrive."""
        with self._lock:
            queue = self._queues.get(tag, deque())
            try:
                while queue and (peer := self._sender(tag, queue[0].peers)) is not None:
                    queue[0].begin(peer)
                    queue.popleft()
            except CommError as error:
                while queue:
                    queue.popleft().fail(error)
            if not queue:
                self._queues.pop(tag, None)

    def _sender(self, tag: int, peers: list[int]) -> int | None:
        engine = self._engine
        lost = list[PeerLostError]()
        engine.failures.check("recv")
        # Tags that are equal modulo 256 share a slot, so the table stays small even if a program uses a new tag for
        # every message.
        last = self._found.get(tag % _TAGS, -1)
        for peer in [peer for peer in peers if peer > last] + [peer for peer in peers if peer <= last]:
            try:
                if engine.transport.iprobe(peer, tag):
                    if len(peers) > 1:
                        self._found[tag % _TAGS] = peer
                    return peer
            except PeerLostError as error:
                lost.append(error)
        if lost and len(lost) == len(self.without_oneself(peers)):
            raise lost[0]
        return None

    def without_oneself(self, peers: list[int]) -> list[int]:
        """Return the given ranks except this rank."""
        return [peer for peer in peers if peer != self._engine.group.rank]


class Matching(Work):
    """Queued any-source receive; waiting for it, or testing it, starts queued receives that have a sender."""

    def __init__(
        self, queue: AnySource, tag: int, peers: list[int], begin: Callable[[int], Work], timeout_s: float
    ) -> None:
        self.tag = tag
        self.peers = peers
        self._queue = queue
        self._begin = begin
        self._timeout_s = timeout_s
        self._source = -1
        self._begun: Work | None = None

    def begin(self, peer: int) -> None:
        """Start the receive of a message from rank `peer`."""
        self._source = peer
        self._begun = self._begin(peer)

    def fail(self, error: CommError) -> None:
        """Complete with an error, because no message will arrive."""
        self._begun = Completion.ended(error)

    def wait(self, timeout: Timeout | None = None) -> None:
        started = clock.now()
        limit = resolve_timeout(timeout, self._timeout_s)
        while (begun := self._served()) is None:
            waited = clock.now() - started
            if waited >= limit:
                raise self._late(waited)
            time.sleep(min(limit - waited, max(_SHORTEST_NAP_S, min(waited / 8, _LONGEST_NAP_S))))
        begun.wait(max(0.0, started + limit - clock.now()))

    def _served(self) -> Work | None:
        if self._begun is None:
            self._queue.serve(self.tag)
        return self._begun

    def _late(self, waited_s: float) -> CommTimeoutError:
        # Leave this rank out of the error message: while it waits, it cannot send to itself.
        peers = self._queue.without_oneself(self.peers) or self.peers
        more = f" and {len(peers) - _NAMED} more" if len(peers) > _NAMED else ""
        ranks = f"{'ranks' if len(peers) > 1 else 'rank'} {', '.join(map(str, peers[:_NAMED]))}{more}"
        return CommTimeoutError(
            f"waited {waited_s:.1f} s for a message with tag {self.tag} from {ranks}, and none arrived. Is the sender "
            "alive, or did it skip a call?",
            peer=peers[0] if len(peers) == 1 else None,
            waited_s=waited_s,
        )

    def source_rank(self) -> int:
        return self._source

    def is_completed(self) -> bool:
        begun = self._served()
        return begun is not None and begun.is_completed()

    def exception(self) -> BaseException | None:
        return None if self._begun is None else self._begun.exception()

    def get_future(self) -> torch.futures.Future[None]:
        return Deferred(lambda _: self.wait(_FOREVER_S), _FOREVER_S).get_future()

    def cancel(self) -> bool:
        return self._queue.leave(self)


class PointToPointWork(ChainedWork):
    """Wraps a transport's `Work`: names the call in its errors, and runs actions when it ends."""

    def __init__(
        self,
        engine: Engine,
        record: tuple[str, None, str, Place],
        awaited: tuple[PendingMessage, ...],
        inner: Work,
        staging: Staging,
    ) -> None:
        # Messages are numbered separately from collectives, because ranks may send different numbers of messages.
        failed = partial(engine.failures.report, operation=record[0], call=engine.activity.messages)
        super().__init__(inner, partial(_end, staging, failed), failed)
        self._engine = engine
        self._record = record
        self._awaited = awaited
        self._number = engine.activity.messages

    def wait(self, timeout: Timeout | None = None) -> None:
        if timeout is None:
            return self.wait_or_break(None)
        limit = resolve_timeout(timeout)
        with self._seen():
            try:
                self._inner.wait(limit)
            except CommError as error:
                engine = self._engine
                if engine.life.cause is not None or not isinstance(error, CommTimeoutError):
                    raise_caused(self._translate(error), error)
                # The message may still arrive, so a wait with an explicit timeout does not break the communicator.
                enriched = with_hang_report(error, engine.control, engine.group)
                assert isinstance(enriched, CommError)
                raise engine.failures.with_context(enriched, self._record[0], self._number) from None
        self._finish()

    def wait_or_break(self, timeout: Timeout | None) -> None:
        """Wait; any failure, including a timeout, breaks the communicator."""
        with self._seen():
            try:
                self._inner.wait(resolve_timeout(timeout, self._engine.options.timeout_s))
            except BaseException as error:
                raise_caused(self._translate(error), error)
        self._finish()

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Make the messages that this rank waits for visible in reports."""
        activity = self._engine.activity
        activity.enter(*self._record, self._awaited)
        try:
            with span("wait", self._record[0], self._engine.group) if observed_now() else nullcontext():
                yield
        finally:
            activity.leave()

    def source_rank(self) -> int:
        return next((peer for kind, peer, *_ in self._awaited if kind == "recv"), self._inner.source_rank())


def _end(staging: Staging, failed: Callable[[BaseException], BaseException]) -> None:
    """Put the received data in place. After an error, a later wait does not try again."""
    with torch.no_grad(), staging.entered():
        try:
            staging.end()
        except CommError as error:
            staging.after.clear()
            raise_caused(failed(error), error)


class Messages:
    """Point-to-point messages of one communicator, on a separate channel, so they never match a collective's messages.

    Args:
        engine: Engine of the communicator.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._any_source = AnySource(engine)

    def post(self, operation: str, messages: Sequence[Message]) -> PointToPointWork:
        """Start messages in one call.

        Args:
            operation: Name of the method, for error messages.
            messages: Messages with the caller's buffers; at least one.
        """
        engine = self._engine
        engine.enter(operation)
        staging = engine.staging()
        flat = list[Message]()
        for message in messages:
            receives = isinstance(message, Recv)
            name = "src" if receives else "dst"
            check_rank(message.peer, name, self._engine.group.size)
            self._check_tag(message.tag)
            tensor = check_tensor(message.tensor, "the tensor", engine.transport.devices, written=receives)
            buffer = staging.flat(tensor, read=not receives, write=receives)
            if receives and isinstance(message.tensor, list):
                staging.write_back(message.tensor, tensor)
            flat.append(type(message)(buffer, message.peer, message.tag))
        record = self._note(operation, flat)
        awaited, work = self._start(flat, staging)
        return self._returned(record, awaited, work, staging)

    def receive(self, operation: str, tensor: Buffer, src: int | None, tag: int) -> PointToPointWork:
        """Start a receive, from any rank if `src` is None.

        Args:
            operation: Name of the method, for error messages.
            tensor, src, tag: See `Communicator.recv`.
        """
        if src is not None:
            return self.post(operation, [Recv(tensor, src, tag)])
        self._engine.enter(operation)
        self._check_source(None, tag)
        found = check_tensor(tensor, "the tensor", self._engine.transport.devices, written=True)
        staging = self._engine.staging()
        buffer = staging.flat(found, read=False, write=True)
        if isinstance(tensor, list):
            staging.write_back(tensor, found)
        record = self._note(operation, [Recv(buffer, -1, tag)])
        work = self._any_source.join(tag, None, lambda peer: self._start([Recv(buffer, peer, tag)], staging)[1])
        return self._returned(record, (), work, staging)

    def _note(self, operation: str, messages: Sequence[Message]) -> tuple[str, None, str, Place]:
        """Record a batch for reports; return the arguments for `Activity.enter`."""
        record = operation, None, _detail(messages), callers_place()
        self._engine.activity.note(*record)
        return record

    def _start(self, messages: Sequence[Message], staging: Staging) -> tuple[tuple[PendingMessage, ...], Work]:
        activity = self._engine.activity
        awaited = tuple(activity.post("recv" if isinstance(m, Recv) else "send", m.peer, m.tag) for m in messages)
        with torch.no_grad(), staging.entered():
            staging.begin()
            return awaited, traced(self._engine.transport, awaited).post(messages)

    def _check_source(self, src: int | None, tag: int) -> None:
        self._check_tag(tag)
        if not self._engine.transport.any_source:
            raise ValueError(
                "this backend cannot receive from any source: pass the sender's rank, as in recv(tensor, src=...)"
            )
        if src is not None:
            check_rank(src, "src", self._engine.group.size)

    def _check_tag(self, tag: int) -> None:
        if not isinstance(tag, int) or isinstance(tag, bool):
            raise TypeError(f"tag must be an int, not {type(tag).__name__}")
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag={tag} is out of range; tags are 0 to {MAX_TAG}")
        if tag and not self._engine.transport.tags:
            raise ValueError(f"this backend has no tags: messages match in order. Use tag=0, not {tag}")

    def probe(self, operation: str, src: int | None, tag: int) -> PointToPointWork:
        """Return a `Work` that completes when a message has arrived, from any rank if `src` is None.

        Args:
            operation: Name of the method, for error messages.
            src, tag: See `Communicator.probe`.
        """
        self._engine.enter(operation)
        self._check_source(src, tag)
        record = operation, None, f"tag {tag}", callers_place()
        # A probe is complete once it has found a message.
        return self._returned(record, (), self._any_source.join(tag, src, lambda _: Completion.ended()), Staging())

    def _returned(
        self,
        record: tuple[str, None, str, Place],
        awaited: tuple[PendingMessage, ...],
        work: Work,
        staging: Staging,
    ) -> PointToPointWork:
        return PointToPointWork(self._engine, record, awaited, self._engine.transport.returned(work), staging)


def _detail(messages: Sequence[Message]) -> str:
    """Return a short description of the messages."""
    first = messages[0]
    more = len(messages) - 1
    peer = f"rank {first.peer}" if first.peer >= 0 else "any rank"
    way = f"{'from' if isinstance(first, Recv) else 'to'} {peer}"
    tag = f", tag {first.tag}" if first.tag else ""
    return f"{way}{tag}, {format_bytes(first.tensor.nbytes)}{f', and {more} more' if more else ''}"
