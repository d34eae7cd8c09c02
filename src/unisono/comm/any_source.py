"""Any-source receives: each is queued until a message arrives, and then becomes a receive from its sender."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from unisono.comm.engine import Engine
from unisono.core.threads import DaemonThreadPool
from unisono.core.types import Timeout, Work
from unisono.core.work import Completion, resolve_timeout
from unisono.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["AnySource", "Matching"]

_FOREVER_S = 1e9
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 0.01
_TAGS = 256
_NAMED = 8


class AnySource:
    """Queue of one communicator's any-source receives, which probes the transport for ranks that have sent.

    Receives of one tag are served in the order of calls. Of several ranks that have sent, the rank that follows the
    last match of this tag is chosen, so that no rank starves the others.

    Attributes:
        crew: Completes the receives with a requested future.
    """

    def __init__(self, engine: Engine) -> None:
        # An item that is served may call back, and that may call the communicator.
        self._engine, self._lock = engine, threading.RLock()
        self.crew = DaemonThreadPool(f"unisono receives {engine.group.name}")
        self._lines: dict[int, deque[Matching]] = {}
        self._found: dict[int, int] = {}

    def join(self, tag: int, src: int | None, begin: Callable[[int], Work]) -> Matching:
        """Return a work that calls `begin` with the sender of the first unmatched message, and then wraps its result.

        Args:
            tag: Tag of the message.
            src: The sender's rank; any rank if None.
            begin: Called while the queue is locked.
        """
        peers = [src] if src is not None else list(range(self._engine.group.size))
        work = Matching(self, tag, peers, begin, self._engine.options.timeout_s)
        with self._lock:
            self._lines.setdefault(tag, deque()).append(work)
        return work

    def leave(self, work: Matching) -> bool:
        """Remove a work from the queue; return whether it was there."""
        with self._lock:
            line = self._lines.get(work.tag, deque())
            found = work in line
            if found:
                line.remove(work)
            if not line:
                self._lines.pop(work.tag, None)
            return found

    def serve(self, tag: int) -> None:
        """Start the receives that have a sender now; fail all of the tag if no message can arrive any more."""
        with self._lock:
            line = self._lines.get(tag, deque())
            try:
                while line and (peer := self._sender(tag, line[0].peers)) is not None:
                    line[0].begin(peer)
                    line.popleft()
            except CommError as error:
                while line:
                    line.popleft().fail(error)
            if not line:
                self._lines.pop(tag, None)

    def _sender(self, tag: int, peers: list[int]) -> int | None:
        engine, lost = self._engine, list[PeerLostError]()
        engine.check("recv")
        # Tags that are equal modulo 256 share a place: a program may use each tag once.
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
        """Return these ranks but this one."""
        return [peer for peer in peers if peer != self._engine.group.rank]


class Matching(Work):
    """Queued any-source receive; a wait, or a test, serves the queue."""

    def __init__(
        self, line: AnySource, tag: int, peers: list[int], begin: Callable[[int], Work], timeout_s: float
    ) -> None:
        self.tag, self.peers = tag, peers
        self._line, self._begin, self._timeout_s = line, begin, timeout_s
        self._source = -1
        self._begun: Work | None = None

    def begin(self, peer: int) -> None:
        """Start the receive of a message from this rank."""
        self._source, self._begun = peer, self._begin(peer)

    def fail(self, error: CommError) -> None:
        """Complete with an error: no message will arrive."""
        failed = Completion(0.0)
        failed.complete(error)
        self._begun = failed

    def wait(self, timeout: Timeout | None = None) -> None:
        started, limit = time.monotonic(), resolve_timeout(timeout, self._timeout_s)
        while (begun := self._served()) is None:
            waited = time.monotonic() - started
            if waited >= limit:
                raise self._late(waited)
            time.sleep(min(limit - waited, max(_SHORTEST_NAP_S, min(waited / 8, _LONGEST_NAP_S))))
        begun.wait(max(0.0, started + limit - time.monotonic()))

    def _served(self) -> Work | None:
        if self._begun is None:
            self._line.serve(self.tag)
        return self._begun

    def _late(self, waited_s: float) -> CommTimeoutError:
        # A rank that waits cannot send to itself.
        peers = self._line.without_oneself(self.peers) or self.peers
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
        told = Completion(_FOREVER_S)

        def see_through() -> None:
            try:
                self.wait(_FOREVER_S)
            except Exception as error:
                told.complete(error)
            else:
                told.complete()

        self._line.crew.run(see_through)
        return told.get_future()

    def cancel(self) -> bool:
        return self._line.leave(self)
