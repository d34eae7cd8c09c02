"""Users' messages over gloo, in envelopes, so that a size mismatch is an error and does not end the process."""

from __future__ import annotations

import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from unisono.core.group import Group
from unisono.core.threads import DaemonThreadPool
from unisono.core.types import Message, Recv, Send, Work
from unisono.core.work import CountdownWork, elements, size_error
from unisono.errors import CommTimeoutError
from unisono.transports.torch.errors import translated

__all__ = ["Envelopes"]

_HEADER = struct.Struct("<q24s")
_ENVELOPE_BYTES = 4096
_INLINE_BYTES = _ENVELOPE_BYTES - _HEADER.size
_FIRST_TAG = (1 << 28) + 1
_DAY = timedelta(days=1)

_Stream = tuple[type[Message], int, int]


class Envelopes:
    """Messages in envelopes of 4 KiB, with length, dtype and up to 4064 bytes, and a rest for longer ones.

    Gloo's waits cannot be interrupted or retried, and its sends may wait for a connection that the
    peer makes only when it receives. So threads run both, one for each peer, tag and direction, and
    complete the user's works.

    Args:
        group: The ranks.
        start: Starts torch's own work of a message, with a tag of torch's.
        timeout_s: Default timeout in seconds.
    """

    def __init__(self, group: Group, start: Callable[[Message, int], Any], timeout_s: float) -> None:
        self._rank, self._start, self._timeout_s = group.rank, start, timeout_s
        self._threads = DaemonThreadPool(f"unisono messages {group.name}")
        self._lock = threading.Lock()
        self._streams: defaultdict[_Stream, deque[tuple[Message, CountdownWork]]] = defaultdict(deque)
        self._open: set[CountdownWork] = set()
        self._ahead: dict[_Stream, Future[torch.Tensor]] = {}

    def post(self, batch: Sequence[Message]) -> Work:
        work = CountdownWork(self._timeout_s, batch)
        with self._lock:
            self._open.add(work)
        work.when_done(lambda: self._open.discard(work))
        for message in batch:
            self._enqueue(message, work)
        return work

    def iprobe(self, peer: int, tag: int) -> bool:
        """As `Transport.iprobe`. Gloo has no probe: an envelope is received, and kept for the next receive.

        Until it arrives, that takes a thread for each rank and tag probed.
        """
        stream = (Recv, peer, tag)
        with self._lock:
            if stream in self._streams:
                return False
            if stream not in self._ahead:
                self._ahead[stream] = Future()
                self._threads.run(partial(self._fetch, peer, tag, self._ahead[stream]))
            if not self._ahead[stream].done():
                return False
            error = self._ahead[stream].exception()
            if isinstance(error, CommTimeoutError):
                # The peer has not connected yet.
                del self._ahead[stream]
        if error is not None and not isinstance(error, CommTimeoutError):
            raise error
        return error is None

    def close(self, cause: BaseException) -> None:
        """Fail all works that are not done."""
        with self._lock:
            left = list(self._open)
        for work in left:
            work.complete(cause)

    # -- the threads ---------------------------------------------------------------------------
    def _enqueue(self, message: Message, work: CountdownWork) -> None:
        """Queue a message. A stream is served in order, by one thread at a time."""
        stream = (type(message), message.peer, message.tag)
        with self._lock:
            waiting = self._streams[stream]
            waiting.append((message, work))
            served = len(waiting) > 1
        if not served:
            self._threads.run(lambda: self._serve(stream))

    def _serve(self, stream: _Stream) -> None:
        while True:
            with self._lock:
                message, work = self._streams[stream][0]
            try:
                error = self._give(message) if isinstance(message, Send) else self._take(message)
            except Exception as raised:
                error = raised
            if error is None:
                work.arrived(message)
            else:
                work.complete(error)
            with self._lock:
                self._streams[stream].popleft()
                if not self._streams[stream]:
                    del self._streams[stream]
                    return

    def _give(self, message: Send) -> BaseException | None:
        tensor, tag = message.tensor, _FIRST_TAG + 2 * message.tag
        envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8, device="cpu")
        header = _HEADER.pack(tensor.numel(), str(tensor.dtype).removeprefix("torch.").encode())
        envelope[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        inline = tensor.nbytes <= _INLINE_BYTES
        if inline:
            envelope[_HEADER.size : _HEADER.size + tensor.nbytes] = tensor.view(torch.uint8)
        started = [self._start(Send(envelope, message.peer), tag)]
        if not inline:
            started.append(self._start(message, tag + 1))
        return self._wait(started, message)

    def _take(self, message: Recv) -> BaseException | None:
        tensor, tag = message.tensor, _FIRST_TAG + 2 * message.tag
        with self._lock:
            ahead = self._ahead.pop((Recv, message.peer, message.tag), None)
        envelope = self._envelope(message.peer, message.tag) if ahead is None else ahead.result()
        numel, name = _HEADER.unpack(bytes(envelope[: _HEADER.size].tolist()))
        sent = elements(numel, name.rstrip(b"\0").decode())
        expected = elements(tensor.numel(), str(tensor.dtype))
        if sent != expected:
            return size_error(message.peer, sent, self._rank, expected, message.tag, message.peer)
        if tensor.nbytes <= _INLINE_BYTES:
            tensor.view(torch.uint8).copy_(envelope[_HEADER.size : _HEADER.size + tensor.nbytes])
            return None
        return self._wait([self._start(message, tag + 1)], message)

    def _fetch(self, peer: int, tag: int, ahead: Future[torch.Tensor]) -> None:
        try:
            ahead.set_result(self._envelope(peer, tag))
        except Exception as error:
            ahead.set_exception(error)

    def _envelope(self, peer: int, tag: int) -> torch.Tensor:
        """Receive the next envelope of a stream."""
        envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8, device="cpu")
        message = Recv(envelope, peer, tag)
        error = self._wait([self._start(message, _FIRST_TAG + 2 * tag)], message)
        if error is not None:
            raise error
        return envelope

    def _wait(self, started: list[Any], message: Message) -> BaseException | None:
        for work in started:
            try:
                work.wait(_DAY)
            except RuntimeError as error:
                return translated(error, [message])
        return None
