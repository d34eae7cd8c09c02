"""Things that go wrong on purpose: messages that never arrive, or arrive late, and ranks that die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from random import Random

import torch

from unisono.crew import Crew
from unisono.errors import ClosedError
from unisono.transport import Transport
from unisono.types import Message, Send, Work
from unisono.work import Completion, Countdown
from unisono.wrappers.wrapper import Wrapper

__all__ = ["Faulty", "KilledError"]


class KilledError(Exception):
    """Raised in a rank that `Faulty` has killed, where ranks are threads: a process would be gone."""


class Faulty(Wrapper):
    """Loses and delays messages by chance, and ends this rank at a given moment. Repeatable by its seed.

    What becomes of a message follows from the seed, the group, both ranks, the tag, and which message of
    these it is: so a run can be repeated, whatever the timing. Native collectives are hidden; those that
    are put together from messages suffer with them.

    Args:
        inner: The transport to make worse.
        seed: Of all chances.
        drop: Chance that a message never arrives. Its sender believes that it did.
        delay: Chance that a message is sent later. Those of the same tag to the same rank queue behind it.
        delay_s: How much later, in seconds.
        kill_at: At which `post`, counted from 1 in each group, the rank ends: by SIGKILL, or by
            `KilledError` where ranks are threads. Never if None.

    Example:
        >>> def program(comm):
        ...     t = torch.ones(2)
        ...     comm.all_reduce(t)
        ...     return t.tolist()
        >>> un.launch(program, 2, "thread", wrap=lambda inner: Faulty(inner, seed=1, delay=0.5, delay_s=0.01))
        [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        inner: Transport,
        *,
        seed: int,
        drop: float = 0.0,
        delay: float = 0.0,
        delay_s: float = 0.02,
        kill_at: int | None = None,
    ) -> None:
        super().__init__(inner)
        for name, chance in (("drop", drop), ("delay", delay)):
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is a chance from 0 to 1, not {chance!r}")
        if delay_s < 0 or (kill_at is not None and kill_at < 1):
            raise ValueError(f"delay_s must not be negative, and kill_at counts from 1: not {delay_s!r}, {kill_at!r}")
        self._seed, self._drop, self._delay, self._delay_s, self._kill_at = seed, drop, delay, delay_s, kill_at
        self._posts = 0
        self._sent: Counter[tuple[int, int]] = Counter()
        self._late = _Late(inner)

    def rewrap(self, inner: Transport) -> Faulty:
        return Faulty(
            inner,
            seed=self._seed,
            drop=self._drop,
            delay=self._delay,
            delay_s=self._delay_s,
            kill_at=self._kill_at,
        )

    def post(self, batch: Sequence[Message]) -> Work:
        self._posts += 1
        if self._posts == self._kill_at:
            self._die()
        if not self._drop and not self._delay:
            return self.inner.post(batch)
        prompt: list[Message] = []
        late: list[tuple[Send, float]] = []
        held: set[tuple[int, int]] = set()
        for message in batch:
            if not isinstance(message, Send):
                prompt.append(message)
                continue
            lost, delayed = self._fate(message)
            if lost:
                continue
            stream = (message.peer, message.tag)
            if delayed or stream in held or self._late.queued(stream):
                held.add(stream)
                late.append((message, self._delay_s if delayed else 0.0))
            else:
                prompt.append(message)
        # Receives first: what is waited for must not stand behind what is late.
        posted = self.inner.post(prompt)
        return _Joined([posted, self._late.post(late)]) if late else posted

    def _fate(self, message: Send) -> tuple[bool, bool]:
        """Whether the message is lost, and whether it is late."""
        stream = (message.peer, message.tag)
        self._sent[stream] += 1
        chance = Random(f"{self._seed} {self.group.name} {self.rank} {stream} {self._sent[stream]}")
        return chance.random() < self._drop, chance.random() < self._delay

    def _die(self) -> None:
        inner = self.inner
        while isinstance(inner, Wrapper):
            inner = inner.inner
        if not inner.in_process:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KilledError(f"rank {self.rank} of {self.size} was killed at its post {self._posts}, as asked")

    def close(self) -> None:
        self._late.stop(ClosedError("the communicator was closed"))
        super().close()

    def abort(self, cause: BaseException) -> None:
        self._late.stop(cause)
        super().abort(cause)


class _Late:
    """Sends that wait for their time, those to one rank with one tag in order."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._crew = Crew(f"unisono late messages {inner.group.name}")
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, int], deque[tuple[Send, float, Countdown]]] = {}
        self._stopped = threading.Event()
        self._cause: BaseException | None = None

    def queued(self, stream: tuple[int, int]) -> bool:
        """Whether a message to this rank with this tag has not been sent yet."""
        with self._lock:
            return stream in self._streams

    def post(self, sends: Sequence[tuple[Send, float]]) -> Work:
        """Send each of these so many seconds later."""
        # Every send ends by itself, at the latest by the inner transport's timeout.
        work = Countdown(threading.TIMEOUT_MAX, [send for send, _ in sends])
        for send, later_s in sends:
            stream = (send.peer, send.tag)
            with self._lock:
                waiting = self._streams.setdefault(stream, deque())
                waiting.append((send, time.monotonic() + later_s, work))
                served = len(waiting) > 1
            if not served:
                self._crew.run(lambda stream=stream: self._serve(stream))  # type: ignore[misc]
        return work

    def _serve(self, stream: tuple[int, int]) -> None:
        while True:
            with self._lock:
                send, due, work = self._streams[stream][0]
            self._stopped.wait(max(0.0, due - time.monotonic()))
            try:
                if self._cause is not None:
                    raise self._cause
                self._inner.post([send]).wait()
            except BaseException as error:
                work.complete(error)
            else:
                work.arrived(send)
            with self._lock:
                self._streams[stream].popleft()
                if not self._streams[stream]:
                    del self._streams[stream]
                    return

    def stop(self, cause: BaseException) -> None:
        """End at once what has not been sent."""
        self._cause = self._cause or cause
        self._stopped.set()
        with self._lock:
            waiting = [work for stream in self._streams.values() for _, _, work in stream]
        for work in waiting:
            work.complete(self._cause)


class _Joined(Work):
    """Several works as one: done when all are, with the first error."""

    def __init__(self, parts: Sequence[Work]) -> None:
        self._parts = parts

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def is_completed(self) -> bool:
        return self.exception() is not None or all(part.is_completed() for part in self._parts)

    def exception(self) -> BaseException | None:
        return next((error for part in self._parts if (error := part.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[None]:
        done = Completion(threading.TIMEOUT_MAX)
        left = len(self._parts)
        lock = threading.Lock()

        def arrived(part: torch.futures.Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            try:
                part.value()
            except Exception as error:
                done.complete(error)
            if last:
                done.complete()

        for part in self._parts:
            part.get_future().add_done_callback(arrived)
        return done.get_future()
